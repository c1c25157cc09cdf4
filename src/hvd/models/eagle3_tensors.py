"""Which tensors an EAGLE3 head has, and of what shape. Sizes are inferred from the weights; all must agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from hvd.errors import CheckpointError
from hvd.models.config import RopeConfig
from hvd.models.eagle3_config import StatedConfig
from hvd.models.target import TargetSpec

Tensors = dict[str, NDArray[Any]]
Shape = tuple[int, ...]

_FILLED = {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
"""May be absent; eagle3_checkpoint.py has the rules."""


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Shape and options of a head; sizes are those of its weights.

    hidden_size          H, of the head
    target_hidden_size   of the states it eats, A of them side by side
    aux_layers           the A target layers whose *entering* states it eats, in its order
    context_limit        most positions the head may be run at
    draft_vocab_size     V
    norm_before_residual, norm_output    see `StatedConfig`
    """

    hidden_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_limit: int
    rope: RopeConfig
    draft_vocab_size: int
    norm_before_residual: bool
    norm_output: bool


def check_names(tensors: Tensors, stated: StatedConfig) -> None:
    """CheckpointError that names every missing and every unknown tensor, and every one that is a mere number."""
    needed = {"fc.weight", "norm.weight"}
    for layer in range(_count_layers(tensors)):
        needed |= _layer_names(layer, tensors, stated)
    if stated.norm_before_fc:
        needed.add("input_norm.weight")
    if stated.fc_norm:
        needed |= {name for name in tensors if re.fullmatch(r"fc_norm\.\d+\.weight", name)} or {"fc_norm.0.weight"}
    scalars = {name for name, tensor in tensors.items() if tensor.ndim == 0}
    faults = {"missing": needed - set(tensors), "unknown": set(tensors) - needed - _FILLED, "scalar": scalars}
    _raise(stated, [f"{kind} {', '.join(sorted(names))}" for kind, names in faults.items() if names])


def check_shapes(tensors: Tensors, spec: HeadSpec, stated: StatedConfig, target_vocab: int) -> None:
    """CheckpointError that names every tensor of a wrong shape (and an fc_norm that is one too few or too many)."""
    shapes = _shapes(spec, target_vocab)
    if stated.fc_norm:
        norms = {name for name in shapes if name.startswith("fc_norm.")}
        found = {name for name in tensors if name.startswith("fc_norm.")}
        _raise(stated, [f"missing or unknown {name}" for name in sorted(norms ^ found)])
    _raise(
        stated,
        [
            f"{name} is {list(tensor.shape)} and should be {list(shapes[name])}"
            for name, tensor in sorted(tensors.items())
            if tensor.shape != shapes[name]
        ],
    )


def infer_spec(tensors: Tensors, stated: StatedConfig, target: TargetSpec) -> HeadSpec:
    """Sizes from the weights, which `check_names` has found complete. CheckpointError where they make no sense."""
    attention = "layers.0.self_attn"
    needed = ("fc.weight", f"{attention}.q_proj.weight", f"{attention}.k_proj.weight", "lm_head.weight")
    matrices = (*needed, "layers.0.mlp.gate_proj.weight")
    _raise(
        stated, [f"{name} is no matrix: {list(tensors[name].shape)}" for name in matrices if tensors[name].ndim != 2]
    )
    hidden, fused = tensors["fc.weight"].shape
    head_dim, heads, kv_heads = _heads(tensors, stated)
    return HeadSpec(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        aux_layers=_aux_layers(fused, stated, target),
        intermediate_size=len(tensors["layers.0.mlp.gate_proj.weight"]),
        num_layers=_count_layers(tensors),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=stated.norm_eps,
        context_limit=stated.context_limit,
        rope=stated.rope,
        draft_vocab_size=len(tensors["lm_head.weight"]),
        norm_before_residual=stated.norm_before_residual,
        norm_output=stated.norm_output,
    )


def _raise(stated: StatedConfig, faults: list[str]) -> None:
    """One error for all faults, in the names of the file."""
    if faults:
        names = "; ".join(faults)
        raise CheckpointError(f"EAGLE3 head: {names if stated.nested else names.replace('layers.0.', 'midlayer.')}")


