"""The EAGLE3 head (Li et al., "EAGLE-3", arXiv 2503.01840): one small decoder that drafts for the target.

The head eats *pairs*, the feature of token t and the embedding of token t+1, and predicts token t+2. A pair's position
is that of t. For committed tokens the feature is `fuse`d from the target's hidden states; behind them the head feeds
itself its own output.

    g = fc(states)                                      committed tokens (input_norm or fc_norm first, if any)
    x = cat(input_layernorm(embed(token)), hidden_norm(g))
    h = g + attention(x);  out = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(out));  the next g is out (norm(out) with norm_output)

`NumpyHead` is the plain reading of these lines; `OnnxHead` (onnx/eagle3.py) computes the same faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd.models.eagle3_checkpoint import HeadWeights
from hvd.models.eagle3_tensors import HeadSpec
from hvd.models.rope import cos_sin
from hvd.types import BoolArray, Float32Array, Int32Array

FIRST_CAPACITY = 256
SCRATCH = 1024
"""Slots behind the committed pairs that the levels of a tree may fill."""
ROTARY_BLOCK = 1024
PARTS = ("key", "value")


class HeadCache:
    """Keys and values of one request in the head.

    `length` pairs of committed text come first; slots behind them are scratch that the next pass may overwrite.

    keys, values   float32 [layers, kv_heads, capacity, head_dim]
    """

    def __init__(self, spec: HeadSpec) -> None:
        self.length = 0
        shape = (spec.num_layers, spec.num_kv_heads, FIRST_CAPACITY, spec.head_dim)
        self.keys: Float32Array = np.zeros(shape, np.float32)
        self.values: Float32Array = np.zeros(shape, np.float32)

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return int(self.keys.shape[2])

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots in all, doubling."""
        if slots > self.capacity:
            more = max(slots - self.capacity, self.capacity)
            grow = ((0, 0), (0, 0), (0, more), (0, 0))
            self.keys, self.values = np.pad(self.keys, grow), np.pad(self.values, grow)


@dataclass(frozen=True, slots=True, eq=False)
class HeadOutput:
    """What a pass of the head gives.

    features   float32 [n, H], what the head feeds itself next
    logits     float32 [n, V] over the draft vocabulary, or [1, V] of the last token alone
    """

    features: Float32Array
    logits: Float32Array


class Eagle3Head(ABC):
    """A loaded head. `target_ids` int32 [V] turns draft vocabulary entries into token ids."""

    def __init__(self, spec: HeadSpec, embedding: NDArray[Any], target_ids: Int32Array) -> None:
        self.spec = spec
        self.target_ids = target_ids
        self._embedding = embedding

    def open(self) -> HeadCache:
        """An empty KV cache."""
        return HeadCache(self.spec)

    def embed(self, tokens: Int32Array) -> Float32Array:
        """float32 [n, H]."""
        return np.asarray(self._embedding[tokens], dtype=np.float32)

    @abstractmethod
    def fuse(self, states: Float32Array) -> Float32Array:
        """Features [n, H] of the target's hidden states [n, A * target hidden size]."""

    def eat(self, tokens: Int32Array, states: Float32Array, cache: HeadCache) -> None:
        """Commit n pairs whose output nobody wants: tokens int32 [n], the target's states [n, A * H]."""
        self.forward(tokens, self.fuse(states), cache)
        cache.length += len(tokens)

    @abstractmethod
    def forward(
        self,
        tokens: Int32Array,
        features: Float32Array,
        cache: HeadCache,
        *,
        start: int | None = None,
        depth: int = 0,
        mask: BoolArray | None = None,
        last: bool = True,
    ) -> HeadOutput:
        """Eat n pairs.

        tokens     int32 [n], the token of each pair
        features   float32 [n, H]
        start      slots start .. start+n-1 take their keys and values; default: directly behind the committed pairs
        depth      with a mask, a level of a tree: all n pairs stand at position cache.length + depth. Without, they
                   follow each other from position `start` on
        mask       bool [n, start + n - cache.length], which slots behind the committed ones each pair attends to
                   (all committed ones in any case); None = causal
        last       logits of the last pair only
        """


