"""States and labels out of walks: what the predictors learn from and are judged on.

Two kinds of states, each with the features that serving would have computed there:
    every position   each position of a response, its history that of plain decoding
    cycle boundary   where the gate stands when every cache draft is verified whole: the states seen live, which lie
                     behind a mismatch far more often than chance
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel
from hvd.payoff.features import CONTEXT_NAMES, distinct, features, policy_features, slots
from hvd.payoff.policy import Policy, make_policy
from hvd.training.replay import Cycle, Walk, cycles
from hvd.types import BoolArray, Draft, Float32Array, Int32Array, Int64Array

PAYOFF = 6
"""The payoff that tables ask about: at least so many accepted tokens (the paper's tau)."""


@dataclass(frozen=True, slots=True, eq=False)
class StateSet:
    """N states with a cache draft on offer, and the tokens at the head of these drafts. A state for each of several.

    state      float32 [N, S]   `state_features`, columns `STATE_NAMES`
    rival      float32 [N, R]   columns `RIVAL_NAMES`
    main       bool [N]         the cache's main draft, the only one that fixed rules and the paper's gate see
    token      float32 [M, T]   `token_features` of the accepted tokens and the one behind them, or of the first
                                `PAYOFF` where that is more
    first      int64 [N+1]      state i has the token rows first[i] .. first[i+1]
    payoff     int32 [N]        label: accepted tokens
    length, match_len           int32 [N]; score float32 [N]: of the draft
    dataset    int32 [N]        index into `datasets`
    group      int32 [N]        index into `groups`: requests that must stay on one side of a split
    boundary   bool [N]         cycle boundary, else every position
    censored, bare              states left out: their payoff is unknown; the cache had no main draft
    """

    state: Float32Array
    rival: Float32Array
    main: BoolArray
    token: Float32Array
    first: Int64Array
    payoff: Int32Array
    length: Int32Array
    match_len: Int32Array
    score: Float32Array
    dataset: Int32Array
    group: Int32Array
    boundary: BoolArray
    datasets: tuple[str, ...]
    groups: tuple[str, ...]
    censored: int
    bare: int

    def __len__(self) -> int:
        return len(self.payoff)

    def token_rows(self) -> tuple[Int64Array, Int64Array]:
        """(state, place) of every token row, int64 [M]; place 0 is the draft's first token."""
        counts = np.diff(self.first)
        state = np.repeat(np.arange(len(self)), counts)
        return state, np.arange(len(self.token)) - self.first[state]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Bounds the memory: about `most` states of each kind, drawn evenly, out of `positions` response tokens."""

    positions: int
    most: int = 200_000
    seed: int = 0

    def keep(self, walk: Walk) -> BoolArray:
        """Which positions of a trace may become states, bool [n]; depends on (seed, trace id, position) alone."""
        share = self.most / max(1, self.positions)
        if share >= 1.0:
            return np.ones(len(walk), np.bool_)
        key = (self.seed % 2**64, zlib.crc32(walk.trace.id.encode()))
        kept: BoolArray = np.random.Generator(np.random.Philox(key=key)).random(len(walk)) < share
        return kept


def collect_states(
    walks: Iterable[Walk], cost: CostModel, sampling: Sampling, progress: Callable[[int], None] | None = None
) -> StateSet:
    """The states of walks, of both kinds. `progress(done)` counts response tokens."""
    builder, done = _Builder(), 0
    for walk in walks:
        keep = sampling.keep(walk)
        builder.add(walk, make_policy("plain"), cost, keep, boundary=False)
        builder.add(walk, make_policy("cache"), cost, keep, boundary=True)
        done += len(walk)
        if progress is not None:
            progress(done)
    return builder.build()


def hold_out(states: StateSet, share: float = 0.1) -> tuple[Int64Array, Int64Array, Int64Array]:
    """State numbers to train on, to stop early by, and to judge by; whole groups, by the hash of their names.

    `share` of the groups, at least one, for each of the last two. With fewer than three groups some parts are empty.
    """
    order = sorted(range(len(states.groups)), key=lambda i: hashlib.sha256(states.groups[i].encode()).digest())
    count = max(1, round(share * len(order)))
    part = np.full(len(order), 0)
    part[order[:count]], part[order[count : 2 * count]] = 2, 1
    of_state = part[states.group]
    train, valid, test = (np.flatnonzero(of_state == i) for i in range(3))
    return train, valid, test


_Row = tuple[Float32Array, Float32Array, Float32Array, tuple[int, int, int, int, bool], float]


def _row(walk: Walk, cycle: Cycle, placed: Sequence[Draft | None], draft: Draft) -> _Row:
    """One draft at one state: state, rival and token features, (payoff, length, match, token rows, main), score."""
    history, payoff = cycle.situation.history, walk.payoff(cycle.position, draft)
    state, token = features(history, placed, next(i for i, other in enumerate(placed) if other is draft))
    token = token[: max(payoff + 1, PAYOFF)]
    own, rival = state[: len(CONTEXT_NAMES)], state[len(CONTEXT_NAMES) :]
    facts = payoff, len(draft), draft.match_len, len(token), draft is cycle.situation.cache
    return np.concatenate((own, policy_features(history))), rival, token, facts, draft.score


@dataclass(slots=True)
class _Builder:
    """Grows a StateSet, one array a trace and column."""

    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    datasets: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    censored: int = 0
    bare: int = 0

    def add(self, walk: Walk, policy: Policy, cost: CostModel, keep: BoolArray, *, boundary: bool) -> None:
        """The states that a policy passes in one walk."""
        dataset = self.datasets.setdefault(walk.trace.dataset, len(self.datasets))
        group = self.groups.setdefault(walk.trace.group, len(self.groups))
        rows: list[_Row] = []
        for cycle in cycles(walk, policy, cost):
            if not keep[cycle.position]:
                continue
            self.bare += cycle.situation.cache is None
            drafts = replace(cycle.situation, alternatives=walk.alternatives(cycle.position)).cached
            known = [draft for draft in distinct(drafts) if not walk.censored(cycle.position, draft)]
            self.censored += len(distinct(drafts)) - len(known)
            rows += [_row(walk, cycle, slots(drafts), draft) for draft in known]
        if rows:
            state, rival, token, facts, score = zip(*rows, strict=True)
            common = np.tile(np.array((dataset, group, boundary), np.int32), (len(rows), 1))
            self._append(state=np.stack(state), rival=np.stack(rival), token=np.concatenate(token))
            self._append(facts=np.hstack((np.array(facts, np.int32), common)), score=np.array(score, np.float32))

    def _append(self, **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            self.columns.setdefault(name, []).append(array)

    def build(self) -> StateSet:
        """Join the arrays. ConfigError when there is not one state."""
        if not self.columns:
            raise ConfigError("the traces hold no state with a cache draft; collect more or longer ones")
        joined = {name: np.concatenate(self.columns.pop(name)) for name in tuple(self.columns)}
        facts = joined["facts"]
        return StateSet(
            state=joined["state"],
            rival=joined["rival"],
            main=facts[:, 4].astype(np.bool_),
            token=joined["token"],
            first=np.concatenate([[0], np.cumsum(facts[:, 3], dtype=np.int64)]),
            payoff=facts[:, 0].copy(),
            length=facts[:, 1].copy(),
            match_len=facts[:, 2].copy(),
            score=joined["score"],
            dataset=facts[:, 5].copy(),
            group=facts[:, 6].copy(),
            boundary=facts[:, 7].astype(np.bool_),
            datasets=tuple(self.datasets),
            groups=tuple(self.groups),
            censored=self.censored,
            bare=self.bare,
        )
