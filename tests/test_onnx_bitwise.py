"""Bit for bit: on the ONNX backend a token's logits depend on its prefix alone.

The reference decodes a text one token at a time. Everything else must give the same bits: passes of every width at
every place, prompts cut in any way, trees whose branches lie anywhere, and what follows a kept path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from hvd.models.loader import load_target
from hvd.models.onnx.attention import OnnxKVCache
from hvd.models.onnx.target import OnnxTarget
from hvd.models.target import Span, SpanOutput
from hvd.types import ROOT, Float32Array, Int32Array
from tiny import ARCHITECTURES

Tiny = Callable[..., Path]
FORMATS = ("int4", "int8", "fp32")
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129, 200, 256, 257)
PROSE = """The harbour master kept two books. In the first he wrote what came in: timber from the north, salt,
wine in casks that had to be counted twice, and once a crate of live geese. In the second he wrote
what nobody would pay for: the colour of the water at six in the morning, how the gulls sat before a
storm, which captains slept badly. "The first book is for the town," he used to say, "and the second
is so that I remember which town it was." When he died they found that both books agreed on one
thing only, the weather of a single day in March, and so a plaque was put up to it.
def merge(left, right):
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i]); i += 1
        else:
            result.append(right[j]); j += 1
    return result + left[i:] + right[j:]
{"name": "search_flights", "arguments": {"from": "OSL", "to": "LIS", "date": "2024-03-09", "passengers": 2}}
"""


@dataclass
class Reference:
    """A text decoded one token at a time: logits float32 [n, V], and the cache that holds it."""

    target: OnnxTarget
    text: Int32Array
    logits: Float32Array
    cache: OnnxKVCache
    store: Float32Array

    @staticmethod
    def of(target: OnnxTarget, text: Int32Array) -> Reference:
        cache = target.open()
        logits = np.empty((len(text), target.spec.vocab_size), np.float32)
        for position in range(len(text)):
            [output] = target.forward([Span(cache, text[position : position + 1])])
            cache.keep((0,))
            logits[position] = output.logits[0]
        return Reference(target, text, logits, cache, cache.store.read(np.arange(len(text))))

    def check(self, start: int, width: int) -> None:
        """A pass of `width` tokens behind the first `start` gives the reference's logits, keys and values."""
        end = start + width
        self.cache.rollback(start)
        [output] = self.target.forward([Span(self.cache, self.text[start:end])])
        self.cache.keep(range(width))
        assert np.array_equal(output.logits, self.logits[start:end]), f"width {width} at {start}"
        same = np.array_equal(self.cache.store.read(np.arange(start, end)), self.store[:, :, start:end])
        assert same, f"keys or values of width {width} at {start}"

    def restore(self) -> None:
        self.cache.rollback(0)
        self.cache.reserve(len(self.text))
        self.cache.store.write(np.arange(len(self.text)), self.store)
        self.cache.length = len(self.text)


def check_widths(reference: Reference, starts: int) -> None:
    """Every width at several places, among them right before, at and behind the edge of a block of keys or a span."""
    rng = np.random.default_rng(5)
    length = len(reference.text)
    for width in WIDTHS:
        if width > length:
            continue
        edges = [edge + shift - width for edge in (16, 64, 256, 512) for shift in (-1, 0, 1)]
        anywhere = rng.integers(0, length - width + 1, starts).tolist()
        chosen = rng.permutation([edge for edge in edges if 0 <= edge <= length - width])[:2].tolist()
        for start in [0, *anywhere, *chosen]:
            reference.restore()
            reference.check(start, width)


def check_chunks(reference: Reference, rounds: int) -> None:
    """Texts cut at random, from the first token to the last."""
    rng = np.random.default_rng(6)
    for _ in range(rounds):
        reference.restore()
        start = 0
        while start < len(reference.text):
            width = min(int(rng.integers(1, 90)), len(reference.text) - start)
            reference.check(start, width)
            start += width


def check_trees(reference: Reference, count: int) -> None:
    """Trees around the true continuation; then the kept path is continued, with a chain and with one token."""
    rng = np.random.default_rng(8)
    target, text = reference.target, reference.text
    for _ in range(count):
        size = int(rng.integers(2, 12))
        start = int(rng.integers(1, len(text) - size - 6))
        span, path = tree(rng, reference, start, size)
        reference.restore()
        reference.cache.rollback(start)
        [output] = target.forward([span])
        for depth, node in enumerate(path):
            assert np.array_equal(output.logits[node], reference.logits[start + depth]), f"depth {depth} at {start}"
        reference.cache.keep(path)
        reference.check(start + len(path), 4)
        reference.check(start + len(path) + 4, 1)