class NumpyHead(Eagle3Head):
    """The head in NumPy, float32. The reference, and the fallback."""

    def __init__(self, weights: HeadWeights) -> None:
        super().__init__(weights.spec, weights.embedding, weights.target_ids)
        self._t = weights.tensors
        self._rotary = RotaryTable(self.spec)
        names = [f"layers.{layer}.self_attn" for layer in range(self.spec.num_layers)]
        self._qkv = [np.concatenate([self._t[f"{name}.{part}_proj.weight"] for part in "qkv"]) for name in names]
        self._qkv_bias = [
            np.concatenate([self._t[f"{name}.{part}_proj.bias"] for part in "qkv"])
            if f"{name}.q_proj.bias" in self._t
            else np.float32(0)
            for name in names
        ]

    def fuse(self, states: Float32Array) -> Float32Array:
        """See `Eagle3Head.fuse`."""
        if "input_norm.weight" in self._t:
            states = self._norm(states, "input_norm")
        elif "fc_norm.0.weight" in self._t:
            parts = np.split(states, len(self.spec.aux_layers), axis=-1)
            states = np.concatenate([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], axis=-1)
        return states @ self._t["fc.weight"].T

    def forward(
        self,
        tokens: Int32Array,
        features: Float32Array,
        cache: HeadCache,
        *,
        start: int | None = None,
        depth: int = 0,
        mask: BoolArray | None = None,
        last: bool = True,
    ) -> HeadOutput:
        """See `Eagle3Head.forward`."""
        start = cache.length if start is None else start
        cache.reserve(start + len(tokens))
        positions = start + np.arange(len(tokens)) if mask is None else np.full(len(tokens), cache.length + depth)
        bias = attention_bias(len(tokens), start, cache.length, mask)
        cos, sin = self._rotary.at(positions)
        normed = self._norm(features, "layers.0.hidden_norm")
        hidden = normed if self.spec.norm_before_residual else features
        x = np.concatenate([self._norm(self.embed(tokens), "layers.0.input_layernorm"), normed], axis=-1)
        for layer in range(self.spec.num_layers):
            if layer > 0:
                x = self._norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = hidden + self._attention(x, layer, cache, start, bias, cos, sin)
            hidden = hidden + self._mlp(self._norm(hidden, f"layers.{layer}.post_attention_layernorm"), layer)
        normed = self._norm(hidden, "norm")
        logits = (normed[-1:] if last else normed) @ self._t["lm_head.weight"].T
        return HeadOutput(normed if self.spec.norm_output else hidden, logits)

    def _attention(
        self,
        x: Float32Array,
        layer: int,
        cache: HeadCache,
        start: int,
        bias: Float32Array | None,
        cos: Float32Array,
        sin: Float32Array,
    ) -> Float32Array:
        """Grouped-query attention over slots 0 .. start+n-1; x [n, 2H or H] -> [n, H]."""
        spec, name, n = self.spec, f"layers.{layer}.self_attn", len(x)
        heads, kv, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = (x @ self._qkv[layer].T + self._qkv_bias[layer]).reshape(n, heads + 2 * kv, size)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
        if f"{name}.q_norm.weight" in self._t:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        end = start + n
        cache.keys[layer, :, start:end] = _rotate(k, cos, sin).transpose(1, 0, 2)
        cache.values[layer, :, start:end] = v.transpose(1, 0, 2)
        q = _rotate(q, cos, sin).reshape(n, kv, -1, size).transpose(1, 2, 0, 3).reshape(kv, -1, size)  # [kv, g*n, d]
        scores = (q @ cache.keys[layer, :, :end].transpose(0, 2, 1)) * np.float32(size**-0.5)  # [kv, g*n, end]
        if bias is not None:
            scores = (scores.reshape(kv, -1, n, end) + bias).reshape(scores.shape)
        mixed: Float32Array = _softmax(scores) @ cache.values[layer, :, :end]  # [kv, g*n, d]
        mixed = mixed.reshape(kv, -1, n, size).transpose(2, 0, 1, 3).reshape(n, heads * size)
        out: Float32Array = mixed @ self._t[f"{name}.o_proj.weight"].T
        return out + self._t[f"{name}.o_proj.bias"] if f"{name}.o_proj.bias" in self._t else out

    def _mlp(self, x: Float32Array, layer: int) -> Float32Array:
        name = f"layers.{layer}.mlp"
        gate: Float32Array = x @ self._t[f"{name}.gate_proj.weight"].T
        with np.errstate(over="ignore"):  # exp of a very negative gate is inf, and its silu 0, as it should be
            gate /= 1 + np.exp(-gate)
        gate *= x @ self._t[f"{name}.up_proj.weight"].T
        out: Float32Array = gate @ self._t[f"{name}.down_proj.weight"].T
        return out

    def _norm(self, x: Float32Array, name: str) -> Float32Array:
        mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        scale: Float32Array = np.sqrt(mean + np.float32(self.spec.norm_eps))
        normed: Float32Array = x / scale * self._t[f"{name}.weight"]
        return normed


class RotaryTable:
    """Cosines and sines by position, float32, computed a block of positions at a time as they are first needed."""

    def __init__(self, spec: HeadSpec) -> None:
        self._spec = spec
        self._cos = self._sin = np.empty((0, spec.head_dim // 2), np.float32)

    def at(self, positions: NDArray[np.int64]) -> tuple[Float32Array, Float32Array]:
        """Two float32 [n, head_dim / 2]."""
        self.cover(int(positions.max()) + 1)
        return self._cos[positions], self._sin[positions]

    def cover(self, count: int) -> tuple[Float32Array, Float32Array]:
        """The whole tables, of at least `count` positions."""
        if count > len(self._cos):
            wanted = np.arange(-(-count // ROTARY_BLOCK) * ROTARY_BLOCK)
            cos, sin = cos_sin(self._spec.rope, self._spec.head_dim, self._spec.context_limit, wanted)
            self._cos, self._sin = cos.astype(np.float32), sin.astype(np.float32)
        return self._cos, self._sin


def attention_bias(count: int, start: int, length: int, mask: BoolArray | None) -> Float32Array | None:
    """What is added to the scores of `count` pairs in slots from `start` on: -inf where a pair must not look.

    Returns float32 [count, start + count], or None where every pair sees all.
    """
    if mask is None and count == 1:
        return None
    bias = np.zeros((count, start + count), np.float32)
    if mask is None:
        bias[:, start:][np.triu_indices(count, 1)] = -np.inf
    else:
        bias[:, length:][~mask] = -np.inf
    return bias


def _rotate(x: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
    """Turn heads [n, heads, d] by the angles [n, d/2], halves layout."""
    half = x.shape[-1] // 2
    low, high, cos, sin = x[..., :half], x[..., half:], cos[:, None], sin[:, None]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _softmax(scores: Float32Array) -> Float32Array:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
