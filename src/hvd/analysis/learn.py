"""Would a predictor trained on these very logs do better than the shipped one, on conversations it has not seen?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from hvd.analysis.encode import Asked
from hvd.analysis.study import counted, walked
from hvd.payoff.cost import CostModel
from hvd.payoff.hybrid import Hybrid
from hvd.payoff.predictor import Predictor, SurvivalPredictor
from hvd.training.dataset import StateSet
from hvd.training.fit import TrainOptions, fit
from hvd.training.replay import SimulatedHead
from hvd.training.simulate import Totals, play
from hvd.types import Float64Array, Int64Array

FOLDS = 3
LEAST_GROUPS = 12
LEAST_STATES = 1000
_VALID = 8
_WORTH = 0.005
_WIDE = 0.06
RESAMPLES = 1000


class Verdict(StrEnum):
    """What training on the logs adds."""

    YES = "yes"
    NO = "no"
    UNSURE = "too little data"


@dataclass(frozen=True, slots=True)
class Training:
    """The comparison.

    gain, low, high   tokens a second with the trained predictor over those with the shipped one, less 1, and its 95 %
                      interval (bootstrap over conversations); NaN when there was too little to try
    reason            one line for people
    file              the predictor that was written, or None
    """

    verdict: Verdict
    gain: float
    low: float
    high: float
    groups: int
    states: int
    reason: str
    file: str | None = None


Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class _Pair:
    """Seconds of one conversation with the shipped and with the trained predictor."""

    shipped: Totals = field(default_factory=Totals)
    trained: Totals = field(default_factory=Totals)


def compare(
    answers: Sequence[Asked],
    states: StateSet | None,
    shipped: SurvivalPredictor | None,
    cost: CostModel,
    head: SimulatedHead | None,
    options: TrainOptions,
    progress: Progress,
) -> Training:
    """Cross-validate by conversation: each is decoded with a predictor trained on the others."""
    groups, count = (len(states.groups), len(states)) if states is not None else (0, 0)
    if states is None or groups < LEAST_GROUPS or count < LEAST_STATES:
        least = f"at least {LEAST_GROUPS} conversations and {LEAST_STATES} states with a draft are needed"
        nan = float("nan")
        return Training(
            Verdict.UNSURE,
            nan,
            nan,
            nan,
            groups,
            count,
            f"{counted(groups, 'conversation')}, {counted(count, 'state')}: {least}",
        )
    folds = folds_of(states.groups)
    trained = [_fit_without(fold, states, folds, options, _of_fold(fold, progress)) for fold in range(FOLDS)]
    pairs = _play(answers, folds, shipped, trained, cost, head, progress)
    seconds = np.array([(pair.shipped.seconds, pair.trained.seconds) for pair in pairs.values()])
    gain, low, high = interval(seconds[:, 0], seconds[:, 1])
    verdict = decide(gain, low, high)
    return Training(verdict, gain, low, high, groups, count, _reason(verdict, low, high))


def decide(gain: float, low: float, high: float) -> Verdict:
    """Yes when even the interval's low end is worth it; unsure when the interval says nothing either way."""
    if low > _WORTH:
        return Verdict.YES
    return Verdict.UNSURE if high - low > _WIDE and high > _WORTH else Verdict.NO


def _reason(verdict: Verdict, low: float, high: float) -> str:
    if verdict is Verdict.YES:
        return "trained on these logs, it is faster on conversations that it has not seen"
    if verdict is Verdict.UNSURE:
        return "the interval is too wide to tell; give more conversations"
    if low <= 0.0 <= high:
        return "not shown: the interval includes zero"
    return f"the shipped predictor does {'better' if high < 0.0 else 'as well'} on these logs"


def _of_fold(fold: int, progress: Progress) -> Progress:
    return lambda what, done, total: progress(f"train, part {fold + 1} of {FOLDS}", done, total)


def fit_all(states: StateSet, options: TrainOptions, progress: Progress) -> Predictor:
    """A predictor of all states, every eighth conversation apart, by which it stops early."""
    part = np.array(_ranks(states.groups)) % _VALID == 0
    held = part[states.group]
    predictor, _ = fit("survival", states, np.flatnonzero(~held), np.flatnonzero(held), options, progress)
    return predictor


def interval(before: Float64Array, after: Float64Array, seed: int = 0) -> tuple[float, float, float]:
    """sum(before) / sum(after) - 1 over paired entries, float64 [n], with its 95 % bootstrap interval."""
    rng = np.random.default_rng(seed)
    n = len(before)
    ratios = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = rng.integers(0, n, n)
        ratios[i] = before[drawn].sum() / after[drawn].sum() - 1.0
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(before.sum() / after.sum() - 1.0), float(low), float(high)


def folds_of(groups: Sequence[str]) -> dict[str, int]:
    """Which fold each conversation falls into, by the hash of its name; folds differ by one in number at most."""
    return {group: rank % FOLDS for group, rank in zip(groups, _ranks(groups), strict=True)}


def _ranks(groups: Sequence[str]) -> list[int]:
    order = sorted(range(len(groups)), key=lambda i: hashlib.sha256(groups[i].encode()).digest())
    ranks = [0] * len(groups)
    for rank, i in enumerate(order):
        ranks[i] = rank
    return ranks


def _fit_without(
    fold: int, states: StateSet, folds: Mapping[str, int], options: TrainOptions, progress: Progress
) -> SurvivalPredictor:
    of_group = np.array([folds[group] for group in states.groups])
    valid_group = np.array(_ranks(states.groups)) // FOLDS % _VALID == 0
    others = of_group[states.group] != fold
    valid: Int64Array = np.flatnonzero(others & valid_group[states.group])
    train: Int64Array = np.flatnonzero(others & ~valid_group[states.group])
    predictor, _ = fit("survival", states, train, valid, options, progress)
    assert isinstance(predictor, SurvivalPredictor)
    return predictor


def _play(
    answers: Sequence[Asked],
    folds: Mapping[str, int],
    shipped: SurvivalPredictor | None,
    trained: Sequence[SurvivalPredictor],
    cost: CostModel,
    head: SimulatedHead | None,
    progress: Progress,
) -> dict[str, _Pair]:
    """Both predictors on each conversation. A policy learns as it goes, so each fold has its own pair of policies."""
    old = [Hybrid(shipped) for _ in trained]
    new = [Hybrid(predictor) for predictor in trained]
    pairs: dict[str, _Pair] = {}
    total, done = sum(len(asked.trace.response) for asked in answers), 0
    for asked, walk in walked(answers):
        done += len(asked.trace.response)
        fold = folds.get(walk.trace.group)
        if fold is not None:  # a conversation without a single draft is the same with every predictor
            pair = pairs.setdefault(walk.trace.group, _Pair())
            play(walk, old[fold], cost, head, pair.shipped)
            play(walk, new[fold], cost, head, pair.trained)
        progress("compare predictors", done, total)
    return pairs
