"""Rotary position embedding: frequencies and angles of every kind that we decode. NumPy only, float64.

Each kind is computed as transformers does (`modeling_rope_utils.py`), except where "dynamic" leaves the context
it was trained at. There transformers takes the frequencies from the length of the whole sequence, so that they
depend on how the text is cut into passes, and a cached key no longer fits a later query. Here the frequencies of a
position are those of a sequence that ends with it: a function of the prefix alone, equal to transformers up to the
original context, and beyond it to transformers decoding token by token with a cache.
"""

from __future__ import annotations

import math

import numpy as np

from hvd.errors import UnsupportedModelError
from hvd.models.config import RopeConfig
from hvd.types import Float64Array, Int32Array, Int64Array

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def inverse_frequencies(rope: RopeConfig, head_dim: int, context_limit: int) -> tuple[Float64Array, float]:
    """Radians a position, and the factor on cos and sin (1 but for yarn).

    context_limit   stands in for `original_positions` where the checkpoint does not state them
    returns         float64 [head_dim / 2], factor. For "dynamic": those up to the original context

    Raises UnsupportedModelError for an unknown kind or parameters out of range.
    """
    _check(rope, head_dim, context_limit)
    original = rope.original_positions or context_limit
    plain = _plain(rope.theta, head_dim)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain, original), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, original), _yarn_attention_factor(rope)
    return plain, 1.0


def cos_sin(
    rope: RopeConfig, head_dim: int, context_limit: int, positions: Int32Array | Int64Array
) -> tuple[Float64Array, Float64Array]:
    """Cosines and sines of the angles at `positions`, times the attention factor.

    positions   int [n], any order, repeats allowed
    returns     two float64 [n, head_dim / 2]; column j turns the pair (j, j + head_dim / 2) of a head

    Raises UnsupportedModelError as `inverse_frequencies` does.
    """
    frequencies, factor = inverse_frequencies(rope, head_dim, context_limit)
    steps = np.asarray(positions, dtype=np.float64)[:, None]  # [n, 1]
    if rope.kind == "dynamic":
        frequencies = _dynamic(rope, head_dim, rope.original_positions or context_limit, steps)  # [n, head_dim / 2]
    angles = steps * frequencies
    return np.cos(angles) * factor, np.sin(angles) * factor


def _check(rope: RopeConfig, head_dim: int, context_limit: int) -> None:
    if rope.kind not in KINDS:
        known = ", ".join(KINDS)
        raise UnsupportedModelError(f"rope scaling {rope.kind!r} is not supported; supported are {known}")
    _require(head_dim >= 2 and head_dim % 2 == 0, "head_dim", "even and at least 2", head_dim)
    _require(math.isfinite(rope.theta) and rope.theta > 1, "theta", "finite and above 1", rope.theta)
    if rope.kind == "default":
        return
    _require(math.isfinite(rope.factor) and rope.factor > 0, "factor", "finite and above 0", rope.factor)
    original = rope.original_positions or context_limit
    _require(original > 0, "original_positions", "above 0", original)
    if rope.kind == "dynamic":
        _require(head_dim > 2, "head_dim", "above 2 for dynamic scaling", head_dim)
        _require(rope.factor >= 1, "factor", "at least 1 for dynamic scaling", rope.factor)
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        _require(0 < low < high, "low_freq_factor", "above 0 and below high_freq_factor", (low, high))
    if rope.kind == "yarn":
        slow, fast = rope.beta_slow, rope.beta_fast
        _require(0 < slow <= fast, "beta_slow", "above 0 and at most beta_fast", (slow, fast))


def _require(good: bool, name: str, allowed: str, value: object) -> None:
    if not good:
        raise UnsupportedModelError(f"rope {name} must be {allowed}, got {value!r}")


def _plain(theta: float, head_dim: int) -> Float64Array:
    """theta^(-2j / head_dim) for j = 0 .. head_dim/2 - 1 (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, original: int, positions: Float64Array) -> Float64Array:
    """NTK-aware frequencies, the base grown to a sequence that ends at each position. [n, head_dim / 2]."""
    length = np.maximum(positions + 1, original)
    growth = (rope.factor * length / original - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return np.asarray((rope.theta * growth) ** -exponents)


def _llama3(rope: RopeConfig, plain: Float64Array, original: int) -> Float64Array:
    """Llama 3.1: long waves slowed by `factor`, short ones kept, those between blended."""
    turns = original * plain / (2 * math.pi)  # full turns over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return np.asarray(kept * plain + (1 - kept) * plain / rope.factor)


def _yarn(rope: RopeConfig, plain: Float64Array, original: int) -> Float64Array:
    """YaRN (arXiv 2309.00071, section 3.2): the same idea, blended along the index of the frequency."""
    head_dim = 2 * len(plain)

    def index(turns: float) -> float:
        """Index at which a wave makes so many turns over the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(len(plain), dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return np.asarray(slowed * plain / rope.factor + (1 - slowed) * plain)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """The stated factor, else the paper's 0.1 ln(s) + 1, weighted by mscale as DeepSeek's checkpoints do."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
