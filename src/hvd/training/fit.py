"""Trains the payoff predictors on traces: replay, fit, judge on requests held out, save. No model is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvd.config import SuffixConfig
from hvd.errors import ConfigError, TraceError
from hvd.payoff.cost import CostModel, Surface
from hvd.payoff.features import CONTEXT_NAMES, STATE_NAMES
from hvd.payoff.predictor import MLPWeights, Predictor, ScalarPredictor, SurvivalPredictor, save_predictor, sigmoid
from hvd.traces.reader import PathLike, read_traces
from hvd.traces.schema import Trace
from hvd.training.dataset import PAYOFF, Sampling, StateSet, collect_states, hold_out
from hvd.training.loops import cut_loop
from hvd.training.mlp import FitOptions, Fitted, Loss, Problem, fit_mlp
from hvd.training.replay import walks
from hvd.training.report import Gate, StatesReport, fixed_rules, judge, without_nan
from hvd.types import Float32Array, Float64Array, Int64Array

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

KINDS = ("survival", "scalar")

SCALAR = FitOptions(hidden=(256, 256))
"""As published: METHOD.md, "Settings"."""
SURVIVAL = FitOptions(hidden=(64, 64), epochs=12, batch=1024, learning_rate=2e-3, decay=True)

_CHUNK = 16_384


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How to train.

    survival, scalar   of each kind
    boundary_share     share of the survival loss that falls to states at cycle boundaries, the ones seen live
    most_states        bound on memory: states of each kind, drawn evenly from all positions
    hold_out           share of the groups to stop early by, and again to judge by
    keep_loops         do not cut traces where they begin to loop
    shared             see `hvd.training.replay.walks`
    """

    survival: FitOptions = SURVIVAL
    scalar: FitOptions = SCALAR
    boundary_share: float = 0.5
    most_states: int = 200_000
    hold_out: float = 0.1
    keep_loops: bool = False
    shared: bool = True
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.boundary_share <= 1.0:
            raise ConfigError(f"boundary_share must be in [0, 1], got {self.boundary_share!r}")
        if not 0.0 < self.hold_out < 0.5:
            raise ConfigError(f"hold_out must be in (0, 0.5), got {self.hold_out!r}")
        if self.most_states < 1:
            raise ConfigError(f"most_states must be at least 1, got {self.most_states!r}")


@dataclass(frozen=True, slots=True)
class FitReport:
    """One predictor's fitting: its file, the losses (training, validation) of every epoch, the epoch kept."""

    kind: str
    file: str
    losses: tuple[tuple[float, float], ...]
    best_epoch: int


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What went in, how it went, and how well the gates do on requests that were held out.

    states, test_states  states with a draft, one for each draft; those held out, with the main draft alone
    censored, bare       states left out (`StateSet`)
    judged               every position, and cycle boundaries
    """

    traces: int
    tokens: int
    looped: int
    groups: int
    states: int
    test_states: int
    censored: int
    bare: int
    fits: tuple[FitReport, ...]
    judged: tuple[StatesReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; NaN becomes None."""
        tree: dict[str, Any] = without_nan(asdict(self))
        return tree


def train_predictor(
    trace_paths: PathLike | Iterable[PathLike],
    out: PathLike,
    kind: str = "survival",
    *,
    test_paths: PathLike | Iterable[PathLike] | None = None,
    options: TrainOptions | None = None,
    progress: Progress | None = None,
    collected: Callable[[int], None] = lambda states: None,
) -> TrainingReport:
    """Train on traces and write the predictor to `out`.

    kind         "survival", "scalar" or "both"; "both" writes two files, x.npz as x.survival.npz and x.scalar.npz
    test_paths   traces to judge by instead of requests held out of the first
    collected    called with the number of states to judge by, before the training begins

    ConfigError or TraceError when there are too few traces; nothing is written then.
    """
    if kind not in (*KINDS, "both"):
        raise ConfigError(f"kind must be survival, scalar or both, got {kind!r}")
    options = options or TrainOptions()
    paths = [trace_paths] if isinstance(trace_paths, str | Path) else list(trace_paths)  # type: ignore[arg-type]
    source = _Source(paths, options)
    states = source.states("replay", progress)
    train, valid, test = _split(states, options, own_test=test_paths is None)
    judged = states
    if test_paths is not None:
        judged = _Source(test_paths, options).states("replay test", progress)
        test = np.arange(len(judged))
    collected(int(judged.main[test].sum()))
    kinds = KINDS if kind == "both" else (kind,)
    fits, gates = [], []
    for each in kinds:
        predictor, fitted = fit(each, states, train, valid, options, progress)
        file = _file(Path(out), each if kind == "both" else "")
        predictor.metadata.update(source.facts() | {"validation_loss": fitted.losses[fitted.best][1]})
        save_predictor(file, predictor)
        fits.append(FitReport(each, str(file), fitted.losses, fitted.best + 1))
        gates.append(gate(predictor, judged))
    return TrainingReport(
        traces=source.traces,
        tokens=source.tokens,
        looped=source.looped,
        groups=len(states.groups),
        states=len(states),
        test_states=int(judged.main[test].sum()),
        censored=states.censored,
        bare=states.bare,
        fits=tuple(fits),
        judged=judge_states(judged, test, gates),
    )


