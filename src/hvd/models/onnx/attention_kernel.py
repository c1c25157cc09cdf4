"""Causal grouped-query attention on a CPU: an operator for ONNX Runtime, compiled by Numba.

The runtime's own operator packs a long cache anew for every query head and turns to other arithmetic for narrow passes.
This one reads keys and values once a pass, for all query heads that share them, and computes **every row alike**: the
bits of a token's output depend on its prefix alone, not on the width of the pass or on its place in it.

Keys are cut into spans of SPAN positions, counted from position 0. For each span and row: scores (a sum over features
in order), their maximum, the exponentials and their sum, and the mix of values (a sum over positions in order). Then
the spans of a row are put together, in order; spans and key/value heads are shared among the runtime's threads. Rows
are computed TILE at a time, in vector registers; that decides how fast it goes, not what comes out.

Layout of the cache (`store` float32 [2 * layers, kv_heads, capacity, D], capacity a multiple of CAPACITY_STEP):
values as they are; keys in blocks of LANES positions, [capacity / LANES, D, LANES], so that a vector register holds
one feature of neighbouring positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray

from hvd.jit import callback, jit
from hvd.models.onnx.vector_code import (
    BYTES,
    FLOAT,
    I32,
    I64,
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
from hvd.types import Int64Array

SPAN = 256
"""Positions whose scores are normalized together."""
CAPACITY_STEP = 64
"""Scores are computed for so many positions at once."""
CHUNK = 32
"""Tokens whose spans are put together at once: bounds the workspace of a wide pass."""
SERIAL = 8
"""So few tokens are prepared, and put together, by one thread: calling the others takes longer."""

TILE = 6
KEYS_TILE = 4 if WIDE else 1
"""Vectors of positions a tile covers; times TILE rows, they fill the registers."""
MIX_TILE = 4 if WIDE else 1
"""Vectors of features."""

# What a kernel is told, int64 each: the runtime's functions and the shape once, the rest before every pass.
GET_INPUT, GET_OUTPUT, GET_DATA, PARALLEL_FOR, PREPARE, ATTEND, COMBINE = range(7)
KV_HEADS, GROUP, HEAD_DIM, SCALE, COS, SIN = range(7, 13)
"""SCALE: a float64's bits."""
SEGMENTS, SEGMENT_COUNT, TOTAL_WIDTH, WORKSPACE = range(13, 17)
"""SEGMENTS: the address of int64 [count, 5], the texts of a pass: cache, capacity, slot of the first token, number of
tokens, position of the first token in its text."""
POSITION_STEP, MASK, MASKED_FROM = range(17, 20)
"""How much further each token of a segment stands. MASK: 0, or the address of bytes [width, slots from MASKED_FROM on],
0 = the token does not see that slot; it then sees all others, too."""
STORE, CAPACITY, START, WIDTH, POSITION = range(20, 25)
"""Of the segment at hand."""
APART, TOGETHER, STORED = range(3)
"""How a node gets its queries, keys and values: as three inputs; behind each other in one; or keys and values alone, to
be kept in the cache, as two inputs."""
_QUERY, _KEY, _VALUE, _QUERY_ROW, _KEY_ROW, _VALUE_ROW, _OUT, _LAYER, _FIRST, _COUNT, _SPANS = range(25, 36)
STATE_SIZE = 36


