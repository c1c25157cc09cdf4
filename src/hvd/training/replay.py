"""Rebuilds from a trace what the engine saw, token by token, with the engine's own classes.

What the suffix cache offers depends on the committed text alone, so one *walk* over a trace yields the draft, its
payoff and the shadow hit of every position. What a policy makes of them is then a matter of bookkeeping: `cycles` goes
through the walk as the engine goes through a request (hvd/engine/engine.py: propose, allocate, commit, observe).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvd.config import SuffixConfig
from hvd.drafters.suffix import SuffixDrafter
from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel
from hvd.payoff.history import History
from hvd.payoff.policy import Choice, Policy, Situation
from hvd.traces.schema import Trace
from hvd.types import Arm, BoolArray, Draft, Int32Array

NO_LIMIT = 1 << 20
"""Output tokens of a trace whose sampling parameters name no limit."""

ANY_TOKEN = np.iinfo(np.int32).max
"""Vocabulary of the cache in replay: traces hold what targets wrote, so no id in them is foreign."""


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """A trace as the suffix cache saw it. n = response tokens; position t = t tokens generated so far.

    drafts     n drafts; what the cache offered at each position in the room left, None where it had nothing
    payoffs    int32 [n]   leading tokens of the draft that the response goes on with
    hits       uint8 [n]   shadow hits: 1 where the cache's first token was right
    others     n times the cache's other drafts; () = they were not asked for
    """

    trace: Trace
    drafts: tuple[Draft | None, ...]
    payoffs: Int32Array
    hits: NDArray[np.uint8]
    others: tuple[tuple[Draft, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.drafts)

    def alternatives(self, position: int) -> tuple[Draft, ...]:
        """The cache's other drafts at a position."""
        return self.others[position] if self.others else ()

    def payoff(self, position: int, draft: Draft) -> int:
        """Leading tokens of a draft that the response goes on with."""
        if draft is self.drafts[position]:
            return int(self.payoffs[position])
        return common_prefix(draft.tokens, self.trace.response[position : position + len(draft)])

    def best_payoff(self, position: int) -> int:
        """The most that any of the cache's drafts pays."""
        each = (self.payoff(position, draft) for draft in self.alternatives(position))
        return max(int(self.payoffs[position]), *each, 0)

    def censored(self, position: int, draft: Draft | None = None) -> bool:
        """Whether a draft (the main one) fits up to the end of a response that was cut off: its payoff is unknown."""
        draft = draft or self.drafts[position]
        if not self.trace.cut or draft is None:
            return False
        payoff = self.payoff(position, draft)
        return payoff < len(draft) and position + payoff == len(self.drafts)


def walks(traces: Iterable[Trace], config: SuffixConfig | None = None, *, shared: bool = True) -> Iterator[Walk]:
    """Walk traces in order, with one suffix cache for each tokenizer: token ids of others mean other things.

    shared   responses serve later traces of the same model and data set (a scope each), as in a session; else every
             request has only its own text

    Traces without a prompt or a response are passed over.
    """
    config = config or SuffixConfig()
    drafters: dict[str, SuffixDrafter] = {}
    for key, trace in enumerate(traces):
        fingerprint = trace.tokenizer_fingerprint
        if fingerprint not in drafters:
            drafters[fingerprint] = SuffixDrafter(config, ANY_TOKEN, fingerprint)
        if len(trace.prompt) and len(trace.response):
            yield walk(trace, drafters[fingerprint], key, keep=shared)


def walk(trace: Trace, drafter: SuffixDrafter, key: int, *, keep: bool) -> Walk:
    """Walk one trace in the scope of its model and data set. `keep`: its response may serve later traces of it."""
    response, limit = np.ascontiguousarray(trace.response, np.int32), token_limit(trace)
    drafts: list[Draft | None] = []
    payoffs = np.zeros(len(response), np.int32)
    hits = np.zeros(len(response), np.uint8)
    others: list[tuple[Draft, ...]] = []
    drafter.open(key, f"{trace.model_fingerprint} {trace.dataset}")
    drafter.observe(key, np.ascontiguousarray(trace.prompt, np.int32), None, prompt=True)
    for position in range(len(response)):
        draft = drafter.propose(key, limit - position - 1)
        if draft is not None:
            payoffs[position] = common_prefix(draft.tokens, response[position : position + len(draft)])
        drafts.append(draft)
        others.append(drafter.alternatives(key, limit - position - 1))
        drafter.observe(key, response[position : position + 1], None, prompt=False)
        hits[position] = drafter.last_hits(key)[0]
    drafter.close(key, keep=keep)
    return Walk(trace, tuple(drafts), payoffs, hits, tuple(others))