def fit(
    kind: str,
    states: StateSet,
    train: Int64Array,
    valid: Int64Array,
    options: TrainOptions,
    progress: Progress | None = None,
) -> tuple[Predictor, Fitted]:
    """Fit one kind of predictor to the states numbered `train`, stopping early by `valid`."""
    problem = (scalar_problem if kind == "scalar" else survival_problem)(states, train, valid, options)
    each = options.scalar if kind == "scalar" else options.survival
    each = replace(each, seed=each.seed + options.seed)
    fitted = fit_mlp(problem, each, None if progress is None else lambda d, t: progress(f"fit {kind}", d, t))
    weights = MLPWeights(tuple(fitted.layers), fitted.mean, fitted.std)
    return (ScalarPredictor(weights) if kind == "scalar" else SurvivalPredictor(weights)), fitted


def scalar_problem(states: StateSet, train: Int64Array, valid: Int64Array, options: TrainOptions) -> Problem:
    """The paper's: squared error of the accepted length over the states at every position."""
    every = ~states.boundary & states.main
    return Problem(
        gather=lambda rows: states.state[rows],
        target=states.payoff.astype(np.float32),
        weight=np.ones(len(states), np.float32),
        train=train[every[train]],
        valid=valid[every[valid]],
        ignored=np.zeros(len(STATE_NAMES), np.bool_),
        loss=Loss.SQUARED,
    )


def survival_problem(states: StateSet, train: Int64Array, valid: Int64Array, options: TrainOptions) -> Problem:
    """Cross-entropy of each token's hazard, over the tokens at risk: those accepted, and the first that was not."""
    state, place = states.token_rows()
    at_risk = place <= states.payoff[state]
    part = np.zeros(len(states), np.int8)
    part[train], part[valid] = 1, 2
    return Problem(
        gather=lambda rows: survival_inputs(states, rows, state[rows]),
        target=(place < states.payoff[state]).astype(np.float32),
        weight=_boundary_weight(states.boundary[state], at_risk & (part[state] == 1), options.boundary_share),
        train=np.flatnonzero(at_risk & (part[state] == 1)),
        valid=np.flatnonzero(at_risk & (part[state] == 2)),
        ignored=np.zeros(len(SurvivalPredictor.input_names), np.bool_),
        loss=Loss.LOGISTIC,
    )


def survival_inputs(states: StateSet, token: Int64Array, state: Int64Array) -> Float32Array:
    """Rows as a `SurvivalPredictor` takes them, of these token rows and the states they belong to."""
    own = states.state[state, : len(CONTEXT_NAMES)]
    return np.concatenate((states.token[token], own, states.rival[state]), axis=1)


def gate(predictor: Predictor, states: StateSet) -> Gate:
    """A predictor's answers as a gate: P(payoff >= PAYOFF) >= 0.5, or expected payoff >= PAYOFF."""
    if isinstance(predictor, ScalarPredictor):
        return Gate("scalar", predict_payoff(predictor, states), float(PAYOFF))
    return Gate("survival", survival_at(predictor, states, PAYOFF), 0.5, probability=True)


def predict_payoff(predictor: Predictor, states: StateSet) -> Float32Array:
    """Expected accepted length of every state, float32 [N]."""
    chunks = (states.state[i : i + _CHUNK] for i in range(0, len(states), _CHUNK))
    return np.concatenate([predictor.weights.forward(chunk)[:, 0] for chunk in chunks])


