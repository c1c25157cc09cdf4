"""Attention on the onnx backend: the cache that it reads and extends, and the operator in the graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd.models.kv_cache import GrowingKVCache
from hvd.models.onnx.api import (
    FLOAT32,
    GET_TENSOR_MUTABLE_DATA,
    KERNEL_CONTEXT_GET_INPUT,
    KERNEL_CONTEXT_GET_OUTPUT,
    KERNEL_CONTEXT_PARALLEL_FOR,
    Operator,
    api,
)
from hvd.models.onnx.attention_kernel import (
    CAPACITY_STEP,
    COS,
    GET_DATA,
    GET_INPUT,
    GET_OUTPUT,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    MASK,
    MASKED_FROM,
    PARALLEL_FOR,
    POSITION_STEP,
    SCALE,
    SEGMENT_COUNT,
    SEGMENTS,
    SIN,
    STATE_SIZE,
    TOTAL_WIDTH,
    WORKSPACE,
    compute,
    functions,
    workspace_size,
)
from hvd.models.onnx.vector_code import LANES
from hvd.types import BoolArray, Float32Array, Int64Array

OPERATOR = "Attention"
"""Inputs as the attribute `form` says (`attention_kernel`), attribute `layer`; output [1, n, heads * head_dim], or
[1, n, 0] where keys and values are only kept."""


class BlockedStore:
    """Keys and values as the kernel reads them: `array`, float32 [2 * layers, kv_heads, capacity, head_dim], laid out
    as `attention_kernel` says. Memory that was never written to is not taken."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int) -> None:
        self.array: Float32Array = np.empty((2 * layers, kv_heads, 0, head_dim), np.float32)

    def read(self, slots: Int64Array) -> Float32Array:
        """Copies of the keys and values in some slots, [2 * layers, kv_heads, n, head_dim]."""
        two_layers, heads, _, dim = self.array.shape
        rows = np.empty((two_layers, heads, len(slots), dim), np.float32)
        rows[0::2] = np.moveaxis(self._keys()[:, :, slots // LANES, :, slots % LANES], 0, 2)
        rows[1::2] = self.array[1::2, :, slots]
        return rows

    def write(self, slots: Int64Array, rows: Float32Array) -> None:
        """Put keys and values, as `read` gives them, into some slots."""
        self._keys()[:, :, slots // LANES, :, slots % LANES] = np.moveaxis(rows[0::2], 2, 0)
        self.array[1::2, :, slots] = rows[1::2]

    def grow(self, capacity: int, used: int) -> None:
        """Make room for so many slots; the first `used` keep what they hold."""
        two_layers, heads, _, dim = self.array.shape
        larger = np.empty((two_layers, heads, _rounded(capacity, CAPACITY_STEP), dim), np.float32)
        used = _rounded(used, LANES)
        larger[:, :, :used] = self.array[:, :, :used]
        self.array = larger

    def _keys(self) -> Float32Array:
        two_layers, heads, _, dim = self.array.shape
        return self.array[0::2].reshape(two_layers // 2, heads, -1, dim, LANES)


class OnnxKVCache(GrowingKVCache):
    """Keys and values of all layers of one request."""

    first_capacity = 2048

    def __init__(self, shape: tuple[int, int, int], limit: int, slack: int) -> None:
        """shape: (layers, kv_heads, head_dim)."""
        super().__init__(limit, slack)
        self.store = BlockedStore(*shape)

    def _grow(self, capacity: int) -> None:
        self.store.grow(capacity, self.length)

    def _move(self, sources: Int64Array, start: int) -> None:
        self.store.write(np.arange(start, start + len(sources)), self.store.read(sources))

    def _free(self) -> None:
        self.store = BlockedStore(0, 0, LANES)


class Attention:
    """The operator of one model, and what it is told before every pass."""

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, scale: float, rope: Float32Array) -> None:
        """head_dim   of the cache, a multiple of LANES
        rope       [2, positions, head_dim / 2], cosines and sines
        """
        runtime = api()
        self._shape = (kv_heads, num_heads // kv_heads, head_dim)
        self._rope = rope
        self._workspace = np.empty(0, np.float32)
        self._mask: BoolArray | None = None
        self._segments = np.empty((0, 5), np.int64)
        self._state = state = np.zeros(STATE_SIZE, np.int64)
        state[[KV_HEADS, GROUP, HEAD_DIM]] = self._shape
        state[SCALE] = np.float64(scale).view(np.int64)
        state[COS], state[SIN] = rope[0].ctypes.data, rope[1].ctypes.data
        state[GET_INPUT] = runtime.places[KERNEL_CONTEXT_GET_INPUT]
        state[GET_OUTPUT] = runtime.places[KERNEL_CONTEXT_GET_OUTPUT]
        state[GET_DATA] = runtime.places[GET_TENSOR_MUTABLE_DATA]
        state[PARALLEL_FOR] = runtime.places[KERNEL_CONTEXT_PARALLEL_FOR]
        for place, address in functions().items():
            state[place] = address

    def operator(self) -> Operator:
        """For one session."""
        address = self._state.ctypes.data
        return Operator(
            OPERATOR,
            (FLOAT32, FLOAT32, FLOAT32),
            ("layer", "form"),
            lambda told: np.array([address, told["layer"], told["form"]], np.int64),
            compute.address,
            optional=2,
        )

    def begin(
        self,
        store: BlockedStore,
        start: int,
        width: int,
        *,
        position: int | None = None,
        step: int = 1,
        mask: BoolArray | None = None,
        masked_from: int = 0,
    ) -> None:
        """Say what the next pass does: `width` tokens take slots start, start + 1, .. of a store that has room.

        position, step   where the first token stands, and how much further each next one; default: at its slot
        mask             bool [width, start + width - masked_from], C-contiguous: which slots from masked_from on each
                         token sees; None = those up to its own
        """
        self.begin_together([(store, start, width)])
        if position is not None:
            self._segments[0, 4] = position
        self._state[POSITION_STEP], self._state[MASKED_FROM] = step, masked_from
        self._state[MASK], self._mask = (0 if mask is None else mask.ctypes.data), mask

    def begin_together(self, texts: Sequence[tuple[BlockedStore, int, int]]) -> None:
        """The next pass computes tokens of several texts behind each other: (store, first slot, tokens) of each."""
        state = self._state
        rows = [(store.array.ctypes.data, store.array.shape[2], start, n, start) for store, start, n in texts]
        self._segments = np.array(rows, np.int64)
        state[SEGMENTS], state[SEGMENT_COUNT] = self._segments.ctypes.data, len(rows)
        state[TOTAL_WIDTH] = sum(width for *_, width in texts)
        state[POSITION_STEP], state[MASK] = 1, 0
        size = max(workspace_size(*self._shape, width, start + width) for _, start, width in texts)
        if size > len(self._workspace):
            self._workspace = np.empty(2 * size, np.float32)
        state[WORKSPACE] = self._workspace.ctypes.data


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step
