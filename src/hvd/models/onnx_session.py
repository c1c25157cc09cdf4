"""ONNX Runtime sessions and KV memory, as the target and the EAGLE3 head use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from hvd.errors import CheckpointError
from hvd.models.kv_cache import GrowingKVCache
from hvd.models.onnx_cache import GRAPH_FILE
from hvd.types import Float32Array, Int64Array


def open_session(directory: Path, threads: int | None = None) -> onnxruntime.InferenceSession:
    """Open a graph written by `GraphBuilder`. threads None = all cores. Raises CheckpointError if it is unreadable."""
    options = onnxruntime.SessionOptions()
    # Operators are fused when the graph is built; optimising again would only cost start-up time.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.enable_mem_pattern = False  # patterns are kept for every width and context seen: a leak here
    try:
        return onnxruntime.InferenceSession(directory / GRAPH_FILE, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's exceptions have no common base
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"can't open the converted model in {directory} ({reason}); remove it to convert anew"
        ) from error


def bind(binding: onnxruntime.IOBinding, name: str, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> None:
    """Let the graph input `name` read `array` (C-contiguous; the caller keeps it alive), its first items as `shape`."""
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape if shape is None else shape, array.ctypes.data)


def bind_result(
    binding: onnxruntime.IOBinding, name: str, array: NDArray[Any], shape: tuple[int, ...] | None = None
) -> None:
    """Let the graph write its output `name` into `array`."""
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape if shape is None else shape, array.ctypes.data)


class OnnxKVCache(GrowingKVCache):
    """Keys and values of all layers of one request: `store`, float32 [2 * layers, kv_heads, capacity, head_dim].

    The graph reads and extends it in place, through bindings that `binding` hands out, one for each set of further
    outputs that a pass may want; growing makes them anew.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        shape: tuple[int, int, int],
        limit: int,
        slack: int,
    ) -> None:
        """shape: (layers, kv_heads, head_dim)."""
        super().__init__(limit, slack)
        self.layers, self._heads, self._head_dim = shape
        self.store: Float32Array = np.empty((2 * self.layers, self._heads, 0, self._head_dim), np.float32)
        self._session = session
        self._bindings: dict[str, onnxruntime.IOBinding] = {}

    def binding(self, use: str) -> onnxruntime.IOBinding:
        """The IOBinding for passes of one kind, its keys and values bound. `reserve` first."""
        if use not in self._bindings:
            self._bindings[use] = self._bind()
        return self._bindings[use]

    def _bind(self) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        shape = (1, self._heads, self.capacity, self._head_dim)
        for index, part in enumerate(self.store):
            name = f"{index // 2}.{('key', 'value')[index % 2]}"
            bind(binding, f"past.{name}", part, shape)
            bind_result(binding, f"present.{name}", part, shape)
        return binding

    def _grow(self, capacity: int) -> None:
        store = np.empty((2 * self.layers, self._heads, capacity, self._head_dim), np.float32)
        store[:, :, : self.length] = self.store[:, :, : self.length]
        self.store = store
        self._bindings.clear()

    def _move(self, sources: Int64Array, start: int) -> None:
        self.store[:, :, start : start + len(sources)] = self.store[:, :, sources]

    def _free(self) -> None:
        self.store = np.empty((0, 0, 0, 0), np.float32)
        self._bindings.clear()
