"""Small random EAGLE3 heads in every published layout, and the target facts that go with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hvd.models.target import TargetSpec

Tensors = dict[str, NDArray[Any]]
LAYOUTS = ("safeailab", "specforge", "speculators")

TARGET = TargetSpec(
    name="tiny-target",
    family="llama",
    vocab_size=32,
    hidden_size=16,
    num_layers=12,
    context_limit=512,
    aux_layers=(2, 6, 9),
    fingerprint="f00d",
    backend="torch",
    weights="float32",
)


def target_with(**changes: Any) -> TargetSpec:
    """TARGET with other facts."""
    return replace(TARGET, **changes)


def target_tensor(name: str) -> NDArray[np.float32]:
    """Tensors of an untied target that goes with TARGET; values that float16 holds exactly."""
    shapes = {"model.embed_tokens.weight": (32, 16), "lm_head.weight": (32, 16)}
    values = np.random.default_rng(len(name)).normal(size=shapes[name])
    return values.astype(np.float16).astype(np.float32)


def head_tensors(
    *,
    hidden: int = 16,
    target_hidden: int = 16,
    aux: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 24,
    vocab: int = 8,
    target_vocab: int = 32,
    layers: int = 1,
    qk_norm: bool = False,
    bias: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    embedding: bool = False,
    seed: int = 0,
    spread: float = 1.5,
) -> Tensors:
    """Random tensors of a head by canonical names, float32; a scattered d2t, and t2d, when vocab < target_vocab."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.normal(0, spread / columns**0.5, (rows, columns)).astype(np.float32)

    def gain(size: int) -> NDArray[np.float32]:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors: Tensors = {"fc.weight": matrix(hidden, aux * target_hidden), "norm.weight": gain(hidden)}
    tensors["lm_head.weight"] = matrix(vocab, hidden)
    if norm_before_fc:
        tensors["input_norm.weight"] = gain(aux * target_hidden)
    if fc_norm:
        tensors |= {f"fc_norm.{index}.weight": gain(target_hidden) for index in range(aux)}
    if embedding:
        tensors["embed_tokens.weight"] = matrix(target_vocab, hidden)
    for layer in range(layers):
        entering = 2 * hidden if layer == 0 else hidden
        sizes = {
            "self_attn.q_proj": (heads * head_dim, entering),
            "self_attn.k_proj": (kv_heads * head_dim, entering),
            "self_attn.v_proj": (kv_heads * head_dim, entering),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        part: Tensors = {f"{name}.weight": matrix(*size) for name, size in sizes.items()}
        part |= {f"{name}.weight": gain(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        if layer == 0:
            part["hidden_norm.weight"] = gain(hidden)
        if qk_norm:
            part |= {f"self_attn.{name}.weight": gain(head_dim) for name in ("q_norm", "k_norm")}
        if bias:
            part |= {f"{name}.bias": gain(sizes[name][0]) for name in sizes if name.startswith("self_attn")}
        tensors |= {f"layers.{layer}.{name}": tensor for name, tensor in part.items()}
    if vocab < target_vocab:
        ids = np.sort(rng.choice(target_vocab, vocab, replace=False))
        tensors["d2t"] = (ids - np.arange(vocab)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(target_vocab), ids)
    return tensors


def head_config(tensors: Tensors, layout: str = "safeailab", *, heads: int = 4, **extra: Any) -> dict[str, Any]:
    """A config.json for them. `extra` goes to the decoder's part where it belongs there, else to the top."""
    decoder: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": len(tensors.get("norm.weight", tensors.get("fc.weight", ()))),
        "num_attention_heads": heads,
        "num_hidden_layers": 99,  # published configurations are wrong here
        "head_dim": 999,  # and here
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "vocab_size": 32,
    }
    inner = {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "model_type",
        "attention_bias",
        "hidden_act",
        "layer_types",
    }
    inner |= {"max_position_embeddings", "num_key_value_heads", "rms_norm_eps"}
    decoder |= {key: value for key, value in extra.items() if key in inner}
    top = {key: value for key, value in extra.items() if key not in inner}
    if "lm_head.weight" in tensors:
        top.setdefault("draft_vocab_size", len(tensors["lm_head.weight"]))
    if layout == "speculators":
        verifier = {"name_or_path": "owner/Tiny-Target", "architectures": ["LlamaForCausalLM"]}
        nested = {
            "transformer_layer_config": decoder,
            "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        }
        return {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **nested, **top}
    if layout == "specforge":
        eagle = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}
        return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle, **decoder, **top}
    return {"architectures": ["LlamaForCausalLMEagle3"], **decoder, **top}


def write_head(
    folder: Path, tensors: Tensors, config: dict[str, Any], *, pickled: bool = False, dtype: str = "float32"
) -> Path:
    """Write a head to `folder`, in the layout that `config` is in; floats in `dtype` (float32, float16, bfloat16)."""
    import ml_dtypes

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    as_stored = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    if "transformer_layer_config" not in config:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    stored = {name: x.astype(as_stored) if x.dtype == np.float32 else x for name, x in tensors.items()}
    if pickled:
        import torch

        torch.save({name: torch.from_numpy(x.copy()) for name, x in stored.items()}, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    return folder


def make_head(
    folder: Path, layout: str = "safeailab", *, pickled: bool = False, dtype: str = "float32", **options: Any
) -> Path:
    """Random tensors and their config.json in one go; `options` of `head_tensors` and, the others, of `head_config`."""
    names = set(head_tensors.__kwdefaults__)
    tensors = head_tensors(**{key: value for key, value in options.items() if key in names})
    both = {"heads", "norm_before_fc", "fc_norm"}
    config = head_config(
        tensors, layout, **{key: value for key, value in options.items() if key not in names or key in both}
    )
    return write_head(folder, tensors, config, pickled=pickled, dtype=dtype)
