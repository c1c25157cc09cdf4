"""Products with 4- and 8-bit matrices: right, and every row alike, on every way a processor has of doing it."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.models.onnx import linear_kernel, vector_code
from hvd.models.onnx.linear_kernel import BLOCK, LANES, gated_matrix, multiply, packed_matrix, record_size
from hvd.models.onnx.weights import quantize
from hvd.types import Float32Array

pytestmark = pytest.mark.skipif(not vector_code.INTEGER_DOT, reason="the processor has no VNNI")


def matrix(rng: np.random.Generator, rows: int, columns: int) -> Float32Array:
    return rng.normal(size=(rows, columns)).astype(np.float32) * rng.uniform(0.01, 3, (rows, 1)).astype(np.float32)


def rounded(x: Float32Array) -> Float32Array:
    """The input as the kernel takes it: 8 bits a number, a scale a block."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    most = np.abs(blocks).max(axis=2, keepdims=True)
    steps = np.rint(blocks * np.divide(127, most, out=np.zeros_like(most), where=most > 0))
    return (steps * (most / 127)).reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (192, 576), (37, 80), (5, 33), (64, 1000)])
def test_a_product_is_that_of_the_rounded_input(bits: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(1)
    weight = quantize(matrix(rng, rows, columns), bits)
    x = matrix(rng, 19, columns)
    held = weight.in_halves() if bits == 4 else weight
    expected = rounded(x).astype(np.float64) @ held.dequantized().astype(np.float64).T
    assert np.abs(multiply(x, packed_matrix(weight), rows, bits) - expected).max() < 2e-6 * np.abs(expected).max()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 100),
    width=st.integers(1, 30),
    bits=st.sampled_from([4, 8]),
    gated=st.booleans(),
    data=st.data(),
)
def test_a_row_is_computed_alike_whatever_stands_beside_it(
    rows: int, columns: int, width: int, bits: int, gated: bool, data: st.DataObject
) -> None:
    rng = np.random.default_rng(rows * columns + width)
    packed = packed_matrix(quantize(matrix(rng, rows, columns), bits))
    if gated:
        packed = gated_matrix(packed, packed_matrix(quantize(matrix(rng, rows, columns), bits)))
    x = matrix(rng, width, columns)
    whole = multiply(x, packed, rows, bits, gated)
    start = data.draw(st.integers(0, width - 1))
    end = data.draw(st.integers(start + 1, width))
    assert np.array_equal(multiply(x[start:end], packed, rows, bits, gated), whole[start:end])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_gated_product(bits: int) -> None:
    rng = np.random.default_rng(2)
    gate, up = (quantize(matrix(rng, 48, 96) / 4, bits) for _ in range(2))
    x = matrix(rng, 11, 96)
    whole = gated_matrix(packed_matrix(gate), packed_matrix(up))
    left, right = (multiply(x, packed_matrix(part), 48, bits).astype(np.float64) for part in (gate, up))
    expected = left / (1 + np.exp(-left)) * right
    assert np.abs(multiply(x, whole, 48, bits, gated=True) - expected).max() < 1e-6 * np.abs(expected).max()


def test_zeros_and_extremes_are_exact() -> None:
    rng = np.random.default_rng(3)
    packed = packed_matrix(quantize(matrix(rng, 16, 64), 8))
    assert not multiply(np.zeros((3, 64), np.float32), packed, 16, 8).any()
    huge = multiply(np.full((1, 64), 1e30, np.float32), packed, 16, 8)
    assert np.isfinite(huge).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_record_holds_what_the_docstring_says(bits: int) -> None:
    rng = np.random.default_rng(4)
    weight = quantize(matrix(rng, 20, 70), bits)
    packed = packed_matrix(weight)
    assert packed.shape == (2, 3, record_size(bits))
    numbers, kind = BLOCK * LANES * bits // 8, np.dtype(np.float32 if bits == 8 else np.float16)
    assert record_size(bits) == numbers + (80 if bits == 8 else 64)
    scales = np.ascontiguousarray(packed[1, 2, numbers:][: kind.itemsize * LANES]).view(kind)
    assert np.array_equal(scales[:4], weight.scales[16:, 2].astype(kind))
    assert not scales[4:].any()


def test_narrow_registers_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX-VNNI takes a vector in two halves."""
    features = vector_code._FEATURES
    if not (features.get("avxvnni") or (features.get("avx512vnni") and features.get("avx512vl"))):
        pytest.skip("the processor can't")
    rng = np.random.default_rng(5)
    packed = packed_matrix(quantize(matrix(rng, 16, 64), 8))
    x = rng.integers(-127, 128, (3, 64)).astype(np.int8)
    facts = rng.normal(size=(3, 2, 2)).astype(np.float32)

    def run(product: Any) -> Float32Array:
        out = np.zeros((3, LANES), np.float32)

        @numba.njit
        def call(x: int, facts: int, records: int, out: int) -> None:
            product(3, x, 64, facts, 16, records, 2, out)

        call(x.ctypes.data, facts.ctypes.data, packed.ctypes.data, out.ctypes.data)
        return out

    usual = run(linear_kernel._product(8))
    monkeypatch.setattr(vector_code, "_DOT_512", False)
    assert np.array_equal(run(linear_kernel._product(8)), usual)
    assert usual.any()
