"""Small fakes for tests of code that builds on this package: a target and a drafter that need no model.

Both hold their callers to the interfaces they stand for, and keep a log of what was asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvd.drafters.base import Drafter
from hvd.models.kv_cache import GrowingKVCache
from hvd.models.spans import check_spans
from hvd.models.target import KVCache, Span, SpanOutput, Target, TargetSpec
from hvd.types import ROOT, Arm, Draft, Float32Array, Int32Array, Int64Array

UInt64Array = NDArray[np.uint64]
Script = Callable[[Int32Array, int], Draft | Sequence[int] | None]
NO_TOKEN = -1


class FakeKVCache(GrowingKVCache):
    """Remembers token ids, all that a fake target's logits depend on: `tokens` int32 [capacity]."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.tokens = np.zeros(0, dtype=np.int32)

    def _grow(self, capacity: int) -> None:
        tokens = np.zeros(capacity, dtype=np.int32)
        tokens[: self.length] = self.tokens[: self.length]
        self.tokens = tokens

    def _move(self, sources: Int64Array, start: int) -> None:
        self.tokens[start : start + len(sources)] = self.tokens[sources]

    def _free(self) -> None:
        self.tokens = np.zeros(0, dtype=np.int32)


class FakeTarget(Target):
    """A target whose logits are a fixed random function of the last `order` tokens, the row's own included.

    Bitwise equal however the text is cut into passes, chains or trees; and repetitive: a greedy text comes back to an
    earlier state after about vocab_size ** (order / 2) tokens, so a suffix cache soon finds matches.

    passes   widths of every pass so far, one list a pass
    opened   KV caches handed out so far, closed ones too
    """

    def __init__(
        self,
        vocab_size: int = 64,
        context_limit: int = 512,
        order: int = 2,
        seed: int = 0,
        *,
        spread: float = 8.0,
        min_width: int = 1,
        hidden_size: int = 8,
        aux_layers: tuple[int, ...] = (0, 1, 2),
        shared_passes: bool = True,
    ) -> None:
        """Logits are uniform in [0, spread); the other parameters are those of `TargetSpec`."""
        if order < 1:
            raise ValueError(f"order must be at least 1, got {order}")
        self.order = order
        self.seed = seed
        self.spread = spread
        self.passes: list[list[int]] = []
        self.opened: list[FakeKVCache] = []
        self.spec = TargetSpec(
            name="fake",
            family="llama",
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=max(aux_layers, default=0) + 1,
            context_limit=context_limit,
            aux_layers=aux_layers,
            fingerprint=f"fake-{vocab_size}-{order}-{seed}-{spread}",
            backend="fake",
            weights="none",
            min_width=min_width,
            shared_passes=shared_passes,
        )

    def open(self) -> KVCache:
        """See `Target.open`."""
        cache = FakeKVCache(self.spec.context_limit)
        self.opened.append(cache)
        return cache

    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """See `Target.forward`."""
        check_spans(spans, self.spec.vocab_size, self.spec.context_limit)
        for span in spans:
            self._own(span.cache).reserve(len(span.tokens))
        self.passes.append([len(span.tokens) for span in spans])
        return [self._run(span, self._own(span.cache)) for span in spans]

    def logits(self, tokens: Sequence[int]) -> Float32Array:
        """The row [V] behind a text: what a pass computes for its last token."""
        state = ([NO_TOKEN] * self.order + list(tokens))[-self.order :]
        [row] = self._logits(np.array([state], dtype=np.int64))
        return np.asarray(row)

    def _run(self, span: Span, cache: FakeKVCache) -> SpanOutput:
        n, start = len(span.tokens), cache.length
        states = self._states(cache.tokens[:start], span)
        cache.tokens[start : start + n] = span.tokens
        cache.pending = n
        first = {"all": 0, "last": n - 1, "none": n}[span.rows]
        width = len(self.spec.aux_layers) * self.spec.hidden_size
        return SpanOutput(
            logits=self._logits(states[first:]),
            hidden=self._values(states, width, salt=1) if span.hidden else None,
        )

    def _states(self, committed: Int32Array, span: Span) -> Int64Array:
        """The last `order` tokens up to each token of the span: int64 [n, order]."""
        states = np.full((len(span.tokens), self.order), NO_TOKEN, dtype=np.int64)
        root = np.concatenate((states[0], committed))[-self.order :]
        for node, token in enumerate(span.tokens):
            parent = node - 1 if span.parents is None else int(span.parents[node])
            before = root if parent == ROOT else states[parent]
            states[node] = np.append(before[1:], token)
        return states

    def _logits(self, states: Int64Array) -> Float32Array:
        return self._values(states, self.spec.vocab_size, salt=0) * np.float32(self.spread)

    def _values(self, states: Int64Array, columns: int, salt: int) -> Float32Array:
        """Uniform numbers in [0, 1), a function of state, column, salt and seed: float32 [n, columns]."""
        keys = np.full(len(states), (self.seed % 2**32) * 2 + salt, dtype=np.uint64)
        for tokens in states.T:
            keys = _mix(keys ^ tokens.astype(np.uint64))
        values = _mix(keys[:, None] ^ np.arange(columns, dtype=np.uint64)) >> np.uint64(40)
        return values.astype(np.float32) / np.float32(2**24)

    def _own(self, cache: KVCache) -> FakeKVCache:
        if not isinstance(cache, FakeKVCache):
            raise TypeError(f"the fake target needs a cache that it opened itself, got {type(cache).__name__}")
        return cache