def survival_at(predictor: Predictor, states: StateSet, length: int) -> Float32Array:
    """P(accepted length >= `length`) of every state, `length` <= PAYOFF, float32 [N]; 0 for shorter drafts."""
    chance = np.ones(len(states), np.float32)
    for start in range(0, len(states), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(states)))
        rows = rows[states.length[rows] >= length]
        for place in range(length):
            inputs = survival_inputs(states, states.first[rows] + place, rows)
            chance[rows] *= sigmoid(predictor.weights.forward(inputs)[:, 0])
    chance[states.length < length] = 0.0
    return chance


def judge_states(states: StateSet, rows: Int64Array, gates: Sequence[Gate]) -> tuple[StatesReport, ...]:
    """Predictors and fixed rules over main drafts, at every position and at cycle boundaries."""
    gates, rows = [*gates, *fixed_rules(states)], rows[states.main[rows]]
    every, boundary = rows[~states.boundary[rows]], rows[states.boundary[rows]]
    return judge(states, every, gates, "every position"), judge(states, boundary, gates, "cycle boundaries")


def _boundary_weight(boundary: np.ndarray, train: np.ndarray, share: float) -> Float32Array:
    """Row weights with mean 1 over the training rows, `share` of the sum at cycle boundaries."""
    there, elsewhere = int((boundary & train).sum()), int((~boundary & train).sum())
    if not there or not elsewhere:
        return np.ones(len(boundary), np.float32)
    total = there + elsewhere
    weight: Float64Array = np.where(boundary, share * total / there, (1.0 - share) * total / elsewhere)
    return weight.astype(np.float32)


def _split(states: StateSet, options: TrainOptions, *, own_test: bool) -> tuple[Int64Array, Int64Array, Int64Array]:
    train, valid, test = hold_out(states, options.hold_out)
    if not own_test:
        train, test = np.concatenate((train, test)), test[:0]
    if not len(train) or not len(valid) or (own_test and not len(test)):
        raise ConfigError(
            f"{len(states.groups)} groups of requests are too few to hold some out; collect traces of at least 3"
        )
    return train, valid, test


def _file(out: Path, kind: str) -> Path:
    return out.with_name(f"{out.stem}.{kind}{out.suffix}") if kind else out


def _flat_cost() -> CostModel:
    """For policies that do not look at costs."""
    return CostModel(Surface((1,), (0,), np.ones((1, 1))))


class _Source:
    """Traces on their way to states: counted first, cut where they loop, and described for the predictor's file."""

    def __init__(self, paths: PathLike | Iterable[PathLike], options: TrainOptions) -> None:
        self.paths = [paths] if isinstance(paths, str | Path) else list(paths)  # type: ignore[arg-type]
        self.options = options
        self.traces = self.tokens = self.looped = 0
        self.models: set[str] = set()
        self.datasets: set[str] = set()
        self.tokenizer = ""

    def states(self, what: str, progress: Progress | None) -> StateSet:
        """Replay all traces. TraceError when there are none."""
        for trace in read_traces(self.paths):
            self._count(trace)
        if not self.tokens:
            raise TraceError("the traces hold no responses; collect some with 'hvd trace collect'")
        sampling = Sampling(self.tokens, self.options.most_states, self.options.seed)
        walked = walks(self._read(), self.options.suffix, shared=self.options.shared)
        report = None if progress is None else lambda done: progress(what, done, self.tokens)
        return collect_states(walked, _flat_cost(), sampling, report)

    def facts(self) -> dict[str, Any]:
        """What a predictor was trained on, for its file."""
        return {
            "models": sorted(self.models),
            "tokenizer": self.tokenizer,
            "datasets": sorted(self.datasets),
            "traces": self.traces,
            "tokens": self.tokens,
            "suffix": asdict(self.options.suffix),
            "shared": self.options.shared,
        }

    def _read(self) -> Iterator[Trace]:
        for trace in read_traces(self.paths, warn=lambda _: None):  # damage was told of when counting
            yield self._cut(trace)

    def _cut(self, trace: Trace) -> Trace:
        return trace if self.options.keep_loops else cut_loop(trace)

    def _count(self, trace: Trace) -> None:
        cut = self._cut(trace)
        self.traces += 1
        self.tokens += len(cut.response)
        self.looped += cut is not trace
        self.models.add(trace.model)
        self.datasets.add(trace.dataset)
        self.tokenizer = trace.tokenizer_fingerprint
