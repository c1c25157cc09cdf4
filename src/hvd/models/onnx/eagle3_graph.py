"""The graphs of an EAGLE3 head, laid out with the pieces of `graph`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvd.models.eagle3 import SCRATCH
from hvd.models.eagle3_checkpoint import HeadWeights
from hvd.models.eagle3_tensors import HeadSpec
from hvd.models.onnx.api import DOMAIN
from hvd.models.onnx.attention import OPERATOR
from hvd.models.onnx.attention_kernel import APART, STORED
from hvd.models.onnx.graph import GraphBuilder, Weight
from hvd.models.onnx.weights import quantize
from hvd.models.rope import cos_sin
from hvd.types import Float32Array


def write_graphs(directory: Path, head: HeadWeights, weights: str) -> None:
    """Write `fuse`, `step` and, of a head with one layer, `eat` into new directories of those names.

    weights   "int4", "int8" or "fp32"
    """
    for name in ("fuse", "step", "eat") if head.spec.num_layers == 1 else ("fuse", "step"):
        (directory / name).mkdir(parents=True)
        with GraphBuilder(directory / name) as builder:
            graph = _Graph(builder, head, weights)
            {"fuse": graph.fuse, "step": graph.step, "eat": graph.eat}[name]()
            builder.save(f"eagle3-{name}")


def rope_table(spec: HeadSpec) -> Float32Array:
    """Cosines and sines of every slot, [2, slots, D/2]."""
    slots = np.arange(spec.context_limit + SCRATCH)
    return np.stack(cos_sin(spec.rope, spec.head_dim, spec.context_limit, slots)).astype(np.float32)


class _Graph:
    """Lays out a graph of a head."""

    def __init__(self, builder: GraphBuilder, head: HeadWeights, weights: str) -> None:
        self.builder, self.head, self.spec, self.weights = builder, head, head.spec, weights

    def fuse(self) -> None:
        """states float32 [1, n, A * target hidden size] -> features [1, n, H]."""
        self.builder.output(self._fused(), "float32", [1, "n", self.spec.hidden_size])

    def eat(self) -> None:
        """Keep the keys and values of pairs whose output nobody wants, of states as `fuse` takes them."""
        builder, spec = self.builder, self.spec
        embeds = builder.input("embeds", "float32", [1, "n", spec.hidden_size])
        x, _ = self._pair(self._fused(), embeds)
        operands = [self._projected(0, x, "k"), self._projected(0, x, "v")]
        kept = builder.node(OPERATOR, operands, ["kept"], DOMAIN, layer=0, form=STORED)
        builder.output(kept, "float32", [1, "n", 0])

    def _fused(self) -> str:
        builder, spec = self.builder, self.spec
        count, size = len(spec.aux_layers), spec.target_hidden_size
        states = builder.input("states", "float32", [1, "n", count * size])
        if "input_norm.weight" in self.head.tensors:
            states = self._norm(states, "input_norm")
        elif "fc_norm.0.weight" in self.head.tensors:
            parts = [f"part.{index}" for index in range(count)]
            builder.node("Split", [states, builder.constant("sizes", np.full(count, size))], parts, axis=-1)
            normed = [self._norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
            states = builder.node("Concat", normed, ["normed"], axis=-1)
        return builder.linear(states, "fc", self._matrix("fc"), out="fused")

    def step(self) -> None:
        """One pass: inputs and outputs as `OnnxHead.forward` binds them."""
        builder, spec = self.builder, self.spec
        features = builder.input("features", "float32", [1, "n", spec.hidden_size])
        embeds = builder.input("embeds", "float32", [1, "n", spec.hidden_size])
        builder.input("rows", "int64", ["m"])
        x, normed = self._pair(features, embeds)
        state, update = normed if spec.norm_before_residual else features, ""
        for layer in range(spec.num_layers):
            if layer > 0:
                x, state = self._add_norm(update, state, f"layers.{layer}.input_layernorm")
            state, update = self._layer(layer, x, state)
        normed, state = self._add_norm(update, state, "norm")
        fed_back = builder.node("Identity", [normed if spec.norm_output else state], ["fed_back"])
        builder.output(fed_back, "float32", [1, "n", spec.hidden_size])
        wanted = builder.node("Gather", [normed, "rows"], ["wanted"], axis=1)
        logits = builder.linear(wanted, "lm_head", self._matrix("lm_head"), out="logits")
        builder.output(logits, "float32", [1, "m", spec.draft_vocab_size])

    def _pair(self, features: str, embeds: str) -> tuple[str, str]:
        """The first layer's input, and the normed features in it."""
        normed = self._norm(features, "layers.0.hidden_norm")
        token = self._norm(embeds, "layers.0.input_layernorm")
        return self.builder.node("Concat", [token, normed], ["pair"], axis=-1), normed

    def _layer(self, layer: int, x: str, state: str) -> tuple[str, str]:
        """A decoder layer: from its normed input and the residual stream to the latter and what to add to it."""
        name = f"layers.{layer}"
        normed, state = self._add_norm(self._attention(layer, x), state, f"{name}.post_attention_layernorm")
        gate, up = self._linear(normed, f"{name}.mlp.gate_proj"), self._linear(normed, f"{name}.mlp.up_proj")
        return state, self._linear(self.builder.gated(gate, up, f"{name}.mlp"), f"{name}.mlp.down_proj")

    def _attention(self, layer: int, x: str) -> str:
        name = f"layers.{layer}.self_attn"
        operands = [self._projected(layer, x, part) for part in "qkv"]
        mixed = self.builder.node(OPERATOR, operands, [f"{name}.out"], DOMAIN, layer=layer, form=APART)
        return self._linear(mixed, f"{name}.o_proj")

    def _projected(self, layer: int, x: str, part: str) -> str:
        """Queries ("q"), keys ("k") or values ("v") of the layer's input, normed where the head norms them."""
        name = f"layers.{layer}.self_attn.{part}"
        out, gain = self._linear(x, f"{name}_proj"), self.head.tensors.get(f"{name}_norm.weight")
        return out if gain is None else self.builder.head_norm(out, f"{name}_norm", gain, self.spec.norm_eps)

    def _linear(self, x: str, name: str) -> str:
        return self.builder.linear(x, name, self._matrix(name), self.head.tensors.get(f"{name}.bias"))

    def _matrix(self, name: str) -> Weight:
        matrix = self.head.tensors[f"{name}.weight"]
        return matrix if self.weights == "fp32" else quantize(matrix, 4 if self.weights == "int4" else 8)

    def _norm(self, x: str, name: str) -> str:
        return self.builder.rms_norm(x, name, self.head.tensors[f"{name}.weight"], self.spec.norm_eps)

    def _add_norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        return self.builder.add_norm(x, residual, name, self.head.tensors[f"{name}.weight"], self.spec.norm_eps)
