"""The target's attention on the onnx backend: the cache that it reads and extends, and the operator in the graph."""

from __future__ import annotations

import numpy as np

from hvd.models.attention_kernel import (
    CAPACITY,
    CAPACITY_STEP,
    COS,
    GET_DATA,
    GET_INPUT,
    GET_OUTPUT,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    PARALLEL_FOR,
    SCALE,
    SIN,
    START,
    STATE_SIZE,
    STORE,
    WIDTH,
    WORKSPACE,
    compute,
    functions,
    workspace_size,
)
from hvd.models.kv_cache import GrowingKVCache
from hvd.models.onnx_api import (
    FLOAT32,
    GET_TENSOR_MUTABLE_DATA,
    KERNEL_CONTEXT_GET_INPUT,
    KERNEL_CONTEXT_GET_OUTPUT,
    KERNEL_CONTEXT_PARALLEL_FOR,
    Operator,
    api,
)
from hvd.models.vector_code import LANES
from hvd.types import Float32Array, Int64Array

OPERATOR = "Attention"


class OnnxKVCache(GrowingKVCache):
    """Keys and values of all layers of one request: `store`, float32 [2 * layers, kv_heads, capacity, head_dim], laid
    out as `attention_kernel` says."""

    def __init__(self, shape: tuple[int, int, int], limit: int, slack: int) -> None:
        """shape: (layers, kv_heads, head_dim)."""
        super().__init__(limit, slack)
        self.layers, self._heads, self._head_dim = shape
        self.store: Float32Array = np.empty((2 * self.layers, self._heads, 0, self._head_dim), np.float32)

    def read(self, positions: Int64Array) -> Float32Array:
        """Copies of the keys and values at some positions, [2 * layers, kv_heads, n, head_dim]."""
        rows = np.empty((*self.store.shape[:2], len(positions), self._head_dim), np.float32)
        keys = self._keys()[:, :, positions // LANES, :, positions % LANES]
        rows[0::2] = np.moveaxis(keys, 0, 2)
        rows[1::2] = self.store[1::2, :, positions]
        return rows

    def write(self, positions: Int64Array, rows: Float32Array) -> None:
        """Put keys and values, as `read` gives them, at some positions."""
        self._keys()[:, :, positions // LANES, :, positions % LANES] = np.moveaxis(rows[0::2], 2, 0)
        self.store[1::2, :, positions] = rows[1::2]

    def _keys(self) -> Float32Array:
        return self.store[0::2].reshape(self.layers, self._heads, -1, self._head_dim, LANES)

    def _grow(self, capacity: int) -> None:
        capacity = _rounded(capacity, CAPACITY_STEP)
        store = np.empty((2 * self.layers, self._heads, capacity, self._head_dim), np.float32)
        used = _rounded(self.length, LANES)
        store[:, :, :used] = self.store[:, :, :used]
        self.store = store

    def _move(self, sources: Int64Array, start: int) -> None:
        self.write(np.arange(start, start + len(sources)), self.read(sources))

    def _free(self) -> None:
        self.store = np.empty((0, 0, 0, 0), np.float32)


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
        self.operator = Operator(
            OPERATOR,
            (FLOAT32, FLOAT32, FLOAT32),
            ("layer", "together"),
            lambda told: np.array([state.ctypes.data, told["layer"], told["together"]], np.int64),
            compute.address,
            optional=2,
        )

    def begin(self, cache: OnnxKVCache, start: int, width: int) -> None:
        """The next pass computes `width` tokens at positions start, start + 1, .. of a cache that has room for them."""
        state = self._state
        state[STORE], state[CAPACITY] = cache.store.ctypes.data, cache.store.shape[2]
        state[START], state[WIDTH] = start, width
        size = workspace_size(*self._shape, width, start + width)
        if size > len(self._workspace):
            self._workspace = np.empty(2 * size, np.float32)
        state[WORKSPACE] = self._workspace.ctypes.data


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step
