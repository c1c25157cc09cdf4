"""The two graphs of an EAGLE3 head, laid out with the pieces of `onnx_graph`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvd.models.eagle3 import PARTS, SCRATCH
from hvd.models.eagle3_checkpoint import HeadWeights
from hvd.models.onnx_graph import FUSED, GraphBuilder, Weight
from hvd.models.onnx_weights import quantize
from hvd.models.rope import cos_sin


def write_graphs(directory: Path, head: HeadWeights, weights: str) -> None:
    """Write both into new directories `fuse` and `step` of `directory`; weights: "int4", "int8" or "fp32"."""
    for name in ("fuse", "step"):
        (directory / name).mkdir(parents=True)
        with GraphBuilder(directory / name) as builder:
            graph = _Graph(builder, head, weights)
            graph.fuse() if name == "fuse" else graph.step()
            builder.save(f"eagle3-{name}")


class _Graph:
    """Lays out the two graphs of a head."""

    def __init__(self, builder: GraphBuilder, head: HeadWeights, weights: str) -> None:
        self.builder, self.head, self.spec, self.weights = builder, head, head.spec, weights

    def fuse(self) -> None:
        """states float32 [1, n, A * target hidden size] -> features [1, n, H]."""
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
        fused = builder.linear(states, "fc", self._matrix("fc"), out="fused")
        builder.output(fused, "float32", [1, "n", spec.hidden_size])

    def step(self) -> None:
        """One pass: inputs and outputs as `OnnxHead.forward` binds them."""
        builder, spec = self.builder, self.spec
        features = builder.input("features", "float32", [1, "n", spec.hidden_size])
        embeds = builder.input("embeds", "float32", [1, "n", spec.hidden_size])
        builder.input("rows", "int64", ["m"])
        builder.input("position_ids", "int64", [1, "n"])
        builder.input("attention_bias", "float32", [1, 1, "n", "total"])
        builder.attention_inputs()
        positions = np.arange(spec.context_limit + SCRATCH)  # the operator wants an angle for every slot, used or not
        cos, sin = cos_sin(spec.rope, spec.head_dim, spec.context_limit, positions)
        builder.rotary(cos.astype(np.float32), sin.astype(np.float32))
        normed = self._norm(features, "layers.0.hidden_norm")
        token = self._norm(embeds, "layers.0.input_layernorm")
        x = builder.node("Concat", [token, normed], ["pair"], axis=-1)
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

    def _layer(self, layer: int, x: str, state: str) -> tuple[str, str]:
        """A decoder layer: from its normed input and the residual stream to the latter and what to add to it."""
        name = f"layers.{layer}"
        normed, state = self._add_norm(self._attention(layer, x), state, f"{name}.post_attention_layernorm")
        gate, up = self._linear(normed, f"{name}.mlp.gate_proj"), self._linear(normed, f"{name}.mlp.up_proj")
        return state, self._linear(self.builder.gated(gate, up, f"{name}.mlp"), f"{name}.mlp.down_proj")

    def _attention(self, layer: int, x: str) -> str:
        """Attention over the cache. Unlike the target's, it takes positions and a mask, for the levels of a tree."""
        builder, spec, name = self.builder, self.spec, f"layers.{layer}.self_attn"
        q, k, v = (self._linear(x, f"{name}.{part}_proj") for part in "qkv")
        if f"{name}.q_norm.weight" in self.head.tensors:
            q = builder.head_norm(q, f"{name}.q_norm", self.head.tensors[f"{name}.q_norm.weight"], spec.norm_eps)
            k = builder.head_norm(k, f"{name}.k_norm", self.head.tensors[f"{name}.k_norm.weight"], spec.norm_eps)
        shape: list[int | str] = [1, spec.num_kv_heads, "capacity", spec.head_dim]
        past = [builder.input(f"past.{layer}.{part}", "float32", shape) for part in PARTS]
        present = [builder.output(f"present.{layer}.{part}", "float32", shape) for part in PARTS]
        shared = ["last_position", "total_length", "rope.cos", "rope.sin", "position_ids", "attention_bias"]
        sizes = {"num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads, "scale": spec.head_dim**-0.5}
        outputs = [f"{name}.out", *present]
        mixed = builder.node("GroupQueryAttention", [q, k, v, *past, *shared], outputs, FUSED, do_rotary=1, **sizes)
        return self._linear(mixed, f"{name}.o_proj")

    def _linear(self, x: str, name: str) -> str:
        return self.builder.linear(x, name, self._matrix(name), self.head.tensors.get(f"{name}.bias"))

    def _matrix(self, name: str) -> Weight:
        matrix = self.head.tensors[f"{name}.weight"]
        return matrix if self.weights == "fp32" else quantize(matrix, 4 if self.weights == "int4" else 8)

    def _norm(self, x: str, name: str) -> str:
        return self.builder.rms_norm(x, name, self.head.tensors[f"{name}.weight"], self.spec.norm_eps)

    def _add_norm(self, x: str, residual: str, name: str) -> tuple[str, str]:
        return self.builder.add_norm(x, residual, name, self.head.tensors[f"{name}.weight"], self.spec.norm_eps)
