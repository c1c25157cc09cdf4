"""Builds ONNX graphs of transformer layers out of the few operators that ONNX Runtime runs fast on a CPU.

The pieces (`linear`, `rms_norm`, `add_norm`, `gated`, `embedding`) take and return names of values, float32
[1, n, features] unless they say otherwise, and serve the target and the EAGLE3 head alike. Fused operators are placed
by hand, so the runtime's graph optimiser has nothing left to do and a session starts quickly.

Weights go straight to `weights.bin` beside the graph, one after the other, so that conversion never holds more than one
matrix; the runtime maps that file into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from hvd.models.onnx.api import DOMAIN
from hvd.models.onnx.cache import GRAPH_FILE, WEIGHTS_FILE
from hvd.models.onnx.linear import EMBEDDING, LINEAR, PACKED
from hvd.models.onnx.linear_kernel import gated_matrix, packed_matrix
from hvd.models.onnx.weights import BLOCK, BlockWeight
from hvd.types import Float32Array

FUSED = "com.microsoft"
ALIGNMENT = 4096
SMALL = 1024
"""Arrays of fewer bytes stay inside the graph."""

Weight = BlockWeight | Float32Array
TYPES = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64}


class GraphBuilder:
    """Collects nodes and weights of one graph in `directory`; `save` writes the graph. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._file = open(directory / WEIGHTS_FILE, "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> GraphBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    # -- values ---------------------------------------------------------------------------------------------------

    def input(self, name: str, dtype: str, shape: list[int | str]) -> str:
        """Declare a graph input; strings in `shape` name free dimensions."""
        self._inputs.append(helper.make_tensor_value_info(name, TYPES[dtype], shape))
        return name

    def output(self, name: str, dtype: str, shape: list[int | str]) -> str:
        """Declare the value `name` a graph output."""
        self._outputs.append(helper.make_tensor_value_info(name, TYPES[dtype], shape))
        return name

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """Store an array under `name` (once; the same name again is the same array)."""
        if name not in self._constants:
            self._constants[name] = self._small(name, array) if array.nbytes < SMALL else self._external(name, array)
        return name

    def node(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        """Append an operator; returns its first output. Empty names stand for absent inputs and outputs."""
        name = f"{kind}/{outputs[0]}"
        self._nodes.append(helper.make_node(kind, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    # -- pieces of a transformer ----------------------------------------------------------------------------------

    def linear(self, x: str, name: str, weight: Weight, bias: Float32Array | None = None, out: str = "") -> str:
        """`x @ weight.T + bias`. weight [N, K] in blocks or float32; bias float32 [N]. Gives [1, n, N]."""
        out = out or f"{name}.out"
        if not isinstance(weight, BlockWeight):
            return self._float_linear(x, name, weight, bias, out)
        if not PACKED:
            return self._runtimes_linear(x, name, weight, bias, out)
        matrix = self._packed(name, weight)
        return self._packed_linear(x, f"{name}.bias", matrix, weight.columns, weight.rows, weight.bits, bias, out)

    def linear_beside(
        self, x: str, names: Sequence[str], weights: Sequence[BlockWeight], biases: Sequence[Float32Array]
    ) -> str:
        """Several products with the same x, their results [1, n, sum of N] behind each other. Needs PACKED, and every N
        a multiple of 16. biases: one for each or none at all."""
        name = "+".join(names)
        matrix = self.constant(f"{name}.packed", np.concatenate([packed_matrix(weight) for weight in weights]))
        rows, bias = sum(weight.rows for weight in weights), np.concatenate(biases) if biases else None
        columns, bits = weights[0].columns, weights[0].bits
        return self._packed_linear(x, f"{name}.bias", matrix, columns, rows, bits, bias, f"{name}.out")

    def gated_linear(self, x: str, name: str, gate: BlockWeight, up: BlockWeight) -> str:
        """`silu(x @ gate.T) * (x @ up.T)` in one operator. Needs PACKED."""
        matrix = self.constant(f"{name}.packed", gated_matrix(packed_matrix(gate), packed_matrix(up)))
        return self._packed_linear(x, "", matrix, gate.columns, gate.rows, gate.bits, None, f"{name}.gated", gated=1)

    def embedding(self, ids: str, name: str, weight: Weight, out: str) -> str:
        """Rows of `weight` [V, H] for ids int64 [1, n]. Shares the stored matrix with a `linear` of the same name."""
        if not isinstance(weight, BlockWeight):
            return self.node("Gather", [self.constant(f"{name}.weight", weight), ids], [out], axis=0)
        if PACKED:
            return self.node(EMBEDDING, [ids, self._packed(name, weight)], [out], DOMAIN, columns=weight.columns)
        shape = (weight.rows, weight.blocks.shape[1] * weight.blocks.shape[2])
        data, scales, zeros = self._blocks(name, weight)
        flat = self._view(data, f"{name}.rows", shape)
        sizes = {"bits": weight.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
        return self.node("GatherBlockQuantized", [flat, ids, scales, zeros], [out], FUSED, **sizes)

    def rms_norm(self, x: str, name: str, gain: Float32Array, epsilon: float) -> str:
        """`gain * x / sqrt(mean(x^2) + epsilon)` over the last axis."""
        gamma = self.constant(f"{name}.gain", gain)
        return self.node(
            "SimplifiedLayerNormalization",
            [x, gamma],
            [f"{name}.out"],
            axis=-1,
            epsilon=epsilon,
            stash_type=1,
        )

    def add_norm(
        self, x: str, residual: str, name: str, gain: Float32Array, epsilon: float, total: str = ""
    ) -> tuple[str, str]:
        """(rms_norm(x + residual), x + residual) in one operator; `total` names the sum."""
        gamma = self.constant(f"{name}.gain", gain)
        outputs = [f"{name}.out", "", "", total or f"{name}.sum"]
        normed = self.node("SkipSimplifiedLayerNormalization", [x, residual, gamma], outputs, FUSED, epsilon=epsilon)
        return normed, outputs[3]

    def head_norm(self, x: str, name: str, gain: Float32Array, epsilon: float) -> str:
        """`rms_norm` over each head: x [1, n, heads * D], gain float32 [D] (Qwen3)."""
        width = len(gain)
        split = self.node(
            "Reshape", [x, self.constant(f"to_heads_{width}", np.array([0, 0, -1, width]))], [f"{name}.heads"]
        )
        normed = self.rms_norm(split, name, gain, epsilon)
        return self.node("Reshape", [normed, self.constant("from_heads", np.array([0, 0, -1]))], [f"{name}.flat"])

    def gated(self, gate: str, up: str, name: str) -> str:
        """`silu(gate) * up`."""
        active = self.node("QuickGelu", [gate], [f"{name}.silu"], FUSED, alpha=1.0)
        return self.node("Mul", [active, up], [f"{name}.gated"])

    # -- writing --------------------------------------------------------------------------------------------------

    def save(self, name: str = "decoder") -> None:
        """Write the graph beside its weights."""
        used = {name for node in self._nodes for name in node.input}
        constants = [proto for name, proto in self._constants.items() if name in used]
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(FUSED, 1), helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="hvd")
        (self.directory / GRAPH_FILE).write_bytes(model.SerializeToString())

    def _packed(self, name: str, weight: BlockWeight) -> str:
        return self.constant(f"{name}.packed{weight.bits}", packed_matrix(weight))

    def _packed_linear(
        self,
        x: str,
        bias_name: str,
        matrix: str,
        columns: int,
        rows: int,
        bits: int,
        bias: Float32Array | None,
        out: str,
        gated: int = 0,
    ) -> str:
        operands = [x, matrix] if bias is None else [x, matrix, self.constant(bias_name, bias)]
        sizes = {"columns": columns, "rows": rows, "bits": bits, "gated": gated, "bias": int(bias is not None)}
        return self.node(LINEAR, operands, [out], DOMAIN, **sizes)

    def _runtimes_linear(self, x: str, name: str, weight: BlockWeight, bias: Float32Array | None, out: str) -> str:
        operands = [x, *self._blocks(name, weight)]
        if bias is not None:
            operands += ["", self.constant(f"{name}.bias", bias)]
        sizes = {"N": weight.rows, "K": weight.columns, "bits": weight.bits, "block_size": BLOCK}
        # accuracy_level 4: activations are rounded to 8 bits, a row at a time, and multiplied as integers
        return self.node("MatMulNBits", operands, [out], FUSED, accuracy_level=4, **sizes)

    def _float_linear(self, x: str, name: str, weight: Float32Array, bias: Float32Array | None, out: str) -> str:
        matrix = self.constant(f"{name}.weight", weight)
        if bias is None:
            return self.node("FusedMatMul", [x, matrix], [out], FUSED, transB=1)
        product = self.node("FusedMatMul", [x, matrix], [f"{name}.product"], FUSED, transB=1)
        return self.node("Add", [product, self.constant(f"{name}.bias", bias)], [out])

    def _blocks(self, name: str, weight: BlockWeight) -> tuple[str, str, str]:
        data = self.constant(f"{name}.int{weight.bits}", weight.blocks)
        return (
            data,
            self.constant(f"{name}.scales{weight.bits}", weight.scales),
            self.constant(f"{name}.zeros{weight.bits}", weight.zeros),
        )

    def _view(self, name: str, alias: str, shape: tuple[int, ...]) -> str:
        """The bytes of a stored array a second time, under another name and shape, without storing them again."""
        proto = onnx.TensorProto()
        proto.CopyFrom(self._constants[name])
        proto.name = alias
        del proto.dims[:]
        proto.dims.extend(shape)
        self._constants[alias] = proto
        return alias

    def _small(self, name: str, array: NDArray[Any]) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)

    def _external(self, name: str, array: NDArray[Any]) -> onnx.TensorProto:
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        proto = onnx.TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        proto.data_location = TensorProto.EXTERNAL
        for key, value in (
            ("location", WEIGHTS_FILE),
            ("offset", self._file.tell()),
            ("length", array.nbytes),
        ):
            proto.external_data.add(key=key, value=str(value))
        self._file.write(np.ascontiguousarray(array).data)
        return proto
