"""Builds ONNX graphs of transformer layers out of the few operators that ONNX Runtime runs fast on a CPU.

The pieces (`linear`, `rms_norm`, `add_norm`, `attention`, `mlp`, `embedding`) take and return names of values, float32
[1, n, features] unless they say otherwise, and serve the target and the EAGLE3 head alike. Fused operators are placed
by hand, so the runtime's graph optimiser has nothing left to do and a session starts quickly.

Weights go straight to `weights.bin` beside the graph, one after the other, so that conversion never holds more than one
matrix; the runtime maps that file into memory.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from hvd.models.onnx_cache import GRAPH_FILE, WEIGHTS_FILE
from hvd.models.onnx_weights import BLOCK, BlockWeight
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
        if isinstance(weight, BlockWeight):
            operands = [x, *self._blocks(name, weight)]
            if bias is not None:
                operands += ["", self.constant(f"{name}.bias", bias)]
            sizes = {"N": weight.rows, "K": weight.columns, "bits": weight.bits, "block_size": BLOCK}
            # accuracy_level 4: activations are rounded to 8 bits, a row at a time, and multiplied as integers
            return self.node("MatMulNBits", operands, [out], FUSED, accuracy_level=4, **sizes)
        matrix = self.constant(f"{name}.weight", weight)
        if bias is None:
            return self.node("FusedMatMul", [x, matrix], [out], FUSED, transB=1)
        product = self.node("FusedMatMul", [x, matrix], [f"{name}.product"], FUSED, transB=1)
        return self.node("Add", [product, self.constant(f"{name}.bias", bias)], [out])

    def embedding(self, ids: str, name: str, weight: Weight, out: str) -> str:
        """Rows of `weight` [V, H] for ids int64 [1, n]. Shares the stored matrix with a `linear` of the same name."""
        if isinstance(weight, BlockWeight):
            shape = (weight.rows, weight.blocks.shape[1] * weight.blocks.shape[2])
            data, scales, zeros = self._blocks(name, weight)
            flat = self._view(data, f"{name}.rows", shape)
            sizes = {"bits": weight.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
            return self.node("GatherBlockQuantized", [flat, ids, scales, zeros], [out], FUSED, **sizes)
        return self.node("Gather", [self.constant(f"{name}.weight", weight), ids], [out], axis=0)

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

    def attention(
        self,
        name: str,
        qkv: tuple[str, str, str],
        past: tuple[str, str],
        present: tuple[str, str],
        **sizes: Any,
    ) -> str:
        """Causal grouped-query attention with rotary embedding over a KV buffer that is read and extended in place.

        qkv            [1, n, heads * D], [1, n, kv_heads * D], [1, n, kv_heads * D]
        past, present  keys and values, float32 [1, kv_heads, capacity, D]; bind input and output to the same memory
        sizes          num_heads, kv_num_heads, scale

        The n tokens stand at the last n of `total_length` positions. Reads what `rotary` and `attention_inputs` made.
        """
        inputs = [*qkv, *past, "last_position", "total_length", "rope.cos", "rope.sin"]
        return self.node("GroupQueryAttention", inputs, [f"{name}.out", *present], FUSED, do_rotary=1, **sizes)

    def attention_inputs(self) -> None:
        """Declare what every attention reads: total_length int32 [], the positions in use after the pass, and
        last_position int32 [1], that minus 1.
        """
        self.input("last_position", "int32", [1])
        self.input("total_length", "int32", [])

    def rotary(self, cos: Float32Array, sin: Float32Array) -> None:
        """Store the rotary tables, float32 [positions, D/2] each (`hvd.models.rope.cos_sin`)."""
        self.constant("rope.cos", cos)
        self.constant("rope.sin", sin)

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
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(FUSED, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="hvd")
        (self.directory / GRAPH_FILE).write_bytes(model.SerializeToString())

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
