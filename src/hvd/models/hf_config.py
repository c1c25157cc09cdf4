"""config.json of a Hugging Face checkpoint -> ModelConfig. Defaults are those of the transformers library (5.x).

Whatever is not decoded here is refused by its name, with what is supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from hvd.errors import CheckpointError, UnsupportedModelError
from hvd.models.config import FAMILIES, ModelConfig, RopeConfig

Json = Mapping[str, Any]

SUPPORTED = "supported are dense decoders of the families Llama, Mistral, Qwen2 and Qwen3"
MOST_POSITIONS = 2**24
_HUGE = 1e30
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Defaults of transformers' configuration classes, where they differ from one family to another.
_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_SLIDING_WINDOW = 4096

_MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config", "thinker_config")
_EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
_STATE_SPACE_KEYS = (
    "ssm_cfg",
    "state_size",
    "mamba_d_state",
    "mamba_expand",
    "ssm_state_size",
    "conv_L_cache",
    "linear_num_value_heads",
)


def refuse(what: str) -> NoReturn:
    """Raise UnsupportedModelError: what it is, and what is supported."""
    raise UnsupportedModelError(f"{what} not decoded here; {SUPPORTED}")


def read_hf_config(config: Json) -> ModelConfig:
    """Translate a parsed config.json. UnsupportedModelError for other kinds, CheckpointError for a faulty one."""
    family = _family(config)
    _refuse_other_kinds(config)
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    context = _integer(config, "max_position_embeddings", _CONTEXT[family], most=MOST_POSITIONS)
    default_kv_heads = heads if "num_key_value_heads" in config else _KV_HEADS.get(family, heads)
    kv_heads = _integer(config, "num_key_value_heads", default_kv_heads)
    _refuse_sliding_window(family, config, context)
    bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = _integer(config, "head_dim", 128 if family == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim must be even, got {head_dim}")
    return ModelConfig(
        family=family,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=read_number(config, "rms_norm_eps", 1e-6),
        context_limit=context,
        rope=read_rope(config, context),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _family(config: Json) -> str:
    family = config.get("model_type")
    if family in FAMILIES:
        return str(family)
    name = f"model type '{family}'"
    if any(key in config for key in _MULTIMODAL_KEYS):
        refuse(f"{name} wraps several modalities: multimodal models are")
    if any(config.get(key) for key in _EXPERT_KEYS):
        refuse(f"{name} is a mixture of experts, which is")
    if any(key in config for key in _STATE_SPACE_KEYS) or "mamba" in str(family) or "rwkv" in str(family):
        refuse(f"{name} is a state-space or hybrid model, whose state can't be rolled back, and is")
    refuse(f"{name} is" if family else "config.json without a model_type is")


def _refuse_other_kinds(config: Json) -> None:
    family = config["model_type"]
    if quantization := config.get("quantization_config") or config.get("compression_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        refuse(f"weights quantized with '{method}' (quantization_config) are")
    for key in _MULTIMODAL_KEYS:
        if key in config:
            refuse(f"a multimodal wrapper ({key} in config.json) is")
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(key):
            refuse(f"a mixture of experts ({key} in config.json) is")
    if any(name != _ARCHITECTURES[family] for name in _texts(config, "architectures")):
        refuse(f"architecture {config['architectures']} of model type '{family}' is")
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        refuse(f"activation function '{activation}' (only silu is) is")


def _refuse_sliding_window(family: str, config: Json, context: int) -> None:
    """Mistral's window is on unless null, Qwen's off unless use_sliding_window; one as large as the context is none."""
    kinds = _texts(config, "layer_types")
    if any(kind != "full_attention" for kind in kinds):
        refuse(f"layer types {sorted(set(kinds))} other than full_attention are")
    layers, first = _integer(config, "num_hidden_layers"), _integer(config, "max_window_layers", 28, least=0)
    active = family == "mistral" or (family.startswith("qwen") and config.get("use_sliding_window") and first < layers)
    if not active or config.get("sliding_window", _SLIDING_WINDOW) is None:
        return
    if (window := _integer(config, "sliding_window", _SLIDING_WINDOW)) < context:
        refuse(f"a sliding window ({window} of {context} positions) is")


def read_rope(config: Json, context: int) -> RopeConfig:
    """Rotary embedding from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"config.json: rope_scaling must be an object, got {rope!r}")
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in ROPE_KINDS:
        refuse(f"rope type '{kind}' (only {', '.join(ROPE_KINDS)} are) is")
    if any(isinstance(value, Mapping) for value in rope.values()):
        refuse("rope parameters that differ between layers are")
    if (partial := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (
        None,
        1,
        1.0,
    ):
        refuse(f"a partial rotary factor of {partial} is")
    theta = read_number(rope, "rope_theta", read_number(config, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "yarn" and theta <= 1.0:
        raise CheckpointError(f"config.json: rope_theta must be more than 1 for yarn, got {theta}")
    original = _original_positions(kind, rope, config, context)
    low = read_number(rope, "low_freq_factor", None if kind == "llama3" else 1.0)
    high = read_number(rope, "high_freq_factor", None if kind == "llama3" else 4.0)
    if kind == "llama3" and low >= high:
        raise CheckpointError(f"config.json: high_freq_factor must be more than low_freq_factor, got {high} and {low}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=read_number(rope, "factor", context / original if kind == "yarn" else None),
        original_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
        attention_factor=None if rope.get("attention_factor") is None else read_number(rope, "attention_factor"),
        beta_fast=read_number(rope, "beta_fast", 32.0, zero=True) or 32.0,
        beta_slow=read_number(rope, "beta_slow", 1.0, zero=True) or 1.0,
        mscale=read_number(rope, "mscale", 0.0, zero=True),
        mscale_all_dim=read_number(rope, "mscale_all_dim", 0.0, zero=True),
        truncate=bool(rope.get("truncate", True)),
    )


def _original_positions(kind: str, rope: Json, config: Json, context: int) -> int:
    if kind == "linear":
        return 0
    if kind == "dynamic":  # transformers scales from max_position_embeddings, whatever else is said
        return context
    if config.get("original_max_position_embeddings") is not None:
        return _integer(config, "original_max_position_embeddings")
    return _integer(rope, "original_max_position_embeddings", context)


def _integer(config: Json, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"config.json: {key} must be a whole number from {least} to {most}, got {_short(value)}")
    return value


def read_number(config: Json, key: str, default: float | None = None, *, zero: bool = False) -> float:
    """A positive (or `zero`), finite number; `default` where it is null or missing. CheckpointError for others."""
    value = config.get(key)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not number or not (0 < value < _HUGE or (zero and value == 0)):
        raise CheckpointError(f"config.json: {key} must be a positive, finite number, got {_short(value)}")
    return float(value)


def _texts(config: Json, key: str) -> list[str]:
    """A list of strings; [] where it is null or missing."""
    value = config.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"config.json: {key} must be a list of strings, got {_short(value)}")
    return value


def _short(value: object) -> str:
    """A value as a message shows it: one line, not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
