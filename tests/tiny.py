"""Tiny random checkpoints: normal Hugging Face directories, written with NumPy and safetensors alone.

Weights are drawn with a large spread, so that greedy decoding has clear gaps and varied text (hard_cases M2).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hvd.types import Float32Array

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORD_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 't1 ' + m['content'] + ' t2 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 't3' }}{% endif %}"
)


def make_tiny(
    directory: str | Path,
    family: str = "llama",
    *,
    layers: int = 3,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 64,
    vocab: int = 64,
    tied: bool = False,
    qkv_bias: bool | None = None,
    mlp_bias: bool = False,
    rope: dict[str, Any] | None = None,
    context: int = 512,
    seed: int = 0,
    spread: float = 2.0,
    eos: int | list[int] | None = None,
    dtype: str = "float32",
) -> Path:
    """Write a random model of `family` and return its directory.

    head_dim   None: hidden // heads (left out of the config where the family allows that)
    qkv_bias   None: as the family has it (True for qwen2). For llama and qwen3, o_proj gets a bias too
    rope       `rope_scaling` as in a config; a dict with "rope_theta" is written as the newer `rope_parameters`
    spread     standard deviation of a linear layer's outputs for unit inputs; larger = clearer gaps
    eos        end-of-sequence id or ids; None = the model has none
    dtype      of the stored weights: "float32", "float16" or "bfloat16"
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    bias = family == "qwen2" if qkv_bias is None else qkv_bias
    if bias and family == "mistral":
        raise ValueError("mistral has no qkv bias")
    dim = head_dim or hidden // heads
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "torch_dtype": dtype,
        **_family_options(family, bias, mlp_bias),
        **_rope_options(rope),
    }
    if head_dim is not None or family == "qwen3":  # qwen3's own default is 128, whatever the hidden size
        config["head_dim"] = dim
    tensors = _weights(config, dim, bias, seed, spread)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": None, "eos_token_id": eos, "do_sample": False})
    _write_safetensors(path / "model.safetensors", tensors, dtype)
    _write_tokenizer(path, vocab, eos)
    return path


def _family_options(family: str, bias: bool, mlp_bias: bool) -> dict[str, Any]:
    if family == "llama":
        return {"attention_bias": bias, "mlp_bias": mlp_bias}
    if family == "qwen3":
        return {"attention_bias": bias, "use_sliding_window": False}
    if family == "qwen2":
        return {"use_sliding_window": False}
    return {"sliding_window": None}


def _rope_options(rope: dict[str, Any] | None) -> dict[str, Any]:
    if rope is not None and "rope_theta" in rope:
        return {"rope_parameters": rope}
    return {"rope_theta": 10000.0, "rope_scaling": rope}


def _weights(config: dict[str, Any], dim: int, bias: bool, seed: int, spread: float) -> dict[str, Float32Array]:
    """All tensors by their Hugging Face names.

    Queries and keys are larger still: sharp attention keeps old tokens in play, so that greedy text
    does not loop at once.
    """
    rng = np.random.default_rng(seed)
    family, hidden, vocab = config["model_type"], config["hidden_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    tensors: dict[str, Float32Array] = {}

    def linear(name: str, rows: int, columns: int, *, with_bias: bool = False, scale: float = 1.0) -> None:
        deviation = spread * scale / np.sqrt(columns)
        tensors[name + ".weight"] = rng.normal(0, deviation, (rows, columns)).astype(np.float32)
        if with_bias:
            tensors[name + ".bias"] = rng.normal(0, 0.5, rows).astype(np.float32)

    def norm(name: str, size: int, scale: float = 1.0) -> None:
        tensors[name + ".weight"] = (scale * rng.uniform(0.6, 1.4, size)).astype(np.float32)

    tensors["model.embed_tokens.weight"] = rng.normal(0, 1, (vocab, hidden)).astype(np.float32)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        norm(layer + "input_layernorm", hidden)
        norm(layer + "post_attention_layernorm", hidden)
        for part, rows, scale in (("q", q, 1.5), ("k", kv, 1.5), ("v", kv, 1.0)):
            linear(layer + f"self_attn.{part}_proj", rows, hidden, with_bias=bias, scale=scale)
        linear(layer + "self_attn.o_proj", hidden, q, with_bias=bias and family != "qwen2")
        if family == "qwen3":
            norm(layer + "self_attn.q_norm", dim, spread)
            norm(layer + "self_attn.k_norm", dim, spread)
        mlp_bias = config.get("mlp_bias", False)
        linear(layer + "mlp.gate_proj", config["intermediate_size"], hidden, with_bias=mlp_bias)
        linear(layer + "mlp.up_proj", config["intermediate_size"], hidden, with_bias=mlp_bias)
        linear(layer + "mlp.down_proj", hidden, config["intermediate_size"], with_bias=mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden)
    return tensors


def _write_safetensors(path: Path, tensors: dict[str, Float32Array], dtype: str) -> None:
    numpy_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    stored = {name: value.astype(numpy_dtype) for name, value in tensors.items()}
    save_file(stored, str(path), {"format": "pt"})


def _write_tokenizer(path: Path, vocab: int, eos: int | list[int] | None) -> None:
    tokenizer = byte_level_tokenizer(vocab) if vocab >= 256 else word_level_tokenizer(vocab)
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE if vocab >= 258 else WORD_CHAT_TEMPLATE,
    }
    if eos is not None:
        first = eos if isinstance(eos, int) else eos[0]
        config["eos_token"] = tokenizer.id_to_token(first)
    _write_json(path / "tokenizer_config.json", config)


def word_level_tokenizer(vocab: int) -> Tokenizer:
    """Words "t0", "t1", ..; an unknown word becomes t0."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def byte_level_tokenizer(vocab: int) -> Tokenizer:
    """256 bytes, then two chat marks (256, 257), then merges of two small letters as far as they go.

    A model's larger vocabulary is padding, as in many published checkpoints.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [(a, b) for a in letters for b in letters][: max(vocab - 258, 0)]
    ids = {character: i for i, character in enumerate(alphabet)}
    marks = ["<|im_start|>", "<|im_end|>"] if vocab >= 258 else []
    ids |= {mark: 256 + i for i, mark in enumerate(marks)}
    ids |= {a + b: 258 + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