def _mix(x: UInt64Array) -> UInt64Array:
    """Scramble 64 bits (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014; SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class ScriptedDrafter(Drafter):
    """Proposes what a function says: `script(committed tokens, room)` returns a draft, the ids of a chain, or None.

    Ids may be wrong or invalid; those beyond 32 bits wrap, as in any int32 array. What exceeds `room` is cut off.

    texts    key -> all tokens observed, in order; kept when the request is closed
    prompts  key -> how many of them belonged to the prompt
    hidden   key -> the rows that came with them, when `wants_hidden`
    closed   key -> the `keep` of its close
    rooms    (key, room) of every call of `propose`
    """

    arm: ClassVar[Arm] = Arm.CACHE

    def __init__(self, script: Script, *, wants_hidden: bool = False) -> None:
        self.script = script
        self.texts: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.hidden: dict[int, list[Float32Array]] = {}
        self.closed: dict[int, bool] = {}
        self.rooms: list[tuple[int, int]] = []
        self._wants_hidden = wants_hidden

    @property
    def wants_hidden(self) -> bool:
        """See `Drafter.wants_hidden`."""
        return self._wants_hidden

    @property
    def live(self) -> set[int]:
        """Keys that are open."""
        return set(self.texts) - set(self.closed)

    def open(self, key: int, scope: str = "") -> None:
        """See `Drafter.open`. Raises ValueError for a key used before."""
        if key in self.texts:
            raise ValueError(f"key {key} was used before")
        self.texts[key], self.prompts[key], self.hidden[key] = [], 0, []

    def observe(self, key: int, tokens: Int32Array, hidden: Float32Array | None, *, prompt: bool) -> None:
        """See `Drafter.observe`. Raises ValueError when hidden states are missing or not one a token."""
        self._require_live(key)
        if self._wants_hidden:
            if hidden is None or len(hidden) != len(tokens):
                rows = None if hidden is None else len(hidden)
                raise ValueError(f"{len(tokens)} tokens need as many rows of hidden states, got {rows}")
            self.hidden[key].extend(hidden.copy())
        self.texts[key].extend(tokens.tolist())
        self.prompts[key] += len(tokens) if prompt else 0

    def propose(self, key: int, room: int) -> Draft | None:
        """See `Drafter.propose`."""
        self._require_live(key)
        self.rooms.append((key, room))
        answer = self.script(np.array(self.texts[key], dtype=np.int32), room)
        if answer is not None and not isinstance(answer, Draft):
            answer = Draft.chain(np.array(answer, dtype=np.int64).astype(np.int32), self.arm)
        return answer.first(room) if answer is not None and len(answer) and room > 0 else None

    def close(self, key: int, *, keep: bool) -> None:
        """See `Drafter.close`."""
        self._require_live(key)
        self.closed[key] = keep

    def _require_live(self, key: int) -> None:
        if key not in self.live:
            raise ValueError(f"key {key} is not open")


class ScriptedHead(ScriptedDrafter):
    """The same in the place of an EAGLE3 head."""

    arm: ClassVar[Arm] = Arm.EAGLE3