def _count_layers(tensors: Mapping[str, Any]) -> int:
    """Configurations copied from a target claim its number of layers; the names know better."""
    found = [int(match[1]) for match in map(re.compile(r"layers\.(\d+)\.").match, tensors) if match]
    return max(found, default=0) + 1


def _layer_names(layer: int, tensors: Mapping[str, Any], stated: StatedConfig) -> set[str]:
    """What decoder layer `layer` must have. Optional parts are wanted whole as soon as one piece is there."""
    prefix = f"layers.{layer}."
    names = {f"self_attn.{part}_proj.weight" for part in "qkvo"} | {
        f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    names |= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    if layer == 0:
        names.add("hidden_norm.weight")
    qk_norms = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    qkv_biases = {f"self_attn.{part}_proj.bias" for part in "qkv"}
    o_bias = {"self_attn.o_proj.bias"}
    wanted = ((qk_norms, stated.qk_norm), (qkv_biases, stated.attention_bias), (o_bias, stated.attention_bias))
    for group, stated_so in wanted:
        if stated_so or any(prefix + name in tensors for name in group):
            names |= group
    return {prefix + name for name in names}


def _heads(tensors: Tensors, stated: StatedConfig) -> tuple[int, int, int]:
    """(head_dim, heads, kv heads). A stated head_dim is not trusted: it is the rows of q divided by the heads."""
    q_rows, k_rows = (len(tensors[f"layers.0.self_attn.{part}_proj.weight"]) for part in "qk")
    heads = stated.num_heads
    head_dim = q_rows // heads
    kv_heads = k_rows // head_dim if head_dim else 0
    good = kv_heads and head_dim * heads == q_rows and head_dim * kv_heads == k_rows and heads % kv_heads == 0
    if not good or head_dim % 2 or stated.num_kv_heads not in (None, kv_heads):
        raise CheckpointError(
            f"EAGLE3 head: the {heads} heads and {stated.num_kv_heads or 'some'} key/value heads of its config.json do "
            f"not fit the {q_rows} rows of q_proj and the {k_rows} of k_proj"
        )
    return head_dim, heads, kv_heads


def _aux_layers(fused: int, stated: StatedConfig, target: TargetSpec) -> tuple[int, ...]:
    """The layers whose states the head eats: as many as `fc` is wide, and all offered by the target."""
    count, rest = divmod(fused, target.hidden_size)
    if rest or not count:
        raise CheckpointError(
            f"EAGLE3 head: fc.weight takes {fused} features, not a multiple of the target's hidden size "
            f"{target.hidden_size}"
        )
    layers = stated.aux_layers(target.num_layers) or target.aux_layers
    if len(layers) != count:
        origin = "its config.json names" if stated.aux_ids else "its config.json names none, and the target offers"
        raise CheckpointError(
            f"EAGLE3 head: fc.weight takes the states of {count} layers, {origin} {len(layers)}: {list(layers)}"
        )
    if not set(layers) <= set(target.aux_layers):
        raise CheckpointError(
            f"EAGLE3 head takes the states entering layers {list(layers)}, the target was opened for "
            f"{list(target.aux_layers)}; open it with the head's layers"
        )
    return layers


def _shapes(spec: HeadSpec, target_vocab: int) -> dict[str, Shape]:
    """The shape that each tensor must have."""
    hidden, states = spec.hidden_size, len(spec.aux_layers) * spec.target_hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, states),
        "input_norm.weight": (states,),
        "norm.weight": (hidden,),
        "lm_head.weight": (spec.draft_vocab_size, hidden),
        "embed_tokens.weight": (target_vocab, hidden),
        "d2t": (spec.draft_vocab_size,),
        "t2d": (target_vocab,),
    }
    shapes |= {f"fc_norm.{index}.weight": (spec.target_hidden_size,) for index in range(len(spec.aux_layers))}
    for layer in range(spec.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec, layer).items()}
    return shapes


def _layer_shapes(spec: HeadSpec, layer: int) -> dict[str, Shape]:
    hidden, wide = spec.hidden_size, spec.intermediate_size
    q, kv, entering = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, hidden
    if layer == 0:
        entering = 2 * hidden  # embedding and feature
    linears: dict[str, Shape] = {
        "self_attn.q_proj": (q, entering),
        "self_attn.k_proj": (kv, entering),
        "self_attn.v_proj": (kv, entering),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    shapes = {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes
