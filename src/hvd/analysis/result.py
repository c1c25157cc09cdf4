"""What an analysis found, for tables and for JSON. Nothing here is text of the logs, unless it was asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvd.analysis.learn import RESAMPLES, Training
from hvd.analysis.study import EDGES, Gain, GroupSums
from hvd.traces.logs import FileTally
from hvd.training.report import without_nan
from hvd.training.simulate import PLAIN, PolicyReport


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cache drafts on offer where the policy "cache" stood, by how many of their tokens the answer went on with.

    edges    each bin goes from its edge up to the next one
    drafts   in each bin; `bare` positions had no draft
    """

    edges: tuple[int, ...]
    drafts: tuple[int, ...]
    bare: int

    @property
    def paying(self) -> float:
        """Share of drafts with at least 6 accepted tokens; NaN without drafts."""
        return sum(self.drafts[EDGES.index(6) :]) / sum(self.drafts) if sum(self.drafts) else float("nan")


@dataclass(frozen=True, slots=True)
class Loops:
    """What answers that end in a loop would add, were they not cut: speed-up by policy with the loops left in."""

    answers: int
    tokens: int
    speedups: dict[str, float]


@dataclass(frozen=True, slots=True)
class Analysis:
    """Would it help? All seconds are the cost model's.

    answers, answers_found   analysed, and in the logs (repeats left out)
    share                    of the logs' answers, by characters, that was analysed
    cache_share              of the tokens: from cache drafts, were each verified whole
    policies                 plain first, oracle last
    intervals                speed-up of each policy against plain: 95 % interval (bootstrap over conversations)
    sources                  share of the tokens from cache drafts by where they stood before
    notes                    what readers should know, one line each
    """

    files: tuple[FileTally, ...]
    tokenizer: str
    cost: str
    eagle3: str | None
    answers: int
    answers_found: int
    groups: int
    share: float
    tokens: int
    prompt_tokens: int
    looped: int
    cache_share: float
    payoffs: Histogram
    policies: tuple[PolicyReport, ...]
    intervals: dict[str, tuple[float, float]]
    sources: dict[str, float]
    gains: tuple[Gain, ...]
    loops: Loops | None
    training: Training | None
    notes: tuple[str, ...]
    seconds: float

    def policy(self, name: str) -> PolicyReport:
        """One policy. KeyError when it was not played."""
        for policy in self.policies:
            if policy.name == name:
                return policy
        raise KeyError(name)

    def as_json(self, *, show_text: bool = False) -> dict[str, Any]:
        """JSON values; a figure that does not exist is None. `show_text`: with the beginnings of answers."""
        tree = {name: getattr(self, name) for name in _PLAIN_FIELDS}
        tree["files"] = [asdict(tally) for tally in self.files]
        tree["payoffs"] = asdict(self.payoffs) | {"paying": self.payoffs.paying}
        tree["policies"] = {
            policy.name: policy.to_dict() | {"speedup_interval": self.intervals[policy.name]}
            for policy in self.policies
        }
        tree["gains"] = [_gain(gain, show_text) for gain in self.gains]
        tree["loops"] = asdict(self.loops) if self.loops else None
        tree["training"] = asdict(self.training) if self.training else None
        clean: dict[str, Any] = without_nan(tree)
        return clean


_PLAIN_FIELDS = (
    "tokenizer", "cost", "eagle3", "answers", "answers_found", "groups", "share", "tokens", "prompt_tokens", "looped",
    "cache_share", "sources", "notes", "seconds",
)  # fmt: skip


def _gain(gain: Gain, show_text: bool) -> dict[str, Any]:
    entry = asdict(gain) | {"speedup": gain.speedup}
    if not show_text:
        del entry["text"]
    return entry


def speedup_intervals(groups: dict[str, GroupSums], names: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Plain's seconds over each policy's, resampled by conversation: 95 % intervals. One conversation gives a point."""
    seconds = np.array([[group.seconds[name] for name in names] for group in groups.values()])
    rng = np.random.default_rng(0)
    plain = names.index(PLAIN)
    ratios = np.empty((RESAMPLES, len(names)))
    for i in range(RESAMPLES):
        weights = np.bincount(rng.integers(0, len(seconds), len(seconds)), minlength=len(seconds))
        sums = weights @ seconds
        ratios[i] = sums[plain] / sums
    low, high = np.quantile(ratios, (0.025, 0.975), axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(names)}
