"""Drafts with an EAGLE3 head: chains, and dynamic trees as EAGLE-2 and 3 grow them.

The head's KV cache holds committed text only, and every token of it, whichever arm committed it. `observe` keeps the
pairs (state of token t, token t+1) that the head has not eaten; `propose` eats them first, in one short pass. What a
draft writes behind them is scratch. So a draft depends on the committed text alone.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvd.config import Eagle3Config
from hvd.drafters.base import Drafter
from hvd.models.eagle3 import SCRATCH, Eagle3Head, HeadCache, HeadOutput
from hvd.models.onnx.eagle3 import load_head
from hvd.models.target import TargetSpec
from hvd.types import ROOT, Arm, Draft, Float32Array, Int32Array, Int64Array

log = logging.getLogger("hvd")

CHUNK = 256
"""Most pairs eaten in one pass."""
FEW = 32
"""So many pairs are eaten in one pass with the last one, whose output is wanted; of more, the others by themselves."""
MAX_PENDING_BYTES = 64 * 1024 * 1024
"""States of one request that wait to be eaten; beyond that it catches up although no draft is asked for."""


@dataclass(slots=True)
class _Request:
    """What the drafter knows of one request.

    committed        tokens seen
    tokens, states   pairs not eaten yet, in stretches: int32 [n] and float32 [n, A*H]
    backlog          pairs in them
    output           the head's output behind the last committed token; None while there is a backlog
    """

    cache: HeadCache
    committed: int = 0
    tokens: list[Int32Array] = field(default_factory=list)
    states: list[Float32Array] = field(default_factory=list)
    backlog: int = 0
    output: HeadOutput | None = None


class Eagle3Drafter(Drafter):
    """Drafts with `head`, as `config` says.

    target_layers   the layers whose states `observe` is given, if they are more than the head's or in another order
    """

    arm: ClassVar[Arm] = Arm.EAGLE3

    def __init__(self, head: Eagle3Head, config: Eagle3Config, target_layers: tuple[int, ...] | None = None) -> None:
        self.head = head
        self.config = config
        self._requests: dict[int, _Request] = {}
        self._warned = False
        layers = head.spec.aux_layers if target_layers is None else target_layers
        self._width = len(layers) * head.spec.target_hidden_size
        picked = [layers.index(layer) for layer in head.spec.aux_layers]
        self._picked = None if picked == list(range(len(layers))) else picked

    @property
    def all_or_nothing(self) -> bool:
        """True for trees."""
        return self.config.shape == "tree"

    @property
    def context_limit(self) -> int:
        """The head's."""
        return self.head.spec.context_limit

    @property
    def fingerprint(self) -> str:
        """Of the head's shape and numbers, and of the draft's form."""
        config = self.config
        form = config.shape if config.shape == "chain" else (config.total, config.depth, config.top_k)
        return hashlib.blake2b(repr((self.head.spec, config.weights, form)).encode(), digest_size=6).hexdigest()

    @property
    def wants_hidden(self) -> bool:
        """Always: the head eats the target's hidden states."""
        return True

    def open(self, key: int, scope: str = "") -> None:
        """See `Drafter.open`. Nothing is shared between requests."""
        self._requests[key] = _Request(self.head.open())

    def observe(self, key: int, tokens: Int32Array, hidden: Float32Array | None, *, prompt: bool) -> None:
        """See `Drafter.observe`. ValueError when the states are missing or not as wide as the layers asked for."""
        if hidden is None or hidden.shape != (len(tokens), self._width):
            shape = None if hidden is None else hidden.shape
            raise ValueError(f"EAGLE3 needs hidden states of shape {(len(tokens), self._width)}, got {shape}")
        request = self._requests[key]
        first = 1 if request.committed == 0 else 0  # nothing stands in front of the very first token
        request.committed += len(tokens)
        if request.committed >= self.head.spec.context_limit:
            self._give_up(request)
            return
        if len(tokens) > first:
            request.tokens.append(np.array(tokens[first:], np.int32))
            request.states.append(self._own(hidden[first:]))
            request.backlog += len(tokens) - first
            request.output = None
        if request.backlog * self.head.spec.target_hidden_size * len(self.head.spec.aux_layers) * 4 > MAX_PENDING_BYTES:
            self._catch_up(request)

    def propose(self, key: int, room: int) -> Draft | None:
        """Draft min(room, limit) tokens, of a chain fewer where the head does not believe in more (`min_prob`).

        None past the head's position limit, or before it has a pair to start from.
        """
        length = min(room, self.limit(key))
        if length <= 0:
            return None
        request = self._requests[key]
        output = self._catch_up(request)
        if self.config.shape == "chain":
            return self._chain(request.cache, output, length)
        levels = min(self.config.depth, self._positions_left(request))
        return self._tree(request.cache, output, length, levels)

    def close(self, key: int, *, keep: bool) -> None:
        """See `Drafter.close`. Nothing is kept."""
        del self._requests[key]

    def limit(self, key: int) -> int:
        """Most tokens (of a tree: nodes) that `propose` would draft now; none stands past the head's positions."""
        request = self._requests[key]
        left = self._positions_left(request)
        if left <= 0 or (request.output is None and not request.backlog):
            return 0
        return min(self.config.chain_length, left) if self.config.shape == "chain" else self.config.total

    def backlog(self, key: int) -> int:
        """Committed tokens that the head has yet to eat before it drafts."""
        return self._requests[key].backlog

    def unhesitating(self) -> Eagle3Drafter:
        """See `Drafter.unhesitating`: over the same head, with chains that never end early."""
        other = copy.copy(self)
        other.config, other._requests = replace(self.config, min_prob=0.0), {}
        return other

    # -- the committed text -------------------------------------------------------------------------------------------

    def _positions_left(self, request: _Request) -> int:
        return self.head.spec.context_limit - request.committed

    def _own(self, hidden: Float32Array) -> Float32Array:
        """A copy of the states of the head's own layers (the target may overwrite what it gave)."""
        if self._picked is None:
            return np.array(hidden, np.float32)
        parts = hidden.reshape(len(hidden), -1, self.head.spec.target_hidden_size)
        return np.asarray(parts[:, self._picked], np.float32).reshape(len(hidden), -1)

    def _give_up(self, request: _Request) -> None:
        """The text has reached the head's position limit: free everything, and say so once."""
        request.cache = self.head.open()
        request.tokens, request.states, request.backlog, request.output = [], [], 0, None
        if not self._warned:
            self._warned = True
            log.warning(
                "a text has reached the EAGLE3 head's limit of %d positions and is no longer drafted for; "
                "the output stays the same",
                self.head.spec.context_limit,
            )

    def _catch_up(self, request: _Request) -> HeadOutput:
        """Eat all waiting pairs. Returns the head's output behind the last committed token."""
        if request.backlog:
            tokens, states = np.concatenate(request.tokens), np.concatenate(request.states)
            last = len(tokens) - 1 if len(tokens) > FEW else 0
            for start in range(0, last, CHUNK):
                chunk = slice(start, min(start + CHUNK, last))
                self.head.eat(tokens[chunk], states[chunk], request.cache)
            request.output = self.head.forward(tokens[last:], self.head.fuse(states[last:]), request.cache)
            request.cache.length += len(tokens) - last
            request.tokens, request.states, request.backlog = [], [], 0
        assert request.output is not None  # `limit` has checked it
        return request.output

    # -- drafting -----------------------------------------------------------------------------------------------------

    def _chain(self, cache: HeadCache, output: HeadOutput, length: int) -> Draft:
        """The likeliest token, again and again, while the head believes in the whole chain; one token at least."""
        tokens, probs, belief, count = np.empty(length, np.int32), np.empty(length, np.float32), 1.0, 0
        for depth in range(length):
            if depth > 0:
                output = self.head.forward(
                    tokens[depth - 1 : depth], output.features[-1:], cache, start=cache.length + depth - 1
                )
            best, logprobs = _likeliest(output.logits, 1)
            tokens[depth], probs[depth] = self.head.target_ids[best[0, 0]], np.exp(logprobs[0, 0])
            belief *= float(probs[depth])
            if depth > 0 and belief < self.config.min_prob:
                break
            count = depth + 1
        tokens, probs = tokens[:count], probs[:count]
        return Draft.chain(tokens, self.arm, probs, score=float(np.cumprod(probs).sum()))

    def _tree(self, cache: HeadCache, output: HeadOutput, total: int, levels: int) -> Draft:
        """The `total` likeliest nodes of a tree grown level by level, the `top_k` likeliest nodes of each expanded."""
        grown = _Grown(self.config.top_k)
        fresh = grown.add(self.head.target_ids, output.logits, np.array([ROOT]))
        features, seen = output.features[-1:], np.zeros((1, 0), np.bool_)
        for depth in range(levels - 1):
            frontier = grown.frontier(fresh, total)
            used, count = seen.shape[1], len(frontier)
            if not count or used + count > SCRATCH:
                break
            rows = grown.rows[frontier]  # of their parents in the last pass
            seen = np.concatenate([seen[rows], np.eye(count, dtype=np.bool_)], axis=1)
            start = cache.length + used
            output = self.head.forward(
                grown.tokens[frontier], features[rows], cache, start=start, depth=depth, mask=seen, last=False
            )
            features = output.features
            fresh = grown.add(self.head.target_ids, output.logits, frontier)
        return grown.best(total, self.arm)


