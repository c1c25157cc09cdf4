"""Plays policies on traces without a model: tokens a cycle, tokens a second by a cost model, regret.

The *oracle* knows every payoff beforehand and takes the sequence of choices with the least time in all: at position t

    T(t) = min over  plain                        V(1) + T(t+1)
                     k tokens of the cache        V(k+1) + T(t+k+1)           k = 1 .. payoff of the best cache draft
                     j tokens of the head         V(j+1) + H(j) + T(t+j+1)    j = 1 .. payoff of the head's draft

with V the seconds of a pass at t's context and H those of drafting, by dynamic programming from the end. It never
verifies a token in vain. It never pays for the head's catching up either, which would make its choices depend on each
other; without a head the oracle is exactly the least possible time, with one it is a bound that can't quite be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd.config import SuffixConfig
from hvd.errors import ConfigError, TraceError
from hvd.payoff.cost import CostModel
from hvd.payoff.policy import Choice, Policy, Situation, make_policy
from hvd.payoff.predictor import Predictor, ScalarPredictor
from hvd.traces.reader import PathLike, read_traces
from hvd.traces.schema import Trace
from hvd.training.loops import cut_loop
from hvd.training.replay import SimulatedHead, Walk, cycles, walks
from hvd.training.report import without_nan
from hvd.types import Arm, ArmStats, Float64Array

GATE_SECONDS = 1e-4
"""What a policy that predicts takes to choose: about what is measured on two cores, beside other work. Fixed rules and
the oracle take nothing."""

ORACLE = "oracle"
PLAIN = "plain"


@dataclass(slots=True)
class Totals:
    """Sums over cycles: tokens committed, positions computed, seconds by the cost model, and each arm's part."""

    cycles: int = 0
    tokens: int = 0
    width: int = 0
    seconds: float = 0.0
    arms: dict[Arm, ArmStats] = field(default_factory=dict)

    def count(self, choice: Choice, accepted: int, seconds: float) -> None:
        """Take in one cycle."""
        self.cycles += 1
        self.tokens += accepted + 1
        self.width += choice.length + 1
        self.seconds += seconds
        arm = self.arms.setdefault(choice.arm, ArmStats())
        arm.cycles += 1
        arm.drafted += choice.length
        arm.accepted += accepted

    def add(self, other: Totals) -> None:
        """Take in all cycles of another."""
        self.cycles += other.cycles
        self.tokens += other.tokens
        self.width += other.width
        self.seconds += other.seconds
        for name, arm in other.arms.items():
            mine = self.arms.setdefault(name, ArmStats())
            mine.cycles += arm.cycles
            mine.drafted += arm.drafted
            mine.accepted += arm.accepted


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """One policy. `datasets` has the sums of each data set.

    speedup   plain decoding's seconds over this policy's: `micro` over all tokens, `macro` the mean over data sets
    regret    its seconds over the oracle's, less 1; micro and macro likewise
    """

    name: str
    total: Totals
    datasets: Mapping[str, Totals]
    speedup_micro: float
    speedup_macro: float
    regret_micro: float
    regret_macro: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        figures = ("speedup_micro", "speedup_macro", "regret_micro", "regret_macro")
        head = {name: getattr(self, name) for name in figures}
        return head | _figures(self.total) | {"datasets": {n: _figures(t) for n, t in self.datasets.items()}}


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """All policies over the same traces; plain and oracle are always among them."""

    traces: int
    tokens: int
    looped: int
    policies: tuple[PolicyReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a figure that does not exist is None."""
        tree: dict[str, Any] = without_nan(
            {
                "traces": self.traces,
                "tokens": self.tokens,
                "looped": self.looped,
                "policies": {policy.name: policy.to_dict() for policy in self.policies},
            }
        )
        return tree


def replay_report(
    trace_paths: PathLike | Iterable[PathLike],
    policies: Sequence[str],
    cost: CostModel,
    *,
    predictors: Sequence[Predictor] = (),
    head: SimulatedHead | None = None,
    suffix: SuffixConfig | None = None,
    shared: bool = True,
    keep_loops: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Play policies, by name, on the traces of files, directories or glob patterns.

    predictors   at most one of each kind; each policy gets the kind it takes
    head         stands in for an EAGLE3 head; None = no head
    shared       see `hvd.training.replay.walks`
    keep_loops   do not cut traces where they begin to loop
    progress     called with (done, total) response tokens

    ConfigError for an unknown policy, TraceError when there are no traces. Policies learn as they go, as when serving.
    """
    names = [name for name in dict.fromkeys(policies) if name != ORACLE]
    players = {name: policy_with(name, predictors) for name in (PLAIN, *names)}
    total, looped = _survey(trace_paths, keep_loops)
    traces = (t if keep_loops else cut_loop(t) for t in read_traces(trace_paths))
    report = None if progress is None else lambda done: progress(done, total)
    sums, count = simulate(walks(traces, suffix, shared=shared), players, cost, head, report)
    if not count:
        raise TraceError("the traces hold no responses; collect some with 'hvd trace collect'")
    results = tuple(policy_report(name, sums) for name in (*players, ORACLE))
    return ReplayReport(count, sum(t.tokens for t in sums[PLAIN].values()), looped, results)


def policy_with(name: str, predictors: Sequence[Predictor]) -> Policy:
    """A policy by name, with the predictor of the kind it takes. ConfigError when that is not among them."""
    kind = "scalar" if name.partition(":")[0] == "hvd-paper" else "survival"
    fitting = [p for p in predictors if isinstance(p, ScalarPredictor) == (kind == "scalar")]
    if len(fitting) > 1:
        raise ConfigError(f"two predictors of kind {kind}; give one of each kind at most")
    return make_policy(name, predictor=fitting[0] if fitting else None)


def simulate(
    walked: Iterable[Walk],
    policies: Mapping[str, Policy],
    cost: CostModel,
    head: SimulatedHead | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[dict[str, dict[str, Totals]], int]:
    """Play policies and the oracle on walks: sums by policy and data set, and the number of walks."""
    sums: dict[str, dict[str, Totals]] = {name: {} for name in (*policies, ORACLE)}
    count = done = 0
    for walk in walked:
        dataset = walk.trace.dataset
        for name, policy in policies.items():
            play(walk, policy, cost, head, sums[name].setdefault(dataset, Totals()))
        oracle(walk, cost, head, sums[ORACLE].setdefault(dataset, Totals()))
        count, done = count + 1, done + len(walk)
        if progress is not None:
            progress(done)
    return sums, count


def play(walk: Walk, policy: Policy, cost: CostModel, head: SimulatedHead | None, totals: Totals) -> None:
    """Add a policy's cycles of one walk to `totals`, with the time of its gate."""
    for cycle in cycles(walk, policy, cost, head):
        seconds = cycle_seconds(cost, cycle.choice, cycle.situation) + gate_seconds(policy, cycle.situation)
        totals.count(cycle.choice, cycle.accepted, seconds)


def gate_seconds(policy: Policy, situation: Situation) -> float:
    """Seconds that a policy thinks: nothing when it does not predict, or nothing is on offer."""
    return GATE_SECONDS if policy.predictor_kind is not None and (situation.cached or situation.eagle3) else 0.0


def cycle_seconds(cost: CostModel, choice: Choice, situation: Situation) -> float:
    """Seconds of a cycle by the cost model: pass, drafting with the head, overhead."""
    seconds = cost.verify(choice.length + 1, situation.context) + cost.overhead
    if choice.arm is Arm.EAGLE3:
        seconds += cost.eagle3(choice.length, situation.backlog, situation.context)
    return seconds


def oracle(walk: Walk, cost: CostModel, head: SimulatedHead | None, totals: Totals) -> None:
    """Add the oracle's cycles of one walk to `totals`."""
    n, prompt = len(walk), len(walk.trace.prompt)
    chained = head.payoffs(walk.trace) if head is not None else np.zeros(n, np.int32)
    rest = np.zeros(n + 1)
    choices: list[Choice] = [Choice(Arm.PLAIN)] * n
    for t in range(n - 1, -1, -1):
        cache, eagle3 = min(walk.best_payoff(t), n - t - 1), min(int(chained[t]), n - t - 1)
        passes = cost.verify_curve(max(cache, eagle3) + 1, prompt + t - 1) + cost.overhead
        times = passes[: cache + 1] + rest[t + 1 : t + cache + 2]
        length = int(times.argmin())
        rest[t], choices[t] = times[length], Choice(Arm.CACHE if length else Arm.PLAIN, length)
        if eagle3:
            times = passes[1 : eagle3 + 1] + rest[t + 2 : t + eagle3 + 2]
            times = times + cost.eagle3_curve(eagle3, 1, prompt + t - 1)
            length = int(times.argmin()) + 1
            if times[length - 1] < rest[t]:
                rest[t], choices[t] = times[length - 1], Choice(Arm.EAGLE3, length)
    _follow(choices, rest, totals)


def _follow(choices: Sequence[Choice], rest: Float64Array, totals: Totals) -> None:
    position = 0
    while position < len(choices):
        choice = choices[position]
        after = position + choice.length + 1
        totals.count(choice, choice.length, float(rest[position] - rest[after]))
        position = after


def _survey(paths: PathLike | Iterable[PathLike], keep_loops: bool) -> tuple[int, int]:
    """Response tokens to replay, and traces that loop."""
    tokens = looped = 0
    for trace in read_traces(paths, warn=lambda _: None):
        cut: Trace = trace if keep_loops else cut_loop(trace)
        tokens, looped = tokens + len(cut.response), looped + (cut is not trace)
    return tokens, looped


def policy_report(name: str, sums: Mapping[str, Mapping[str, Totals]]) -> PolicyReport:
    """One policy out of what `simulate` gives; plain and the oracle must be among the sums."""
    mine, plain, best = sums[name], sums[PLAIN], sums[ORACLE]
    total = _sum(mine.values())
    return PolicyReport(
        name=name,
        total=total,
        datasets=mine,
        speedup_micro=_sum(plain.values()).seconds / total.seconds,
        speedup_macro=float(np.mean([plain[d].seconds / mine[d].seconds for d in mine])),
        regret_micro=total.seconds / _sum(best.values()).seconds - 1.0,
        regret_macro=float(np.mean([mine[d].seconds / best[d].seconds for d in mine])) - 1.0,
    )


def _sum(each: Iterable[Totals]) -> Totals:
    total = Totals()
    for part in each:
        total.add(part)
    return total


def _figures(totals: Totals) -> dict[str, Any]:
    return {
        "tokens": totals.tokens,
        "cycles": totals.cycles,
        "tokens_per_cycle": totals.tokens / totals.cycles,
        "tokens_per_second": totals.tokens / totals.seconds,
        "verify_width_mean": totals.width / totals.cycles,
        "seconds": totals.seconds,
        "arms": {
            arm.value: {"cycles": s.cycles, "drafted": s.drafted, "accepted": s.accepted}
            for arm, s in totals.arms.items()
        },
    }