def tree(rng: np.random.Generator, reference: Reference, start: int, size: int) -> tuple[Span, list[int]]:
    """A random tree of `size` nodes, one path of which is the text from `start` on. Returns the path's nodes too."""
    parents = np.full(size, ROOT, np.int32)
    tokens = rng.integers(0, reference.target.spec.vocab_size, size).astype(np.int32)
    path = [0]
    tokens[0] = reference.text[start]
    for node in range(1, size):
        parents[node] = rng.integers(0, node)
        if rng.random() < 0.5:
            parents[node] = path[-1]
            tokens[node] = reference.text[start + len(path)]
            path.append(node)
    return Span(reference.cache, tokens, parents), path


def check_company(reference: Reference) -> None:
    """Requests that share a pass do not disturb each other: prompts, drafts, trees and single tokens of many texts."""
    target, text = reference.target, reference.text
    rng = np.random.default_rng(9)
    spans, wanted, caches = [], [], []
    for index in range(12):
        start, width = int(rng.integers(0, 90)), int(rng.choice([1, 1, 2, 5, 9, 40]))
        rows: Literal["all", "last", "none"] = ("all", "all", "last", "none")[index % 4]
        caches.append(target.open())
        if start:
            target.forward([Span(caches[-1], text[:start], rows="none")])
            caches[-1].keep(range(start))
        parents = np.arange(-1, width - 1, dtype=np.int32)
        if index % 5 == 4 and width > 2:
            parents[2:] -= 1
        spans.append(Span(caches[-1], text[start : start + width], parents if index % 5 == 4 else None, rows=rows))
        wanted.append({"all": slice(start, start + width), "last": slice(start + width - 1, start + width)}.get(rows))
    outputs = target.forward(spans)
    for span, output, part in zip(spans, outputs, wanted, strict=True):
        if part is None:
            assert len(output.logits) == 0
        elif span.parents is None:
            assert np.array_equal(output.logits, reference.logits[part])
    for span, cache in zip(spans, caches, strict=True):
        if span.parents is None:
            cache.keep(range(len(span.tokens)))
            stored = cache.store.read(np.arange(cache.length))
            assert np.array_equal(stored, reference.store[:, :, : cache.length])
        else:
            cache.keep(())


# -- tiny models ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[(family, weights) for family in sorted(ARCHITECTURES) for weights in FORMATS], ids="-".join)
def tiny_reference(
    request: pytest.FixtureRequest, tiny_model: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Reference:
    family, weights = request.param
    monkeypatch.setenv("HVD_CACHE", str(tmp_path))
    path = tiny_model(family, hidden=64, heads=4, head_dim=32, intermediate=96, vocab=80)
    target, _ = load_target(path, weights=weights, threads=2)
    assert isinstance(target, OnnxTarget)
    text = np.random.default_rng(9).integers(0, 80, 300).astype(np.int32)
    return Reference.of(target, text)


def test_tiny_models_bit_for_bit(tiny_reference: Reference) -> None:
    check_widths(tiny_reference, starts=2)
    check_chunks(tiny_reference, rounds=2)
    check_trees(tiny_reference, count=10)
    check_company(tiny_reference)


def test_the_checks_notice_a_last_bit(tiny_reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = tiny_reference.target.forward

    def other(spans: Sequence[Span]) -> list[SpanOutput]:
        outputs = forward(spans)
        if len(spans[0].tokens) > 30:
            outputs[0].logits[7, 3] = np.nextafter(outputs[0].logits[7, 3], np.float32(np.inf))
        return outputs

    monkeypatch.setattr(tiny_reference.target, "forward", other)
    with pytest.raises(AssertionError, match="width"):
        check_widths(tiny_reference, starts=2)


# -- real models ------------------------------------------------------------------------------------------------------

REAL = [("smollm2", weights, 520) for weights in FORMATS] + [("qwen_coder", weights, 260) for weights in FORMATS[:2]]


@pytest.fixture(scope="module", params=REAL, ids=lambda param: f"{param[0]}-{param[1]}")
def real_reference(request: pytest.FixtureRequest) -> Reference:
    name, weights, length = request.param
    target, tokenizer = load_target(request.getfixturevalue(name), weights=weights)
    assert isinstance(target, OnnxTarget)
    text = np.array(tokenizer.encode(PROSE * 3), np.int32)[:length]
    assert len(text) == length
    return Reference.of(target, text)


@pytest.mark.model
def test_real_models_passes_of_every_width(real_reference: Reference) -> None:
    check_widths(real_reference, starts=1)


@pytest.mark.model
def test_real_models_cut_anyhow(real_reference: Reference) -> None:
    check_chunks(real_reference, rounds=1)


@pytest.mark.model
def test_real_models_trees(real_reference: Reference) -> None:
    check_trees(real_reference, count=6)
    check_company(real_reference)
