"""One pass over answers: every policy played on each, and what there is to know of the cache's drafts counted."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvd.analysis.encode import Asked
from hvd.analysis.sources import CopyFinder, Source
from hvd.payoff.cost import CostModel
from hvd.payoff.policy import Policy
from hvd.training.loops import cut_loop
from hvd.training.replay import SimulatedHead, Walk, cycles, walks
from hvd.training.simulate import ORACLE, PLAIN, Totals, cycle_seconds, oracle, play
from hvd.types import Arm

CACHE = "cache"
EDGES = (0, 1, 2, 3, 6, 12, 24, 48)
"""Bins of the payoff histogram: from each edge up to the next."""
MOST_GAINS = 50


@dataclass(frozen=True, slots=True)
class Gain:
    """What the best policy saves on one answer.

    source            file:line and turn, or a trace's id
    plain, seconds    by the cost model, without and with drafts
    share             of its tokens from cache drafts
    copied            where most of what can be copied stood before; None when nothing can
    text              how the answer begins
    """

    source: str
    tokens: int
    plain: float
    seconds: float
    share: float
    copied: str | None
    text: str

    @property
    def speedup(self) -> float:
        """Plain decoding's time over this one's."""
        return self.plain / self.seconds


@dataclass(slots=True)
class GroupSums:
    """One conversation: tokens, and seconds by policy."""

    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Study:
    """Sums over answers.

    sums       by policy and data set, plain and oracle among them
    groups     by conversation
    payoffs    cycles of the policy "cache" that had a draft, by bin of `EDGES`
    bare       its cycles without a draft
    sources    tokens that it took from drafts, by where they stood before
    gains      the answers on which `best` saves most time
    cut        seconds by policy of each answer that was cut where it begins to loop
    """

    def __init__(
        self, policies: Mapping[str, Policy], cost: CostModel, head: SimulatedHead | None, best: str = "hvd"
    ) -> None:
        self._policies = policies
        self._cost = cost
        self._head = head
        self._best = best
        self.sums: dict[str, dict[str, Totals]] = {name: {} for name in (*policies, ORACLE)}
        self.groups: dict[str, GroupSums] = {}
        self.payoffs = [0] * len(EDGES)
        self.bare = 0
        self.sources: Counter[Source] = Counter()
        self.answers = self.tokens = self.prompt_tokens = 0
        self.cut: dict[int, dict[str, float]] = {}
        self._gains: list[tuple[float, int, Gain]] = []

    def add(self, asked: Asked, walk: Walk) -> None:
        """Play all policies on one answer."""
        self.answers += 1
        self.tokens += len(walk)
        self.prompt_tokens += len(walk.trace.prompt)
        each = {name: Totals() for name in self.sums}
        for name, policy in self._policies.items():
            if name != CACHE:
                play(walk, policy, self._cost, self._head, each[name])
        copied = self._play_cache(asked, walk, each[CACHE])
        oracle(walk, self._cost, self._head, each[ORACLE])
        group = self.groups.setdefault(walk.trace.group, GroupSums())
        group.tokens += len(walk)
        for name, totals in each.items():
            self.sums[name].setdefault(walk.trace.dataset, Totals()).add(totals)
            group.seconds[name] = group.seconds.get(name, 0.0) + totals.seconds
        if len(walk) < len(asked.trace.response):
            self.cut[id(asked)] = {name: totals.seconds for name, totals in each.items()}
        self.sources.update(copied)
        self._note_gain(asked, each, copied)

    @property
    def gains(self) -> list[Gain]:
        """Largest saving first."""
        return [gain for _, _, gain in sorted(self._gains, reverse=True, key=lambda entry: entry[:2])]

    def _play_cache(self, asked: Asked, walk: Walk, totals: Totals) -> Counter[Source]:
        """The policy that verifies every draft: payoffs, and the tokens taken from each source."""
        finder, copied = CopyFinder(asked), Counter[Source]()
        for cycle in cycles(walk, self._policies[CACHE], self._cost, self._head):
            totals.count(cycle.choice, cycle.accepted, cycle_seconds(self._cost, cycle.choice, cycle.situation))
            draft = cycle.situation.cache
            if draft is None:
                self.bare += 1
                continue
            self.payoffs[_bin(int(walk.payoffs[cycle.position]))] += 1
            if cycle.accepted:
                copied[finder.source(cycle.position, draft, cycle.accepted)] += cycle.accepted
        return copied

    def _note_gain(self, asked: Asked, each: Mapping[str, Totals], copied: Counter[Source]) -> None:
        mine, plain = each[self._best], each[PLAIN]
        cached = mine.arms[Arm.CACHE].accepted if Arm.CACHE in mine.arms else 0
        most = str(copied.most_common(1)[0][0]) if copied else None
        gain = Gain(asked.source, mine.tokens, plain.seconds, mine.seconds, cached / mine.tokens, most, asked.text)
        entry = (plain.seconds - mine.seconds, -self.answers, gain)
        (heapq.heappush if len(self._gains) < MOST_GAINS else heapq.heappushpop)(self._gains, entry)


def counted(number: int, what: str) -> str:
    """ "1 answer", "2 answers"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bin(payoff: int) -> int:
    return sum(payoff >= edge for edge in EDGES) - 1


def walked(answers: Sequence[Asked], *, keep_loops: bool = False) -> Iterator[tuple[Asked, Walk]]:
    """Each answer with its walk, in order; answers serve later ones of their data set."""
    traces = (asked.trace if keep_loops else cut_loop(asked.trace) for asked in answers)
    yield from zip(answers, walks(traces), strict=True)