def _sums(tile: int) -> Any:
    """(rows, a, its bytes a row, b, its bytes a step, its bytes a vector, out, its bytes a row, n): for up to TILE rows
    and `tile` vectors, out[row, t] = sum over i < n, in order, of a[row, i] * b[i, t]."""

    def body(code: Code, rows: Any, *rest: Any) -> None:
        code.cases(rows, TILE, lambda count: of_rows(code, count, *rest))

    def of_rows(
        code: Code, rows: int, a: Any, a_row: Any, b: Any, step: Any, apart: Any, out: Any, out_row: Any, count: Any
    ) -> None:
        def add(i: Any, sums: list[Any]) -> list[Any]:
            here = code.at(b, code.b.mul(step, i))
            vectors = [code.load(code.at(here, code.times(apart, t))) for t in range(tile)]
            new = []
            for row in range(rows):
                factor = code.splat(code.load(code.at(a, code.times(a_row, row), code.times(i, 4)), FLOAT))
                new += [code.fma(factor, vector, sums[row * tile + t]) for t, vector in enumerate(vectors)]
            return new

        sums = code.loop(count, [code.floats(0.0)] * (rows * tile), add)
        for index, value in enumerate(sums):
            code.store(value, code.at(out, code.times(out_row, index // tile), index % tile * BYTES))

    return vector_function(9, body)


def _exponentials(code: Code, scores: Any, vectors: Any, valid: Any, facts: Any) -> None:
    """Of a row of scores the first `valid`: in place e^(score - largest), 0 behind; largest and sum to facts[0, 1]."""
    b = code.b
    lanes = ir.Constant(INTEGERS, list(range(LANES)))
    limit = code.splat(b.trunc(valid, I32))
    nothing = ir.Constant(VECTOR, [ir.Constant(FLOAT, float("-inf"))] * LANES)

    def counts(index: Any) -> Any:
        positions = b.add(code.splat(b.trunc(b.mul(index, I64(LANES)), I32)), lanes)
        return b.icmp_signed("<", positions, limit)

    def largest(index: Any, state: list[Any]) -> list[Any]:
        score = code.load(code.at(scores, b.mul(index, I64(BYTES))))
        return [code.larger(state[0], b.select(counts(index), score, nothing))]

    [most] = code.loop(vectors, [nothing], largest)
    top = code.largest(most)
    spread = code.splat(top)

    def share(index: Any, state: list[Any]) -> list[Any]:
        here = code.at(scores, b.mul(index, I64(BYTES)))
        value = b.select(counts(index), code.exp(b.fsub(code.load(here), spread)), code.floats(0.0))
        code.store(value, here)
        return [b.fadd(state[0], value)]

    [sums] = code.loop(vectors, [code.floats(0.0)], share)
    code.store(top, facts)
    code.store(code.total(sums), code.at(facts, 4))


_exponentials_of = vector_function(4, _exponentials)
_scores, _mix, _mix_one = _sums(KEYS_TILE), _sums(MIX_TILE), _sums(1)
_call_2, _call_3, _call_5 = outside(2), outside(3), outside(5)
_stack = room(TILE * SPAN)


# Workspace, float32: queries [kv_heads, width * group, D]; then of a chunk: what spans gave [kv_heads, spans, rows, D]
# and their facts (largest score, sum) [kv_heads, spans, rows, 2]; shares of a row's spans [kv_heads, rows, spans].


def workspace_size(kv_heads: int, group: int, dim: int, width: int, total: int) -> int:
    """Floats that a pass of `width` tokens at the end of `total` positions needs."""
    rows, spans = min(width, CHUNK) * group, -(-total // SPAN)
    return kv_heads * (width * group * dim + spans * rows * (dim + 3))


@jit
def _prepare(state: Int64Array, token: int) -> None:
    """Turn a token's queries and key by its position; queries go to the workspace, scaled, keys and values to the
    cache."""
    heads, group, dim, half = state[KV_HEADS], state[GROUP], state[HEAD_DIM], state[HEAD_DIM] // 2
    slot, position = state[START] + token, state[POSITION] + token * state[POSITION_STEP]
    cos = carray(pointer(state[COS] + position * half * 4), (half,), np.float32)
    sin = carray(pointer(state[SIN] + position * half * 4), (half,), np.float32)
    scale = np.float32(carray(pointer(_address_of(state, SCALE)), (1,), np.float64)[0])
    q = carray(pointer(state[_QUERY] + token * state[_QUERY_ROW]), (heads, group, dim), np.float32)
    k = carray(pointer(state[_KEY] + token * state[_KEY_ROW]), (heads, dim), np.float32)
    v = carray(pointer(state[_VALUE] + token * state[_VALUE_ROW]), (heads, dim), np.float32)
    queries = carray(pointer(state[WORKSPACE]), (heads, state[WIDTH] * group, dim), np.float32)
    shape = (2, heads, state[CAPACITY] // LANES, dim, LANES)
    store = carray(pointer(state[STORE] + state[_LAYER] * 2 * heads * state[CAPACITY] * dim * 4), shape, np.float32)
    values = carray(
        pointer(state[STORE] + (state[_LAYER] * 2 + 1) * heads * state[CAPACITY] * dim * 4),
        (heads, state[CAPACITY], dim),
        np.float32,
    )
    for head in range(heads):
        for member in range(group if state[_QUERY] != 0 else 0):
            row = token * group + member
            for d in range(half):
                x, y = q[head, member, d], q[head, member, d + half]
                queries[head, row, d] = (x * cos[d] - y * sin[d]) * scale
                queries[head, row, d + half] = (y * cos[d] + x * sin[d]) * scale
        for d in range(half):
            x, y = k[head, d], k[head, d + half]
            store[0, head, slot // LANES, d, slot % LANES] = x * cos[d] - y * sin[d]
            store[0, head, slot // LANES, d + half, slot % LANES] = y * cos[d] + x * sin[d]
        for d in range(dim):
            values[head, slot, d] = v[head, d]


@jit
def _address_of(array: Int64Array, index: int) -> int:
    return array.ctypes.data + 8 * index


@jit
def _attend(state: Int64Array, item: int) -> None:
    """One span of keys and values of one head, for all rows of the chunk that see it."""
    heads, group, dim, spans = state[KV_HEADS], state[GROUP], state[HEAD_DIM], state[_SPANS]
    head, span = item // spans, item % spans
    first, rows = state[_FIRST], state[_COUNT] * group
    start = span * SPAN
    plane = state[CAPACITY] * dim * 4
    keys = state[STORE] + (state[_LAYER] * 2 * heads + head) * plane + start * dim * 4
    values = state[STORE] + ((state[_LAYER] * 2 + 1) * heads + head) * plane + start * dim * 4
    queries = state[WORKSPACE] + (head * state[WIDTH] + first) * group * dim * 4
    made = state[WORKSPACE] + heads * state[WIDTH] * group * dim * 4
    facts = made + heads * spans * rows * dim * 4 + (head * spans + span) * rows * 8
    made += (head * spans + span) * rows * dim * 4
    scores = _stack()
    # Slots from this span's first one on that the chunk's first token sees, and how many more each token behind it.
    seen, further = state[START] + first + 1 - start, 1
    if state[MASK] != 0:
        seen, further = state[START] + state[WIDTH] - start, 0
    row = max(0, 1 - seen) * group
    wide = dim // (LANES * MIX_TILE)
    while row < rows:
        count = min(TILE, rows - row)
        most = min(SPAN, seen + (row + count - 1) // group * further)
        steps = (most + LANES * KEYS_TILE - 1) // (LANES * KEYS_TILE)
        for step in range(steps):
            block = step * LANES * KEYS_TILE
            at, rows_at = scores + block * 4, queries + row * dim * 4
            _scores(count, rows_at, dim * 4, keys + block * dim * 4, BYTES, BYTES * dim, at, SPAN * 4, dim)
        if state[MASK] != 0:
            _hide(state, first, row, count, start, most, scores)
        for member in range(count):
            valid = min(SPAN, seen + (row + member) // group * further)
            _exponentials_of(scores + member * SPAN * 4, steps * KEYS_TILE, valid, facts + (row + member) * 8)
        into = made + row * dim * 4
        for part in range(wide):
            at = part * BYTES * MIX_TILE
            _mix(count, scores, SPAN * 4, values + at, dim * 4, BYTES, into + at, dim * 4, most)
        for part in range(wide * MIX_TILE, dim // LANES):
            at = part * BYTES
            _mix_one(count, scores, SPAN * 4, values + at, dim * 4, BYTES, into + at, dim * 4, most)
        row += count


@jit
def _hide(state: Int64Array, first: int, row: int, count: int, start: int, most: int, scores: int) -> None:
    """Take the scores of what a tile's rows must not see out of the way: far below all others, yet finite."""
    slots = state[START] + state[WIDTH] - state[MASKED_FROM]
    mask = carray(pointer(state[MASK]), (state[WIDTH], slots), np.uint8)
    tile = carray(pointer(scores), (count, SPAN), np.float32)
    for member in range(count):
        token = first + (row + member) // state[GROUP]
        for slot in range(max(start, state[MASKED_FROM]), start + most):
            if mask[token, slot - state[MASKED_FROM]] == 0:
                tile[member, slot - start] = np.float32(-1e30)


@jit
def _combine(state: Int64Array, token: int) -> None:
    """Put the spans of a token's rows together."""
    heads, group, dim, spans = state[KV_HEADS], state[GROUP], state[HEAD_DIM], state[_SPANS]
    first, rows = state[_FIRST], state[_COUNT] * group
    own = (state[START] + first + token) // SPAN + 1 if state[MASK] == 0 else spans
    made = state[WORKSPACE] + heads * state[WIDTH] * group * dim * 4
    after = made + heads * spans * rows * dim * 4
    facts = carray(pointer(after), (heads, spans, rows, 2), np.float32)
    shares = carray(pointer(after + heads * spans * rows * 8), (heads, rows, spans), np.float32)
    out = state[_OUT] + (first + token) * heads * group * dim * 4
    for head in range(heads):
        for member in range(group):
            row = token * group + member
            top = facts[head, 0, row, 0]
            for span in range(1, own):
                top = max(top, facts[head, span, row, 0])
            total = 0.0
            for span in range(own):
                share = math.exp(np.float64(facts[head, span, row, 0] - top))
                shares[head, row, span] = share
                total += share * facts[head, span, row, 1]
            for span in range(own):
                shares[head, row, span] = np.float32(shares[head, row, span] / total)
            share_at = after + heads * spans * rows * 8 + (head * rows + row) * spans * 4
            made_at = made + (head * spans * rows + row) * dim * 4
            out_at = out + (head * group + member) * dim * 4
            for part in range(dim // LANES):
                at = part * BYTES
                _mix_one(1, share_at, 0, made_at + at, rows * dim * 4, BYTES, out_at + at, 0, own)


@callback("void(voidptr, uintp)")
def _prepare_item(state, token):  # type: ignore[no-untyped-def]
    _prepare(carray(state, (STATE_SIZE,), np.int64), np.int64(token))  # type: ignore[arg-type]


@callback("void(voidptr, uintp)")
def _attend_item(state, item):  # type: ignore[no-untyped-def]
    _attend(carray(state, (STATE_SIZE,), np.int64), np.int64(item))  # type: ignore[arg-type]


@callback("void(voidptr, uintp)")
def _combine_item(state, token):  # type: ignore[no-untyped-def]
    _combine(carray(state, (STATE_SIZE,), np.int64), np.int64(token))  # type: ignore[arg-type]


@jit
def _inputs(state: Int64Array, context: int, form: int) -> Any:
    """Find the tensors of a call. Returns the runtime's complaint, or 0."""
    found = np.zeros(4, np.int64)
    here = found.ctypes.data
    heads, group, dim = state[KV_HEADS], state[GROUP], state[HEAD_DIM]
    count, first = (1, 0) if form == TOGETHER else (2, 1) if form == STORED else (3, 0)
    state[_QUERY] = 0
    for index in range(count):
        failed = _call_3(state[GET_INPUT], context, index, here)
        if failed == 0:
            failed = _call_2(state[GET_DATA], found[0], here)
        if failed != 0:
            return failed
        state[_QUERY + first + index] = found[0]
    state[_QUERY_ROW], state[_KEY_ROW], state[_VALUE_ROW] = heads * group * dim * 4, heads * dim * 4, heads * dim * 4
    if form == TOGETHER:
        state[_KEY] = state[_QUERY] + heads * group * dim * 4
        state[_VALUE] = state[_KEY] + heads * dim * 4
        for index in range(3):
            state[_QUERY_ROW + index] = heads * (group + 2) * dim * 4
    found[1], found[2], found[3] = 1, state[TOTAL_WIDTH], 0 if form == STORED else heads * group * dim
    failed = _call_5(state[GET_OUTPUT], context, 0, here + 8, 3, here)
    if failed == 0:
        failed = _call_2(state[GET_DATA], found[0], here)
    state[_OUT] = found[0]
    return failed


@jit
def _segment(state: Int64Array, context: int, form: int) -> Any:
    """One text's tokens. Returns the runtime's complaint, or 0."""
    here, width = state.ctypes.data, state[WIDTH]
    failed = 0
    if width > SERIAL:
        failed = _call_5(state[PARALLEL_FOR], context, state[PREPARE], width, 0, here)
    else:
        for token in range(width):
            _prepare(state, token)
    if form == STORED:
        return failed
    for first in range(0, width, CHUNK):
        count = min(CHUNK, width - first)
        state[_FIRST], state[_COUNT] = first, count
        end = first + count if state[MASK] == 0 else width
        state[_SPANS] = (state[START] + end + SPAN - 1) // SPAN
        if failed == 0:
            failed = _call_5(state[PARALLEL_FOR], context, state[ATTEND], state[KV_HEADS] * state[_SPANS], 0, here)
        if count > SERIAL:
            if failed == 0:
                failed = _call_5(state[PARALLEL_FOR], context, state[COMBINE], count, 0, here)
        else:
            for token in range(count):
                _combine(state, token)
    return failed


@jit
def _compute(state: Int64Array, context: int, form: int) -> Any:
    """The operator. Returns the runtime's complaint, or 0."""
    failed = _inputs(state, context, form)
    segments = carray(pointer(state[SEGMENTS]), (state[SEGMENT_COUNT], 5), np.int64)
    for index in range(state[SEGMENT_COUNT]):
        if failed != 0:
            return failed
        for field in range(5):
            state[STORE + field] = segments[index, field]
        failed = _segment(state, context, form)
        for field in range(3):
            state[_QUERY + field] += state[WIDTH] * state[_QUERY_ROW + field] if state[_QUERY + field] != 0 else 0
        state[_OUT] += state[WIDTH] * state[KV_HEADS] * state[GROUP] * state[HEAD_DIM] * 4
    return failed


@callback("voidptr(voidptr, voidptr)")
def compute(kernel, context):  # type: ignore[no-untyped-def]
    """The operator's KernelComputeV2. kernel: int64 [3], the address of the state, the layer and the form."""
    facts = carray(kernel, (3,), np.int64)
    state = carray(pointer(facts[0]), (STATE_SIZE,), np.int64)
    state[_LAYER] = facts[1]
    return pointer(_compute(state, address(context), facts[2]))


def functions() -> dict[int, int]:
    """Addresses of the compiled parts, by their place in the state."""
    return {PREPARE: _prepare_item.address, ATTEND: _attend_item.address, COMBINE: _combine_item.address}
