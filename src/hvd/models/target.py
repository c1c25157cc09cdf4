"""The interface of a target model: one forward pass over several requests. Backends: onnx, torch_target.

A pass takes one `Span` a request. Behind a request's committed positions (already in its KV cache) stand the
span's n new tokens: a chunk of prompt, or the last committed token with a draft behind it. The pass computes all
of them, appends their keys and values as *pending*, and returns the rows asked for. `KVCache.keep` then says
which of the pending positions are committed; the others are forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvd.types import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Facts about a loaded target.

    name            for people: the checkpoint's own name or its directory's or file's
    family          "llama", "mistral", "qwen2" or "qwen3"
    vocab_size      V, columns of a logits row (may exceed the tokenizer's size by padding)
    hidden_size     H
    num_layers      decoder layers
    context_limit   most positions (prompt + output)
    aux_layers      decoder layers whose *entering* hidden states a pass can return, lowest first (0 = embeddings);
                    A = len(aux_layers)
    fingerprint     hex digest of architecture and weights: same fingerprint, same model
    backend         "onnx" or "torch"
    weights         number format of the weights in use: "int4", "int8", "fp32", "float64", "bf16", ...
    min_width       narrowest pass the backend really computes; a narrower span costs as much (onnx: 1 or 2)
    shared_passes   True when requests of one pass share the reading of the weights, False when the backend runs them
                    one after the other
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_limit: int
    aux_layers: tuple[int, ...]
    fingerprint: str
    backend: str
    weights: str
    min_width: int = 1
    shared_passes: bool = True


class KVCache(ABC):
    """Keys and values of one request. Preallocated, grows by itself up to the target's context limit.

    `length` positions are committed; after a pass `pending` more stand behind them until `keep` is called.
    """

    length: int
    pending: int

    @abstractmethod
    def keep(self, path: Sequence[int]) -> None:
        """Commit the pending positions named by `path` (ascending indices into the last span), drop the others.

        A prefix (0, 1, .., a) costs O(1); a tree's scattered path is moved into place. Raises ValueError when an
        index is not pending or the path does not ascend. Must be called once after every pass, `keep(())` drops all.
        """

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Forget all from position `length` on, pending positions included, in O(1). ValueError if out of range."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Using the cache afterwards raises RuntimeError; closing twice is harmless."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One request's part of a pass.

    cache     the request's KV cache; nothing may be pending in it
    tokens    int32 [n], n >= 1
    parents   None for a chain; else int32 [n], parents[i] < i the token in front of token i, ROOT (-1) = the last
              committed position. Token i attends to all committed positions, its ancestors and itself; its position is
              cache.length + its depth.
    rows      which positions' logits are wanted: all of them, the last one, or none
    hidden    whether the auxiliary hidden states of all n positions are wanted
    """

    cache: KVCache
    tokens: Int32Array
    parents: Int32Array | None = None
    rows: Literal["all", "last", "none"] = "all"
    hidden: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SpanOutput:
    """What a pass returns for one span.

    logits   float32 [n, V], [1, V] or [0, V] as `Span.rows` asked. float64 targets return float64.
             The caller may read it until the next pass; it must not write to it.
    hidden   float32 [n, A*H], the states entering `aux_layers`, concatenated lowest layer first; None if not asked for
    """

    logits: Float32Array
    hidden: Float32Array | None


class Target(ABC):
    """A loaded model. Not thread-safe: one engine drives it from one thread."""

    spec: TargetSpec

    @abstractmethod
    def open(self) -> KVCache:
        """A fresh, empty KV cache."""

    @abstractmethod
    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        """Run one pass.

        Raises ValueError for an empty span, a token id outside [0, V) or a span beyond the context limit.
        """
