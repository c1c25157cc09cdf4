"""The operators of `linear_kernel`, for a graph on ONNX Runtime."""

from __future__ import annotations

import numpy as np

from hvd.models.onnx import linear_kernel as kernel
from hvd.models.onnx.api import (
    FLOAT32,
    GET_TENSOR_MUTABLE_DATA,
    GET_TENSOR_SHAPE_ELEMENT_COUNT,
    GET_TENSOR_TYPE_AND_SHAPE,
    INT64,
    KERNEL_CONTEXT_GET_INPUT,
    KERNEL_CONTEXT_GET_OUTPUT,
    KERNEL_CONTEXT_PARALLEL_FOR,
    RELEASE_TENSOR_TYPE_AND_SHAPE_INFO,
    UINT8,
    Operator,
    api,
)
from hvd.models.onnx.vector_code import INTEGER_DOT
from hvd.types import Int64Array

LINEAR, EMBEDDING = "Linear", "Embedding"
PACKED = INTEGER_DOT
"""Whether graphs for this processor hold packed matrices; elsewhere they hold what the runtime's operators take."""


def linear_operators() -> list[Operator]:
    """Fresh ones, for one session; none where the processor can't do them.

    Linear      x float32 [.., columns], a packed matrix uint8 [groups, blocks, record], a bias float32 [rows] or none
                -> [1, n, rows]; bits; gated 1 = the matrix is a `gated_matrix`
    Embedding   ids int64 [.., n], a packed matrix of 8 bits -> [1, n, columns]
    """
    return _Kernels().operators if PACKED else []


class _Kernels:
    """What the kernels of a session are told. They run one after the other and share a workspace."""

    def __init__(self) -> None:
        self._workspace = np.empty(0, np.uint8)
        self._states: list[Int64Array] = []
        self.operators = [
            Operator(
                LINEAR,
                (FLOAT32, UINT8, FLOAT32),
                ("columns", "rows", "bits", "gated", "bias"),
                self._linear,
                kernel.compute.address,
                optional=1,
            ),
            Operator(EMBEDDING, (INT64, UINT8), ("columns",), self._state, kernel.embed.address),
        ]

    def _linear(self, told: dict[str, int]) -> Int64Array:
        state = self._state(told)
        state[kernel.ROWS], state[kernel.BITS] = told["rows"], told["bits"]
        state[kernel.GATED], state[kernel.BIAS] = told["gated"], told["bias"]
        state[kernel.MULTIPLY] = kernel.multiply_address()
        self._states.append(state)
        size = kernel.workspace_size(told["columns"])
        if size > len(self._workspace):
            self._workspace = np.empty(size, np.uint8)
        for each in self._states:
            each[kernel.WORKSPACE] = self._workspace.ctypes.data
        return state

    def _state(self, told: dict[str, int]) -> Int64Array:
        state, runtime = np.zeros(kernel.STATE_SIZE, np.int64), api()
        for place, function in (
            (kernel.GET_INPUT, KERNEL_CONTEXT_GET_INPUT),
            (kernel.GET_OUTPUT, KERNEL_CONTEXT_GET_OUTPUT),
            (kernel.GET_DATA, GET_TENSOR_MUTABLE_DATA),
            (kernel.GET_INFO, GET_TENSOR_TYPE_AND_SHAPE),
            (kernel.GET_COUNT, GET_TENSOR_SHAPE_ELEMENT_COUNT),
            (kernel.RELEASE_INFO, RELEASE_TENSOR_TYPE_AND_SHAPE_INFO),
            (kernel.PARALLEL_FOR, KERNEL_CONTEXT_PARALLEL_FOR),
        ):
            state[place] = runtime.places[function]
        state[kernel.COLUMNS] = told["columns"]
        return state
