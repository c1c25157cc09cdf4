"""How well a gate knows which cache drafts pay: precision, recall, AUC, calibration, beside the fixed rules.

The question is always the same: will at least `PAYOFF` tokens of this draft be accepted? A *gate* answers with a
number and says yes from its threshold on. Fixed rules are gates too: match length, score, and any match at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvd.training.dataset import PAYOFF, StateSet
from hvd.types import BoolArray, Float32Array, Float64Array, Int64Array

BINS = 10
_NAN = float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """Something that says which drafts pay.

    answer        float32 [N], one a state of the set; higher = surer
    threshold     it says yes where answer >= threshold
    probability   the answers claim to be P(payoff >= PAYOFF), so that calibration can be asked for
    """

    name: str
    answer: Float32Array
    threshold: float
    probability: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """NaN where a figure does not exist: no yes (precision), nothing that pays (recall), only one kind (auc)."""

    precision: float
    recall: float
    f1: float
    auc: float


@dataclass(frozen=True, slots=True)
class Bin:
    """States whose answer lies in [low, low + 1/BINS): how many, mean answer, share that did pay."""

    low: float
    states: int
    answer: float
    paid: float


@dataclass(frozen=True, slots=True)
class GateReport:
    """One gate on one set of states.

    micro            over all states
    macro            mean over data sets, of those where the figure exists
    best_threshold   the threshold with the best micro F1 on these very states (so a little flattered), and its scores
    ece              expected calibration error, 10 bins of equal width; NaN for rules that claim no probability
    """

    name: str
    threshold: float
    micro: Scores
    macro: Scores
    best_threshold: float
    best: Scores
    ece: float
    calibration: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class StatesReport:
    """All gates on one kind of states. `paying`: share of states with a payoff of at least PAYOFF."""

    kind: str
    states: int
    paying: float
    datasets: tuple[str, ...]
    gates: tuple[GateReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; NaN becomes None."""
        tree: dict[str, Any] = without_nan(asdict(self))
        return tree


def fixed_rules(states: StateSet) -> list[Gate]:
    """The rules of other systems, and thresholds around them (METHOD.md names whose they are)."""
    match, score = states.match_len.astype(np.float32), states.score
    rules = [Gate("any-match", np.ones(len(states), np.float32), 1.0)]
    rules += [Gate(f"match-len {n}", match, float(n)) for n in (4, 5, 8, 12, 16)]
    rules += [Gate(f"score {n}", score, float(n)) for n in (3, 6, 12)]
    return rules


def judge(states: StateSet, rows: Int64Array, gates: Sequence[Gate], kind: str) -> StatesReport:
    """All gates on the chosen states."""
    paid = states.payoff[rows] >= PAYOFF
    dataset = states.dataset[rows]
    names = tuple(states.datasets[i] for i in np.unique(dataset))
    reports = tuple(_judge(gate, gate.answer[rows], paid, dataset) for gate in gates)
    return StatesReport(kind, len(rows), float(paid.mean()) if len(rows) else _NAN, names, reports)


def _judge(gate: Gate, answer: Float32Array, paid: BoolArray, dataset: np.ndarray) -> GateReport:
    each = [scores(answer[dataset == i], paid[dataset == i], gate.threshold) for i in np.unique(dataset)]
    best = best_threshold(answer, paid)
    bins = calibration(answer, paid) if gate.probability else ()
    return GateReport(
        name=gate.name,
        threshold=gate.threshold,
        micro=scores(answer, paid, gate.threshold),
        macro=_mean(each),
        best_threshold=best,
        best=scores(answer, paid, best),
        ece=expected_calibration_error(bins),
        calibration=bins,
    )


def scores(answer: Float32Array, paid: BoolArray, threshold: float) -> Scores:
    """Precision, recall and F1 of `answer >= threshold`, and the AUC of the answer."""
    yes = answer >= threshold
    right = int((yes & paid).sum())
    precision = right / int(yes.sum()) if yes.any() else _NAN
    recall = right / int(paid.sum()) if paid.any() else _NAN
    f1 = 2 * right / (int(yes.sum()) + int(paid.sum())) if paid.any() else _NAN
    return Scores(precision, recall, f1, auc(answer, paid))


def auc(answer: Float32Array, paid: BoolArray) -> float:
    """Chance that a state that pays has a higher answer than one that does not; ties count half. NaN without both."""
    positive, negative = int(paid.sum()), int((~paid).sum())
    if not positive or not negative:
        return _NAN
    _, where, counts = np.unique(answer, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2.0  # mean rank of each group of ties, counted from 1
    total = float(rank[where][paid].sum())
    return (total - positive * (positive + 1) / 2.0) / (positive * negative)


def best_threshold(answer: Float32Array, paid: BoolArray) -> float:
    """The answer from which on saying yes gives the best F1; NaN when nothing pays."""
    if not paid.any():
        return _NAN
    order = np.argsort(-answer, kind="stable")
    falling, right = answer[order], np.cumsum(paid[order])
    f1: Float64Array = 2.0 * right / (np.arange(1, len(right) + 1) + int(paid.sum()))
    ends = np.append(falling[1:] != falling[:-1], True)  # a threshold takes in all ties
    return float(falling[np.flatnonzero(ends)[f1[ends].argmax()]])


def calibration(answer: Float32Array, paid: BoolArray) -> tuple[Bin, ...]:
    """The non-empty bins of probabilities."""
    place = np.clip((answer * BINS).astype(int), 0, BINS - 1)
    return tuple(
        Bin(i / BINS, int(here.sum()), float(answer[here].mean()), float(paid[here].mean()))
        for i in range(BINS)
        if (here := place == i).any()
    )


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """Mean distance between answer and outcome, weighted by states; NaN without bins."""
    total = sum(b.states for b in bins)
    return sum(b.states * abs(b.answer - b.paid) for b in bins) / total if total else _NAN


def without_nan(value: Any) -> Any:
    """A JSON tree with None for NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(each: Sequence[Scores]) -> Scores:
    def mean(values: list[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return sum(known) / len(known) if known else _NAN

    return Scores(*(mean([getattr(s, name) for s in each]) for name in ("precision", "recall", "f1", "auc")))
