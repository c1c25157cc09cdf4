"""Products with matrices of 4 or 8 bits on a CPU: operators for ONNX Runtime, compiled by Numba.

The runtime's own (`MatMulNBits`) is made for one row, or for many: a pass of eight tokens costs it more than twice that
of one, where reading the weights is what takes the time. Here up to TILE rows are multiplied while a weight is in a
register, so that verifying a draft costs little more than plain decoding. **Every row is computed alike**, whatever
stands beside it: the bits of its result depend on it alone.

Inputs are rounded to 8 bits, each block of 32 by its largest number (as the runtime does it at accuracy_level 4):
x = s * a, a in -127..127. With weights w = t * (q - z), q and z unsigned, a block adds s * t * (a . q - z * sum(a)) to
the result, with w = t * q - m it adds s * (t * (a . q) - m * sum(a)); a . q and the sum are integers, computed without
loss (VNNI). Blocks are added in order.

A matrix [N, K] is stored in groups of 16 rows, `packed_matrix`: for each group and block one record, of
    the weights    8 x 16 x 4 bytes: of each of the 16 rows four that stand behind each other, eight times (8 bits), or
                   half of that, the first sixteen weights of the block in the low halves, the others in the high ones
    t, z           float32 [16], uint8 [16] (8 bits)
    t, m           float16 [16], float16 [16] (4 bits)
so that a processor reads a group from the first byte to the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray
from numpy.typing import NDArray

from hvd.jit import callback, jit
from hvd.models.onnx.vector_code import (
    BYTE_LANES,
    BYTES,
    FLOAT,
    I32,
    INTEGERS,
    LANES,
    VECTOR,
    WIDE,
    Code,
    address,
    outside,
    pointer,
    room,
    vector_function,
)
from hvd.models.onnx.weights import BLOCK, BlockWeight, unpack
from hvd.types import Float32Array, Int64Array

QUADS = BLOCK // 4
TILE = 12 if WIDE else 4
"""Rows that are multiplied at once: their sums fill the registers."""
GROUPS_AN_ITEM = 4
"""Groups of matrix rows that a thread takes at a time."""
CHUNK = 256
"""Input rows that are rounded at once: bounds the workspace."""

# What a kernel is told, int64 each.
GET_INPUT, GET_OUTPUT, GET_DATA, GET_INFO, GET_COUNT, RELEASE_INFO, PARALLEL_FOR, MULTIPLY = range(8)
COLUMNS, ROWS, BITS, GATED, BIAS, WORKSPACE = range(8, 14)
"""ROWS: of the result, so half of the matrix's if it is gated. BIAS: 1 when there is one."""
_X, _MATRIX, _BIAS, _OUT, _COUNT = range(14, 19)
STATE_SIZE = 19


def record_size(bits: int) -> int:
    """Bytes of a record."""
    return BLOCK * LANES * bits // 8 + _facts_size(bits)


def _facts_size(bits: int) -> int:
    return 5 * LANES if bits == 8 else 4 * LANES


RECORD_8, RECORD_4 = record_size(8), record_size(4)


