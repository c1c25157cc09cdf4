"""Value objects that travel between the rooms of the house. Imports nothing of ours.

Words, used everywhere with these meanings
    target           the model whose output is to be reproduced exactly
    draft            tokens proposed to the target; a chain or a tree
    drafter          makes drafts: the suffix cache or an EAGLE3 head
    arm              who supplied the tokens of a cycle: "cache", "eagle3" or "plain" (no draft)
    payoff           how many tokens of a draft the target will accept
    accepted         draft tokens equal to what the target itself chose
    bonus token      the target's own token behind the last accepted one
    committed        tokens that are part of the output: accepted + bonus
    cycle            one pass of the target over one request
    accepted length  accepted draft tokens in a cycle
    verify width     positions of one request computed in a pass: draft tokens + 1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

ROOT = -1
"""Parent of a draft's first tokens: the last committed token."""


class Arm(StrEnum):
    """Who supplied the tokens of a cycle."""

    CACHE = "cache"
    EAGLE3 = "eagle3"
    PLAIN = "plain"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens proposed to the target: a tree in topological order, most often a chain.

    All arrays have one entry a node, n nodes.

    tokens          int32 [n]    proposed token ids
    parents         int32 [n]    index of the parent node, smaller than the node's own; ROOT (-1) = last committed token
    probs           float32 [n]  the drafter's own estimate of P(node accepted | parent accepted), in [0, 1]
    arm             who made it
    score           the drafter's own score of the whole draft (suffix cache: sum of running products of probs)
    match_len       tokens of context that the suffix cache matched; 0 for other drafters
    counts          int32 [n]    suffix cache: occurrences of the path down to this node; zeros for other drafters
    parent_counts   int32 [n]    suffix cache: occurrences of the path down to the parent; zeros for other drafters
    local           suffix cache: True when the request's own trie won, False for the shared one
    age, origin     suffix cache, of a draft that resumes a copy which the text has left: tokens committed since, and
                    the match length there; 0 for a draft behind a match
    """

    tokens: Int32Array
    parents: Int32Array
    probs: Float32Array
    arm: Arm
    score: float
    match_len: int
    counts: Int32Array
    parent_counts: Int32Array
    local: bool = True
    age: int = 0
    origin: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the one before it."""
        return bool(np.array_equal(self.parents, np.arange(-1, len(self.tokens) - 1, dtype=np.int32)))

    def first(self, length: int) -> Draft:
        """The first `length` nodes (topological order keeps every parent). For a chain: a shorter chain."""
        if length >= len(self.tokens):
            return self
        return Draft(
            self.tokens[:length],
            self.parents[:length],
            self.probs[:length],
            self.arm,
            self.score,
            self.match_len,
            self.counts[:length],
            self.parent_counts[:length],
            self.local,
            self.age,
            self.origin,
        )

    @staticmethod
    def chain(
        tokens: Int32Array,
        arm: Arm,
        probs: Float32Array | None = None,
        score: float = 0.0,
        match_len: int = 0,
        counts: Int32Array | None = None,
        parent_counts: Int32Array | None = None,
        local: bool = True,
    ) -> Draft:
        """A draft whose node i+1 hangs on node i. Missing per-node arrays are filled with ones (probs) or zeros."""
        n = len(tokens)
        return Draft(
            tokens=np.asarray(tokens, dtype=np.int32),
            parents=np.arange(-1, n - 1, dtype=np.int32),
            probs=np.ones(n, np.float32) if probs is None else probs,
            arm=arm,
            score=score,
            match_len=match_len,
            counts=np.zeros(n, np.int32) if counts is None else counts,
            parent_counts=np.zeros(n, np.int32) if parent_counts is None else parent_counts,
            local=local,
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one output position, from the raw logits (before any sampling parameter touches them).

    token, logprob   the committed token and its natural-log probability
    top              the n likeliest (token, logprob) pairs, likeliest first; the committed token need not be among them
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CycleTimes:
    """Seconds that one cycle spent in each phase (a batch's shared phases are split evenly over its requests)."""

    propose: float = 0.0
    gate: float = 0.0
    forward: float = 0.0
    walk: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What happened to one request in one cycle; the unit of metrics and traces.

    position      tokens generated before the cycle
    context       positions in the KV cache before the cycle
    arm           arm that was verified
    drafted       draft tokens verified (nodes of the tree)
    accepted      accepted draft tokens that were emitted
    committed     tokens committed and emitted, accepted + 1. (When a request ends on a draft token, that one is counted
                  as the bonus: so tokens emitted = cycles + accepted, exactly, always.)
    width         verify width, positions computed for this request
    offered       length of the cache draft on offer, verified or not
    match_len     its match length
    score         its score
    expected      accepted tokens that the policy expected of the draft it chose; NaN when it does not predict
    reason        the policy's reason in a few words
    times         seconds by phase
    """

    position: int
    context: int
    arm: Arm
    drafted: int
    accepted: int
    committed: int
    width: int
    offered: int = 0
    match_len: int = 0
    score: float = 0.0
    expected: float = float("nan")
    reason: str = ""
    times: CycleTimes = CycleTimes()


@dataclass(slots=True)
class ArmStats:
    """Totals of one arm over a request: cycles, draft tokens verified, draft tokens accepted (and emitted)."""

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RequestStats:
    """Totals over a request. `committed == cycles + accepted`, exactly."""

    prompt_tokens: int = 0
    cycles: int = 0
    committed: int = 0
    width: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    arms: dict[Arm, ArmStats] = field(default_factory=dict)

    @property
    def tokens_per_cycle(self) -> float:
        """Committed tokens a cycle; 0.0 before the first."""
        return self.committed / self.cycles if self.cycles else 0.0

    @property
    def verify_width_mean(self) -> float:
        """Positions computed a cycle; 0.0 before the first."""
        return self.width / self.cycles if self.cycles else 0.0
