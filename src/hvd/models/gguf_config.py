"""Metadata of a GGUF file -> ModelConfig. Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvd.errors import CheckpointError
from hvd.models.config import ModelConfig, RopeConfig
from hvd.models.gguf_file import GGUFFile
from hvd.models.hf_config import MOST_POSITIONS, read_number, refuse
from hvd.types import Float32Array

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's GGUF files say "llama"
ROPE_FACTORS = "rope_freqs.weight"
_NEUTRAL_KEYS = {"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0}


class _Keys:
    """Metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number a layer
        if isinstance(value, list):
            refuse(f"{self._prefix}.{key} that differs between layers is")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise CheckpointError(
                f"{self._file.path}: {self._prefix}.{key} must be a whole number from {least} to {most}, got {value!r}"
            )
        return value

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A positive (or `zero`), finite number."""
        try:
            return read_number({key: self.get(key)}, key, default, zero=zero)
        except CheckpointError as error:
            raise CheckpointError(
                str(error).replace("config.json:", f"{self._file.path}: {self._prefix}", 1)
            ) from error


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Translate the metadata. UnsupportedModelError for other kinds of model, CheckpointError for faulty metadata."""
    architecture = str(file.metadata.get("general.architecture"))
    keys = _Keys(file, architecture)
    _refuse_other_kinds(file, architecture, keys)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{file.path}: {heads} attention heads are not a multiple of {kv_heads} key/value heads")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{file.path}: heads must have an even number of features, got {head_dim}")
    if (value_dim := keys.integer("attention.value_length", head_dim)) != head_dim:
        refuse(f"heads with keys of {head_dim} and values of {value_dim} are")
    if (rotary := keys.integer("rope.dimension_count", head_dim)) != head_dim:
        refuse(f"a partial rotary embedding ({rotary} of {head_dim}) is")
    return ModelConfig(
        family=architecture,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=_shortest(keys.number("attention.layer_norm_rms_epsilon")),
        context_limit=keys.integer("context_length", most=MOST_POSITIONS),
        rope=_rope(file, keys, head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        tied="output.weight" not in file.tensors,
    )


def _refuse_other_kinds(file: GGUFFile, architecture: str, keys: _Keys) -> None:
    if keys.integer("expert_count", 0, least=0) or "moe" in architecture:
        refuse(f"{file.path} is a mixture of experts (architecture '{architecture}'), which is")
    if keys.get("ssm.state_size") or "mamba" in architecture or "rwkv" in architecture:
        refuse(f"{file.path} is a state-space or hybrid model (architecture '{architecture}'), which is")
    if architecture not in ARCHITECTURES:
        refuse(f"{file.path} has architecture '{architecture}', which is")
    window = keys.integer("attention.sliding_window", 0, least=0)
    if window and window < keys.integer("context_length"):
        refuse(f"{file.path} has a sliding window of {window} positions, which is")


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding; the number of tokens may be smaller, and the key is optional."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{file.path} has no tensor token_embd.weight (model.embed_tokens.weight); is it a vocabulary only?"
        )
    return embedding.shape[0]


def _shortest(value: float) -> float:
    """The decimal fraction that was written as float32: 1e-5, not 9.99999974e-6."""
    return float(str(np.float32(value)))


def _rope(file: GGUFFile, keys: _Keys, head_dim: int) -> RopeConfig:
    theta = _shortest(keys.number("rope.freq_base", 10000.0))
    linear = keys.number("rope.scale_linear", 1.0, zero=True)
    factor = _shortest(keys.number("rope.scaling.factor", linear, zero=True)) or 1.0  # 0 stands for none, too
    kind = keys.get(
        "rope.scaling.type", "linear" if keys.get("rope.scale_linear") else "none"
    )  # old files have scale_linear alone
    if kind not in ("none", "linear", "yarn"):
        refuse(f"rope scaling '{kind}' (only none, linear and yarn are) is")
    for key, neutral in _NEUTRAL_KEYS.items():
        if keys.number(key, neutral, zero=True) != neutral:
            refuse(f"{key} = {keys.get(key)} in {file.path} is")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            refuse(f"{ROPE_FACTORS} together with rope scaling '{kind}' is")
        if file.tensors[ROPE_FACTORS].kind != "F32":
            raise CheckpointError(
                f"{file.path}: tensor {ROPE_FACTORS} must be F32, not {file.tensors[ROPE_FACTORS].kind}"
            )
        return _llama3(theta, file.tensors[ROPE_FACTORS].data.reshape(-1).view(np.float32), head_dim)
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta)
    original = (
        keys.integer("rope.scaling.original_context_length", keys.integer("context_length")) if kind == "yarn" else 0
    )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_positions=original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, zero=True) or 32.0,
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, zero=True) or 1.0,
    )


def _llama3(theta: float, divisors: Float32Array, head_dim: int) -> RopeConfig:
    """Recover llama3 scaling from what its converter left: a divisor for each frequency, float32 [head_dim / 2].

    A frequency of x rotations a position is divided by 1 (fast ones), by `factor` (slow ones), or in between by
    1 / ((1 - s) / factor + s) with s = (original * x - low) / (high - low). So s is a straight line in x, which gives
    `original` and `high` for low = 1 (only their ratios matter). The result is checked against all divisors.
    """
    rotations = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    if len(divisors) != len(rotations):
        raise CheckpointError(
            f"{ROPE_FACTORS} has {len(divisors)} numbers, a head of {head_dim} needs {len(rotations)}"
        )
    if not np.isfinite(divisors).all() or divisors.min() <= 0:
        raise CheckpointError(f"{ROPE_FACTORS} must hold positive, finite numbers")
    factor = float(divisors.max())
    if factor == 1.0 and divisors.min() == 1.0:
        return RopeConfig(theta=theta)
    between = (divisors > 1.0) & (divisors < factor)
    if between.sum() >= 2:
        s = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(rotations[between], s, 1)
        high = 1 - 1 / offset if offset else math.inf
        original = slope * (high - 1)
        fits = 1.0 < high < 1e6 and 1.0 <= original < MOST_POSITIONS
        rope = RopeConfig(theta, "llama3", factor, round(original) if fits else 0, 1.0, round(high, 4))
        if fits and np.allclose(llama3_divisors(rope, rotations), divisors, rtol=1e-3):
            return rope
    refuse(f"{ROPE_FACTORS} that is not Llama 3's rope scaling (or of too few frequencies to tell) is")


def llama3_divisors(
    rope: RopeConfig, rotations: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """By what llama3 scaling divides frequencies of so many rotations a position."""
    smooth = (rope.original_positions * rotations - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1 / ((1 - smooth) / rope.factor + smooth)