def packed_matrix(weight: BlockWeight) -> NDArray[np.uint8]:
    """uint8 [groups, blocks, record_size]; rows are filled up to a multiple of 16 with zeros."""
    if weight.bits == 4:
        weight = weight.in_halves()
    rows, blocks = weight.scales.shape
    groups = -(-rows // LANES)

    def grouped(part: NDArray[Any], kind: type) -> NDArray[np.uint8]:
        filled: NDArray[Any] = np.pad(part.astype(kind), ((0, groups * LANES - rows), (0, 0)))
        return np.ascontiguousarray(filled.reshape(groups, LANES, blocks).transpose(0, 2, 1)).view(np.uint8)

    values = np.pad(unpack(weight.blocks, weight.bits), ((0, groups * LANES - rows), (0, 0), (0, 0)))
    quads = values.reshape(groups, LANES, blocks, QUADS, 4).transpose(0, 2, 3, 1, 4).reshape(groups, blocks, -1)
    if weight.bits == 8:
        facts = [grouped(weight.scales, np.float32), grouped(weight.zero_points(), np.uint8)]
    else:
        half = quads.shape[2] // 2
        quads = quads[:, :, :half] | (quads[:, :, half:] << np.uint8(4))
        assert weight.minus is not None
        facts = [grouped(weight.scales, np.float16), grouped(weight.minus, np.float16)]
    return np.concatenate([quads, *facts], axis=2)


def gated_matrix(gate: NDArray[np.uint8], up: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two packed matrices of the same shape, group by group, for `silu(gate) * up`."""
    return np.stack([gate, up], axis=1).reshape(-1, *gate.shape[1:])


def workspace_size(columns: int) -> int:
    """Bytes that a kernel with so many columns needs."""
    blocks = -(-columns // BLOCK)
    return CHUNK * blocks * (BLOCK + 8)


# Workspace: rounded inputs int8 [CHUNK, blocks * 32], then scales and negative sums float32 [CHUNK, blocks, 2].


def _round_block(code: Code, x: Any, rounded: Any, facts: Any) -> None:
    """Round 32 numbers at x; scale and negative sum of what they became go to facts[0, 1]."""
    b = code.b
    low, high = code.load(x), code.load(code.at(x, BYTES))
    most = code.largest(code.larger(code.absolute(low), code.absolute(high)))
    scale = b.fmul(most, ir.Constant(FLOAT, float(np.float32(1 / 127))))
    empty = b.fcmp_ordered("<", most, ir.Constant(FLOAT, float(np.float32(1e-30))))  # its inverse would be infinite
    inverse = b.select(empty, ir.Constant(FLOAT, 0.0), b.fdiv(ir.Constant(FLOAT, 127.0), most))
    sums = None
    for part, vector in enumerate((low, high)):
        whole = b.fptosi(code.rounded(b.fmul(vector, code.splat(inverse))), INTEGERS)
        code.store(b.trunc(whole, BYTE_LANES), code.at(rounded, part * LANES))
        sums = whole if sums is None else b.add(sums, whole)
    total = code.call(f"llvm.vector.reduce.add.v{LANES}i32", I32, sums)
    code.store(scale, facts)
    code.store(b.sitofp(b.neg(total), FLOAT), code.at(facts, 4))


def _product(bits: int) -> Any:
    """(rows, inputs, bytes a row, facts, bytes a row, records, blocks, out): out[r, 16] = inputs[r] . 16 matrix rows,
    for up to TILE rows."""
    record, weights = record_size(bits), BLOCK * LANES * bits // 8

    def body(code: Code, rows: Any, *rest: Any) -> None:
        code.cases(rows, TILE, lambda count: of_rows(code, count, *rest))

    def of_rows(
        code: Code, rows: int, x: Any, x_row: Any, facts: Any, facts_row: Any, records: Any, blocks: Any, out: Any
    ) -> None:
        b = code.b

        def add(block: Any, sums: list[Any]) -> list[Any]:
            here = code.at(records, code.times(block, record))
            dots = [code.integers(0)] * rows
            for quad in range(QUADS):
                if bits == 8:
                    weight = code.load(code.at(here, quad * BYTES), INTEGERS)
                else:
                    both = code.load(code.at(here, quad % (QUADS // 2) * BYTES), INTEGERS)
                    shifted = both if quad < QUADS // 2 else b.lshr(both, code.integers(4))
                    weight = b.and_(shifted, code.integers(0x0F0F0F0F))
                for row in range(rows):
                    four = code.load(code.at(x, code.times(x_row, row), code.times(block, BLOCK), quad * 4), I32)
                    dots[row] = code.dot(dots[row], weight, code.splat(four))
            if bits == 8:
                scale = code.load(code.at(here, weights))
                zero = b.uitofp(code.load(code.at(here, weights + BYTES), BYTE_LANES), VECTOR)
            else:
                scale, minus = (code.halves(code.at(here, weights + part * 2 * LANES)) for part in range(2))
            new = []
            for row in range(rows):
                fact = code.at(facts, code.times(facts_row, row), code.times(block, 8))
                own, less = (code.splat(code.load(code.at(fact, part), FLOAT)) for part in (0, 4))
                dot = b.sitofp(dots[row], VECTOR)
                if bits == 8:
                    new.append(code.fma(b.fmul(scale, own), code.fma(zero, less, dot), sums[row]))
                else:
                    new.append(code.fma(own, code.fma(minus, less, b.fmul(scale, dot)), sums[row]))
            return new

        sums = code.loop(blocks, [code.floats(0.0)] * rows, add)
        for row, value in enumerate(sums):
            code.store(value, code.at(out, row * BYTES))

    return vector_function(8, body)


def _gate(code: Code, gate: Any, up: Any) -> None:
    """At gate: silu(gate) * up, of 16 numbers each."""
    b = code.b
    x = code.load(gate)
    power = code.exp(b.fneg(code.absolute(x)))
    below = b.fcmp_ordered("<", x, code.floats(0.0))
    share = b.fdiv(b.select(below, power, code.floats(1.0)), b.fadd(code.floats(1.0), power))
    code.store(b.fmul(b.fmul(x, share), code.load(up)), gate)


_round = vector_function(3, _round_block)
_gate_by = vector_function(2, _gate)
_eight, _four = _product(8), _product(4)
_call_1, _call_2, _call_3, _call_5 = (outside(count) for count in (1, 2, 3, 5))
_stack = room(2 * TILE * LANES)


@jit
def _tile(
    bits: int, rows: int, x: int, x_row: int, facts: int, facts_row: int, records: int, blocks: int, out: int
) -> None:
    if bits == 8:
        _eight(rows, x, x_row, facts, facts_row, records, blocks, out)
    else:
        _four(rows, x, x_row, facts, facts_row, records, blocks, out)


@jit
def _round_rows(state: Int64Array, first: int, count: int) -> None:
    """Round rows first .. first + count of the input into the workspace."""
    columns = state[COLUMNS]
    blocks = (columns + BLOCK - 1) // BLOCK
    facts = state[WORKSPACE] + CHUNK * blocks * BLOCK
    whole = columns // BLOCK
    last = np.zeros(BLOCK, np.float32)
    for row in range(count):
        x = state[_X] + (first + row) * columns * 4
        rounded, fact = state[WORKSPACE] + row * blocks * BLOCK, facts + row * blocks * 8
        for block in range(whole):
            _round(x + block * BLOCK * 4, rounded + block * BLOCK, fact + block * 8)
        if whole < blocks:
            rest = carray(pointer(x + whole * BLOCK * 4), (columns - whole * BLOCK,), np.float32)
            last[: len(rest)] = rest
            _round(last.ctypes.data, rounded + whole * BLOCK, fact + whole * 8)


@jit
def _multiply(state: Int64Array, item: int) -> None:
    """Some groups of the matrix's rows, for the chunk's input rows."""
    rows, columns, bits, count = state[ROWS], state[COLUMNS], state[BITS], state[_COUNT]
    blocks = (columns + BLOCK - 1) // BLOCK
    facts = state[WORKSPACE] + CHUNK * blocks * BLOCK
    size = blocks * (RECORD_8 if bits == 8 else RECORD_4)
    gated = state[GATED]
    made = _stack()
    groups = (rows + LANES - 1) // LANES
    for group in range(item * GROUPS_AN_ITEM, min(groups, (item + 1) * GROUPS_AN_ITEM)):
        records = state[_MATRIX] + group * (1 + gated) * size
        here = min(LANES, rows - group * LANES)
        tiles = (count + TILE - 1) // TILE
        size_of_tile = (count + tiles - 1) // tiles
        row = 0
        while row < count:
            tile = min(size_of_tile, count - row)
            x, fact = state[WORKSPACE] + row * blocks * BLOCK, facts + row * blocks * 8
            _tile(bits, tile, x, blocks * BLOCK, fact, blocks * 8, records, blocks, made)
            if gated == 1:
                up = made + TILE * BYTES
                _tile(bits, tile, x, blocks * BLOCK, fact, blocks * 8, records + size, blocks, up)
                for member in range(tile):
                    _gate_by(made + member * BYTES, up + member * BYTES)
            sums = carray(pointer(made), (TILE, LANES), np.float32)
            out = carray(pointer(state[_OUT] + (row * rows + group * LANES) * 4), (tile * rows,), np.float32)
            if state[BIAS] == 1:
                bias = carray(pointer(state[_BIAS] + group * LANES * 4), (here,), np.float32)
                for member in range(tile):
                    for lane in range(here):
                        out[member * rows + lane] = sums[member, lane] + bias[lane]
            else:
                for member in range(tile):
                    for lane in range(here):
                        out[member * rows + lane] = sums[member, lane]
            row += tile


@callback("void(voidptr, uintp)")
def _multiply_item(state, item):  # type: ignore[no-untyped-def]
    _multiply(carray(state, (STATE_SIZE,), np.int64), np.int64(item))  # type: ignore[arg-type]


@jit
def _inputs(state: Int64Array, context: int, count: int, found: Int64Array) -> Any:
    """Find the inputs of a call; numbers in the first one to found[0]. Returns the runtime's complaint, or 0."""
    here, total = found.ctypes.data, 0
    for index in range(count):
        failed = _call_3(state[GET_INPUT], context, index, here)
        if failed == 0 and index == 0:
            failed = _call_2(state[GET_INFO], found[0], here + 8)
            if failed == 0:
                failed = _call_2(state[GET_COUNT], found[1], here + 16)
                total = found[2]
                _call_1(state[RELEASE_INFO], found[1])
        if failed == 0:
            failed = _call_2(state[GET_DATA], found[0], here)
        if failed != 0:
            return failed
        state[_X + index] = found[0]
    found[0] = total
    return 0


@jit
def _output(state: Int64Array, context: int, width: int, features: int, found: Int64Array) -> Any:
    """Room for the result [1, width, features]; its address to found[0]."""
    here = found.ctypes.data
    found[1], found[2], found[3] = 1, width, features
    failed = _call_5(state[GET_OUTPUT], context, 0, here + 8, 3, here)
    if failed == 0:
        failed = _call_2(state[GET_DATA], found[0], here)
    return failed


@jit
def _compute(state: Int64Array, context: int) -> Any:
    """The operator. Returns the runtime's complaint, or 0."""
    found, rows = np.zeros(4, np.int64), state[ROWS]
    failed = _inputs(state, context, 2 + state[BIAS], found)
    if failed != 0:
        return failed
    width = found[0] // state[COLUMNS]
    failed = _output(state, context, width, rows, found)
    if failed != 0:
        return failed
    groups = (rows + LANES - 1) // LANES
    items = (groups + GROUPS_AN_ITEM - 1) // GROUPS_AN_ITEM
    for first in range(0, width, CHUNK):
        state[_COUNT] = min(CHUNK, width - first)
        state[_OUT] = found[0] + first * rows * 4
        _round_rows(state, first, state[_COUNT])
        failed = _call_5(state[PARALLEL_FOR], context, state[MULTIPLY], items, 0, state.ctypes.data)
        if failed != 0:
            return failed
    return 0


@jit
def _embed(state: Int64Array, context: int) -> Any:
    found, columns = np.zeros(4, np.int64), state[COLUMNS]
    failed = _inputs(state, context, 2, found)
    if failed != 0:
        return failed
    width = found[0]
    failed = _output(state, context, width, columns, found)
    if failed != 0:
        return failed
    ids = carray(pointer(state[_X]), (width,), np.int64)
    out = carray(pointer(found[0]), (width, columns), np.float32)
    blocks, weights = (columns + BLOCK - 1) // BLOCK, BLOCK * LANES
    for index in range(width):
        group, lane = ids[index] // LANES, ids[index] % LANES
        for block in range(blocks):
            at = state[_MATRIX] + (group * blocks + block) * RECORD_8
            record = carray(pointer(at), (RECORD_8,), np.uint8)
            scale = carray(pointer(at + weights), (LANES,), np.float32)[lane]
            zero = np.float32(record[weights + 4 * LANES + lane])
            for column in range(block * BLOCK, min(columns, (block + 1) * BLOCK)):
                number = record[column % BLOCK // 4 * BYTES + lane * 4 + column % 4]
                out[index, column] = (np.float32(number) - zero) * scale
    return 0


@callback("voidptr(voidptr, voidptr)")
def embed(state, context):  # type: ignore[no-untyped-def]
    """KernelComputeV2 of the operator that takes rows of a matrix of 8 bits."""
    return pointer(_embed(carray(state, (STATE_SIZE,), np.int64), address(context)))


@callback("voidptr(voidptr, voidptr)")
def compute(state, context):  # type: ignore[no-untyped-def]
    """The operator's KernelComputeV2."""
    return pointer(_compute(carray(state, (STATE_SIZE,), np.int64), address(context)))


def multiply_address() -> int:
    """Of the part that threads share."""
    return int(_multiply_item.address)


def multiply(x: Float32Array, matrix: NDArray[np.uint8], rows: int, bits: int, gated: bool = False) -> Float32Array:
    """The same without the runtime, on one thread: x float32 [n, K] (n <= CHUNK) times a packed matrix -> [n, rows]."""
    state = np.zeros(STATE_SIZE, np.int64)
    x = np.ascontiguousarray(x, np.float32)
    workspace, out = np.empty(workspace_size(x.shape[1]), np.uint8), np.empty((len(x), rows), np.float32)
    state[[COLUMNS, ROWS, BITS, GATED, _COUNT]] = x.shape[1], rows, bits, gated, len(x)
    state[[WORKSPACE, _X, _MATRIX, _OUT]] = [array.ctypes.data for array in (workspace, x, matrix, out)]
    _round_rows(state, 0, len(x))
    for item in range(-(-rows // (LANES * GROUPS_AN_ITEM))):
        _multiply(state, item)
    return out