class _Grown:
    """All nodes of a growing tree, one entry each.

    tokens     int32
    parents    int64, a node's index or ROOT
    logprobs   float32, natural log of the probability given the parent
    paths      float32, the same of the whole path from the root
    rows       int64, row of the parent in the pass that made the node
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.tokens: Int32Array = np.empty(0, np.int32)
        self.parents: Int64Array = np.empty(0, np.int64)
        self.logprobs: Float32Array = np.empty(0, np.float32)
        self.paths: Float32Array = np.empty(0, np.float32)
        self.rows: Int64Array = np.empty(0, np.int64)

    def add(self, target_ids: Int32Array, logits: Float32Array, parents: Int64Array) -> Int64Array:
        """Give each of `parents` its likeliest children, by logits [len(parents), V]. Returns the new nodes."""
        entries, logprobs = _likeliest(logits, self._top_k)
        count, known = entries.shape[1], len(self.tokens)
        above = np.repeat(parents, count)
        before = np.where(above == ROOT, np.float32(0), self.paths[above] if known else np.float32(0))
        self.tokens = np.concatenate([self.tokens, target_ids[entries.ravel()]])
        self.parents = np.concatenate([self.parents, above])
        self.logprobs = np.concatenate([self.logprobs, logprobs.ravel()])
        self.paths = np.concatenate([self.paths, before + logprobs.ravel()])
        self.rows = np.concatenate([self.rows, np.repeat(np.arange(len(parents)), count)])
        return np.arange(known, len(self.tokens))

    def frontier(self, fresh: Int64Array, total: int) -> Int64Array:
        """The likeliest of the nodes `fresh`, without those whose children could not be among the best `total`."""
        chosen = fresh[np.argsort(-self.paths[fresh], kind="stable")[: self._top_k]]
        if len(self.paths) > total:
            bar = np.partition(self.paths, -total)[-total]
            chosen = chosen[self.paths[chosen] > bar]
        return chosen

    def best(self, total: int, arm: Arm) -> Draft:
        """The `total` likeliest nodes. A parent is never less likely and always earlier, so ancestors are kept."""
        kept = np.sort(np.argsort(-self.paths, kind="stable")[:total])
        place = np.full(len(self.tokens) + 1, ROOT, np.int32)  # the last entry answers for ROOT
        place[kept] = np.arange(len(kept))
        zeros = np.zeros(len(kept), np.int32)
        return Draft(
            tokens=self.tokens[kept],
            parents=place[self.parents[kept]],
            probs=np.exp(self.logprobs[kept]),
            arm=arm,
            score=float(np.exp(self.paths[kept]).sum()),
            match_len=0,
            counts=zeros,
            parent_counts=zeros,
        )


def _likeliest(logits: Float32Array, count: int) -> tuple[NDArray[np.int64], Float32Array]:
    """The `count` likeliest entries of each row, likeliest first, and their log-probabilities; both [n, count]."""
    count, rows = min(count, logits.shape[1]), np.arange(len(logits))[:, None]
    if count == 1:
        entries = logits.argmax(axis=1, keepdims=True)
    else:
        entries = np.argpartition(-logits, count - 1, axis=1)[:, :count]
        entries = entries[rows, np.argsort(-logits[rows, entries], axis=1, kind="stable")]
    values = logits[rows, entries]
    peak = values[:, :1]
    return entries, values - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))


def load_eagle3_drafter(
    source: str | Path,
    target: TargetSpec,
    target_tensor: Callable[[str], NDArray[Any]],
    config: Eagle3Config,
    *,
    threads: int | None = None,
    any_target: bool = False,
) -> Eagle3Drafter:
    """Load a head and make a drafter of it. Parameters and errors as `hvd.models.onnx.eagle3.load_head`."""
    head = load_head(source, target, target_tensor, weights=config.weights, threads=threads, any_target=any_target)
    return Eagle3Drafter(head, config, target.aux_layers)
