"""The attention operator: right for every shape, and the same bits for a token however a text is cut into passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvd.models.onnx.api import DOMAIN
from hvd.models.onnx.attention import OPERATOR, Attention, OnnxKVCache
from hvd.models.onnx.attention_kernel import APART, CAPACITY_STEP, CHUNK, SERIAL, SPAN, TOGETHER
from hvd.models.onnx.graph import GraphBuilder
from hvd.models.onnx.session import open_session
from hvd.types import Float32Array, Float64Array

LIMIT = 1200


class Layer:
    """A graph of nothing but attention, with random inputs for a text of `length` tokens."""

    def __init__(self, folder: Path, heads: int, kv_heads: int, dim: int, length: int, together: bool = False) -> None:
        self.heads, self.kv_heads, self.dim, self.together = heads, kv_heads, dim, together
        rng = np.random.default_rng(heads * dim + length)
        self.q, self.k, self.v = (
            rng.normal(size=(length, count, dim)).astype(np.float32) for count in (heads, kv_heads, kv_heads)
        )
        angles = rng.uniform(0, 6, (LIMIT, dim // 2)).astype(np.float32)
        self.rope = np.stack([np.cos(angles), np.sin(angles)])
        self.scale = dim**-0.5
        with GraphBuilder(folder) as builder:
            names = ["x"] if together else ["q", "k", "v"]
            for name in names:
                builder.input(name, "float32", [1, "n", "features"])
            builder.node(OPERATOR, names, ["out"], DOMAIN, layer=0, form=TOGETHER if together else APART)
            builder.output("out", "float32", [1, "n", heads * dim])
            builder.save()
        self.attention = Attention(heads, kv_heads, dim, self.scale, self.rope)
        self.binding = open_session(folder, 2, [self.attention.operator()]).binding()
        self.cache = OnnxKVCache((1, kv_heads, dim), LIMIT, 0)

    def run(self, start: int, width: int) -> Float32Array:
        self.cache.rollback(start)
        self.cache.reserve(width)
        parts = [part[start : start + width].reshape(1, width, -1) for part in (self.q, self.k, self.v)]
        inputs = {"x": np.concatenate(parts, axis=2)} if self.together else dict(zip("qkv", parts, strict=True))
        for name, array in inputs.items():
            self.binding.input(name, array)
        out = np.empty((width, self.heads * self.dim), np.float32)
        self.binding.output("out", out, (1, *out.shape))
        self.attention.begin(self.cache.store, start, width)
        self.binding.run()
        self.cache.pending = width
        self.cache.keep(range(width))
        return out

    def expected(self) -> Float64Array:
        length, group = len(self.q), self.heads // self.kv_heads
        q, k = self.turned(self.q), self.turned(self.k)
        scores = np.einsum("qhgd,khd->hgqk", q.reshape(length, self.kv_heads, group, self.dim), k) * self.scale
        scores += np.where(np.tri(length, dtype=bool), 0, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        return np.einsum("hgqk,khd->qhgd", shares, self.v.astype(np.float64)).reshape(length, -1)

    def turned(self, x: Float32Array) -> Float64Array:
        half = self.dim // 2
        first, second = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
        cos, sin = (part[: len(x), None].astype(np.float64) for part in self.rope)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


SHAPES = [(9, 3, 64), (14, 2, 64), (4, 4, 16), (8, 1, 32), (2, 1, 80), (8, 2, 96), (4, 2, 128), (1, 1, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_and_the_same_bits_in_every_pass(shape: tuple[int, int, int], tmp_path: Path) -> None:
    layer = Layer(tmp_path, *shape, length=2 * SPAN + 40)
    length = len(layer.q)
    whole = layer.run(0, length)
    expected = layer.expected()
    assert np.abs(whole - expected).max() < 3e-6 * np.abs(expected).max()
    rng = np.random.default_rng(7)
    edges = [SPAN - 1, SPAN, 2 * SPAN - 1, CAPACITY_STEP, 1, 0]
    for width in (1, 2, 3, SERIAL, SERIAL + 1, CHUNK, CHUNK + 1, 100):
        for start in [*rng.integers(0, length - width, 3).tolist(), *(e for e in edges if e + width <= length)]:
            layer.run(0, length)
            assert np.array_equal(layer.run(start, width), whole[start : start + width]), f"{width} at {start}"


def test_queries_keys_and_values_in_one_input(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    apart = Layer(tmp_path / "a", 9, 3, 64, 50)
    together = Layer(tmp_path / "b", 9, 3, 64, 50, together=True)
    assert np.array_equal(together.run(0, 50), apart.run(0, 50))


def test_what_lies_behind_the_text_is_never_read_into_it(tmp_path: Path) -> None:
    layer = Layer(tmp_path, 6, 2, 32, 300)
    whole = layer.run(0, 300)
    layer.cache.rollback(0)
    layer.cache.store.array[:] = np.nan
    for start in range(0, 300, 50):
        assert np.array_equal(layer.run(start, 50), whole[start : start + 50])


def test_positions_of_a_cache_are_copied_and_moved(tmp_path: Path) -> None:
    layer = Layer(tmp_path, 4, 2, 48, 300)
    layer.run(0, 300)
    kept = layer.cache.store.read(np.arange(300))
    assert np.allclose(kept[0].transpose(1, 0, 2), layer.turned(layer.k), atol=1e-5)
    assert np.array_equal(kept[1].transpose(1, 0, 2), layer.v)
    layer.cache.rollback(280)
    layer.cache.pending = 20
    layer.cache.keep([0, 3, 4, 19])
    moved = layer.cache.store.read(np.arange(284))
    assert np.array_equal(moved[:, :, 280:], kept[:, :, [280, 283, 284, 299]])
    layer.cache.reserve(700)
    assert np.array_equal(layer.cache.store.read(np.arange(284)), moved), "growing keeps what there is"


def test_a_mask_hides_slots_and_levels_of_a_tree_share_a_position(tmp_path: Path) -> None:
    layer = Layer(tmp_path, 6, 2, 32, SPAN + 20)
    length, width = SPAN - 5, 12
    rng = np.random.default_rng(3)
    layer.run(0, length)
    layer.cache.reserve(width)
    mask = rng.random((width, width)) < 0.4
    np.fill_diagonal(mask, True)
    parts = [part[length : length + width].reshape(1, width, -1) for part in (layer.q, layer.k, layer.v)]
    for name, array in zip("qkv", parts, strict=True):
        layer.binding.input(name, array)
    out = np.empty((width, 6 * 32), np.float32)
    layer.binding.output("out", out, (1, *out.shape))
    store = layer.cache.store
    layer.attention.begin(store, length, width, position=length + 3, step=0, mask=mask, masked_from=length)
    layer.binding.run()

    stored = store.read(np.arange(length + width)).astype(np.float64)
    angles = layer.rope[:, length + 3].astype(np.float64)
    q = layer.q[length : length + width].astype(np.float64)
    low, high = q[..., :16], q[..., 16:]
    q = np.concatenate([low * angles[0] - high * angles[1], high * angles[0] + low * angles[1]], axis=-1)
    scores = np.einsum("qhgd,hkd->hgqk", q.reshape(width, 2, 3, 32), stored[0]) * layer.scale
    scores[..., length:] += np.where(mask, 0, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    expected = np.einsum("hgqk,hkd->qhgd", shares, stored[1]).reshape(width, -1)
    assert np.abs(out - expected).max() < 3e-6 * np.abs(expected).max()
