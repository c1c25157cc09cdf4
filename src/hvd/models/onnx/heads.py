"""Attention heads widened to what ONNX Runtime's attention operator takes: multiples of 16.

A head of D features becomes one of W >= D, with zeros where nothing was: each half of the head (rotary embedding turns
feature j of the first half with feature j of the second) is followed by (W - D) / 2 of them. Zeros add nothing to a
product of query and key, nor to the output, so the model stays the same.
"""

from __future__ import annotations

import math

import numpy as np

from hvd.types import Float32Array

MULTIPLE = 16


def wide(head_dim: int) -> int:
    """Features of a head as the operator takes it."""
    return -(-head_dim // MULTIPLE) * MULTIPLE


def widen(name: str, tensor: Float32Array, head_dim: int) -> Float32Array:
    """A tensor of an attention layer, by its Hugging Face name, for widened heads; any other comes back as it is.

    Norms over a head (Qwen3) take the mean over W features instead of D: their gain is scaled to make up for that
    (`wide_epsilon` does the rest).
    """
    *_, layer, kind = name.split(".")
    if wide(head_dim) == head_dim:
        return tensor
    if layer in ("q_norm", "k_norm"):
        return _pad(tensor * np.float32(math.sqrt(head_dim / wide(head_dim))), 0, head_dim)
    if layer in ("q_proj", "k_proj", "v_proj"):
        return _pad(tensor, 0, head_dim)
    if layer == "o_proj" and kind == "weight":
        return _pad(tensor, 1, head_dim)
    return tensor


def wide_epsilon(epsilon: float, head_dim: int) -> float:
    """The epsilon of a norm over widened heads: mean over W plus this equals D / W times (mean over D plus epsilon)."""
    return epsilon * head_dim / wide(head_dim)


def _pad(tensor: Float32Array, axis: int, head_dim: int) -> Float32Array:
    """Pad every half head along `axis`."""
    halves = np.moveaxis(tensor, axis, -1)
    shape = halves.shape[:-1]
    halves = halves.reshape(*shape, -1, head_dim // 2)
    room = (wide(head_dim) - head_dim) // 2
    padded = np.pad(halves, [(0, 0)] * (halves.ndim - 1) + [(0, room)]).reshape(*shape, -1)
    return np.ascontiguousarray(np.moveaxis(padded, -1, axis))
