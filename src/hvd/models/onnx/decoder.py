"""The decoder of every family that we decode, laid out with the pieces of `graph`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from hvd.models.config import ModelConfig
from hvd.models.onnx.api import DOMAIN
from hvd.models.onnx.attention import OPERATOR
from hvd.models.onnx.attention_kernel import APART, TOGETHER
from hvd.models.onnx.graph import GraphBuilder, Weight
from hvd.models.onnx.heads import wide, wide_epsilon
from hvd.models.onnx.linear import PACKED
from hvd.models.onnx.weights import BlockWeight
from hvd.models.rope import cos_sin
from hvd.types import Float32Array, Float64Array

PADDING = 1
"""Positions that a pass may compute behind the last one asked for (see `target`)."""


class WeightSource(Protocol):
    """A checkpoint's tensors, by their Hugging Face names."""

    def plain(self, name: str) -> Float32Array:
        """A norm's gain or a bias, float32."""

    def matrix(self, name: str, bits: int | None = None) -> Weight:
        """A matrix [N, K] in the model's weight format, or in `bits` bits where that is quantized."""


def build_decoder(builder: GraphBuilder, config: ModelConfig, weights: WeightSource) -> Iterator[str]:
    """Lay out the whole decoder. Yields what it is about to do, layer by layer.

    Inputs: input_ids int64 [1, n]; rows int64 [m], the positions whose logits are wanted. Outputs: logits float32
    [1, m, V]; entering.{i} float32 [1, n, H], the state entering layer i. Attention knows the cache and the positions
    by itself (`attention`).
    """
    builder.input("input_ids", "int64", [1, "n"])
    builder.input("rows", "int64", ["m"])
    yield "embedding"
    state = builder.embedding(
        "input_ids",
        "model.embed_tokens",
        weights.matrix("model.embed_tokens.weight", bits=8),
        out="entering.0",
    )
    update = ""
    for layer in range(config.num_layers):
        yield f"layer {layer + 1} of {config.num_layers}"
        state, update = _layer(builder, config, weights, layer, state, update)
    yield "output matrix"
    normed, _ = builder.add_norm(update, state, "model.norm", weights.plain("model.norm.weight"), config.norm_eps)
    wanted = builder.node("Gather", [normed, "rows"], ["model.norm.rows"], axis=1)
    name = "model.embed_tokens" if config.tied else "lm_head"
    logits = builder.linear(wanted, name, weights.matrix(f"{name}.weight", bits=8), out="logits")
    builder.output(logits, "float32", [1, "m", config.vocab_size])


def rope_table(config: ModelConfig) -> Float32Array:
    """Cosines and sines of every position, [2, positions, W/2] for heads as the cache has them."""
    positions = np.arange(config.context_limit + PADDING, dtype=np.int64)
    cos, sin = cos_sin(config.rope, config.head_dim, config.context_limit, positions)
    return np.stack([_wide_table(cos, 1.0, config.head_dim), _wide_table(sin, 0.0, config.head_dim)])


def _wide_table(table: Float64Array, rest: float, head_dim: int) -> Float32Array:
    """A rotary table [positions, D/2] for widened heads: what was added is not turned."""
    room = (wide(head_dim) - head_dim) // 2
    return np.pad(table, ((0, 0), (0, room)), constant_values=rest).astype(np.float32)


def _layer(
    builder: GraphBuilder, config: ModelConfig, weights: WeightSource, layer: int, state: str, update: str
) -> tuple[str, str]:
    """One decoder layer. Takes the residual stream as `state + update` (update "" at first) and returns it so."""
    name = f"model.layers.{layer}"
    gain = weights.plain(f"{name}.input_layernorm.weight")
    if update:
        normed, state = builder.add_norm(
            update, state, f"{name}.input_layernorm", gain, config.norm_eps, f"entering.{layer}"
        )
    else:
        normed = builder.rms_norm(state, f"{name}.input_layernorm", gain, config.norm_eps)
    builder.output(state, "float32", [1, "n", config.hidden_size])
    attended = _attention(builder, config, weights, f"{name}.self_attn", layer, normed)
    gain = weights.plain(f"{name}.post_attention_layernorm.weight")
    normed, state = builder.add_norm(attended, state, f"{name}.post_attention_layernorm", gain, config.norm_eps)
    active = _gated(builder, config, weights, f"{name}.mlp", normed)
    return state, _linear(builder, weights, active, f"{name}.mlp.down_proj", config.mlp_bias)


def _gated(builder: GraphBuilder, config: ModelConfig, weights: WeightSource, name: str, x: str) -> str:
    gate, up = weights.matrix(f"{name}.gate_proj.weight"), weights.matrix(f"{name}.up_proj.weight")
    together = PACKED and not config.mlp_bias
    if together and isinstance(gate, BlockWeight) and isinstance(up, BlockWeight) and gate.bits == up.bits:
        return builder.gated_linear(x, name, gate, up)
    gate_out = builder.linear(x, f"{name}.gate_proj", gate, _bias(weights, f"{name}.gate_proj", config.mlp_bias))
    up_out = builder.linear(x, f"{name}.up_proj", up, _bias(weights, f"{name}.up_proj", config.mlp_bias))
    return builder.gated(gate_out, up_out, name)


def _attention(builder: GraphBuilder, config: ModelConfig, weights: WeightSource, name: str, layer: int, x: str) -> str:
    names = [f"{name}.{part}_proj" for part in "qkv"]
    matrices = [weights.matrix(f"{part}.weight") for part in names]
    blocks = [matrix for matrix in matrices if isinstance(matrix, BlockWeight)]
    biases = [weights.plain(f"{part}.bias") for part in names if config.qkv_bias]
    if PACKED and len(blocks) == 3 and len({each.bits for each in blocks}) == 1 and not config.qk_norm:
        operands = [builder.linear_beside(x, names, blocks, biases)]
    else:
        operands = [
            builder.linear(x, part, matrix, biases[index] if biases else None)
            for index, (part, matrix) in enumerate(zip(names, matrices, strict=True))
        ]
    if config.qk_norm:
        epsilon = wide_epsilon(config.norm_eps, config.head_dim)
        for index, part in enumerate("qk"):
            gain = weights.plain(f"{name}.{part}_norm.weight")
            operands[index] = builder.head_norm(operands[index], f"{name}.{part}_norm", gain, epsilon)
    form = TOGETHER if len(operands) == 1 else APART
    out = builder.node(OPERATOR, operands, [f"{name}.out"], DOMAIN, layer=layer, form=form)
    return _linear(builder, weights, out, f"{name}.o_proj", config.o_bias)


def _linear(builder: GraphBuilder, weights: WeightSource, x: str, name: str, bias: bool) -> str:
    return builder.linear(x, name, weights.matrix(f"{name}.weight"), _bias(weights, name, bias))


def _bias(weights: WeightSource, name: str, there: bool) -> Float32Array | None:
    return weights.plain(f"{name}.bias") if there else None