def common_prefix(draft: Int32Array, text: Int32Array) -> int:
    """Leading tokens that a draft, int32 [n], and the text, int32 [m], have in common."""
    n = min(len(draft), len(text))
    differs = np.flatnonzero(draft[:n] != text[:n])
    return int(differs[0]) if len(differs) else n


@dataclass(frozen=True, slots=True)
class SimulatedHead:
    """A stand-in for an EAGLE3 head in replay: a chain whose token at a place is right with a fixed probability.

    accept   P(right) of each token, where no step record says how it went
    length   tokens of a chain
    seed     the outcome at a place depends on (seed, trace id, place) alone, so it is the same for every policy
    """

    accept: float
    length: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.accept <= 1.0:
            raise ConfigError(f"the simulated head's accept must be in [0, 1], got {self.accept!r}")
        if self.length < 1:
            raise ConfigError(f"the simulated head's length must be at least 1, got {self.length!r}")

    def payoffs(self, trace: Trace) -> Int32Array:
        """Accepted tokens of a chain drafted at each position, int32 [n]."""
        right = self._right(trace)
        n = len(right)
        # first wrong place at or behind each position, n when there is none
        wrong = np.where(right, n, np.arange(n))
        ahead = np.minimum.accumulate(wrong[::-1])[::-1] - np.arange(n)
        return np.minimum(ahead, self.length).astype(np.int32)

    def _right(self, trace: Trace) -> BoolArray:
        key = (self.seed % 2**64, zlib.crc32(trace.id.encode()))
        noise = np.random.Generator(np.random.Philox(key=key)).random(len(trace.response))
        right: BoolArray = noise < self.accept
        for step in trace.steps:
            if step.arm is Arm.EAGLE3:
                end = step.position + step.accepted
                right[step.position : end] = True
                if step.accepted < step.drafted and end < len(right):
                    right[end] = False
        return right


@dataclass(frozen=True, slots=True, eq=False)
class Cycle:
    """One simulated cycle. `situation.history` is still that of the cycle's beginning.

    position   tokens generated before it
    accepted   accepted draft tokens, the emitted ones (a response's last token counts as the bonus token)
    committed  accepted + 1
    """

    position: int
    situation: Situation
    choice: Choice
    accepted: int
    committed: int


def cycles(walk: Walk, policy: Policy, cost: CostModel, head: SimulatedHead | None = None) -> Iterator[Cycle]:
    """The cycles that a policy would have made of a trace. It is told what came of each, as when serving."""
    n = len(walk)
    limit, prompt = token_limit(walk.trace), len(walk.trace.prompt)
    history = History(walk.trace.token_classes)
    history.prompt(walk.trace.prompt)
    eagle3 = head.payoffs(walk.trace) if head is not None else np.zeros(n, np.int32)
    position, backlog = 0, prompt
    while position < n:
        room = limit - position - 1
        situation = Situation(
            cache=walk.drafts[position],
            history=history,
            room=room,
            context=prompt + position - 1,
            eagle3=min(room, head.length) if head is not None else 0,
            backlog=backlog,
            alternatives=walk.alternatives(position) if policy.compares else (),
        )
        choice = policy.choose([situation], cost)[0]
        cache = walk.payoff(position, choice.draft) if choice.draft is not None else int(walk.payoffs[position])
        payoff = payoff_of(choice, cache, int(eagle3[position]))
        accepted = min(payoff, n - position - 1)
        stop = position + accepted + 1
        yield Cycle(position, situation, choice, accepted, accepted + 1)
        offered = len(situation.cache) if situation.cache is not None else 0
        tokens, hits = walk.trace.response[position:stop], walk.hits[position:stop]
        history.commit(tokens, hits, choice.arm, choice.length, accepted, offered)
        if stop < n:
            policy.observe(situation, choice, accepted)
        backlog = accepted + 1 + (0 if choice.arm is Arm.EAGLE3 else backlog)
        position = stop


def payoff_of(choice: Choice, cache: int, eagle3: int) -> int:
    """Draft tokens accepted by a choice where the whole drafts of the arms pay this much."""
    if choice.arm is Arm.PLAIN:
        return 0
    return min(choice.length, cache if choice.arm is Arm.CACHE else eagle3)


def token_limit(trace: Trace) -> int:
    """The trace's `max_tokens`, never less than its response has. TraceError when they can't be read."""
    limit = trace.max_tokens
    return max(NO_LIMIT if limit is None else min(limit, NO_LIMIT), len(trace.response))
