"""Rotary frequencies against transformers and against formulas written anew."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hvd.errors import UnsupportedModelError
from hvd.models.config import RopeConfig
from hvd.models.rope import cos_sin, inverse_frequencies

CONTEXT = 4096
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-tuned": {
        "factor": 32.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn-factor": {"factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.25},
}


def ours(kind: str, theta: float, scaling: dict[str, float]) -> RopeConfig:
    known = {("original_positions" if k.startswith("original") else k): v for k, v in scaling.items()}
    return RopeConfig(theta=theta, kind=kind, **known)


def theirs(kind: str, theta: float, scaling: dict[str, float], head_dim: int) -> LlamaConfig:
    parameters = {"rope_type": kind, "rope_theta": theta, **scaling}
    return LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_frequencies_equal_those_of_transformers(name: str, theta: float, head_dim: int) -> None:
    kind = name.split("-")[0]
    expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs(kind, theta, SCALINGS[name], head_dim))
    got, got_factor = inverse_frequencies(ours(kind, theta, SCALINGS[name]), head_dim, CONTEXT)
    assert got.dtype == np.float64
    assert got.shape == (head_dim // 2,)
    np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6)
    assert got_factor == pytest.approx(factor, rel=1e-12)


def test_default_equals_that_of_transformers() -> None:
    config = theirs("default", 10_000.0, {}, 64)
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    got, factor = inverse_frequencies(RopeConfig(), 64, CONTEXT)
    np.testing.assert_allclose(got, expected.numpy(), rtol=2e-6)
    assert factor == 1.0


def independent_angle(rope: RopeConfig, head_dim: int, j: int, position: int) -> float:
    """Angle of pair j, written from the papers, one number at a time (hard case K4-07)."""
    plain = math.exp(-2 * j / head_dim * math.log(rope.theta))
    if rope.kind == "linear":
        return position / rope.factor * plain
    if rope.kind == "llama3":
        wave, old = 2 * math.pi / plain, rope.original_positions
        if wave < old / rope.high_freq_factor:
            return position * plain
        if wave > old / rope.low_freq_factor:
            return position * plain / rope.factor
        smooth = (old / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        return position * ((1 - smooth) * plain / rope.factor + smooth * plain)
    if rope.kind == "yarn":

        def where(turns: float) -> float:
            return head_dim / 2 * math.log(rope.original_positions / (2 * math.pi * turns), rope.theta)

        low, high = max(math.floor(where(32)), 0), min(math.ceil(where(1)), head_dim - 1)
        ramp = min(max((j - low) / (high - low), 0.0), 1.0)
        return position * ((1 - ramp) * plain + ramp * plain / rope.factor)
    return position * plain


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_k4_07_angles_match_an_independent_formula(kind: str, theta: float) -> None:
    head_dim, positions = 64, np.array([0, 100, 4000])
    rope = RopeConfig(theta=theta, kind=kind, factor=8.0, original_positions=2048)
    factor = 0.1 * math.log(8.0) + 1.0 if kind == "yarn" else 1.0
    angles = np.array([[independent_angle(rope, head_dim, j, p) for j in range(32)] for p in positions])
    cos, sin = cos_sin(rope, head_dim, 16384, positions)
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=1e-9)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=1e-9)


def test_k4_07_missing_original_positions_mean_the_context_limit() -> None:
    rope = RopeConfig(kind="yarn", factor=4.0)
    stated = dataclasses.replace(rope, original_positions=CONTEXT)
    np.testing.assert_array_equal(
        inverse_frequencies(rope, 64, CONTEXT)[0], inverse_frequencies(stated, 64, CONTEXT)[0]
    )


def test_dynamic_is_plain_within_the_original_context() -> None:
    positions = np.arange(64)
    dynamic = cos_sin(RopeConfig(kind="dynamic", factor=4.0, original_positions=64), 16, 256, positions)
    plain = cos_sin(RopeConfig(), 16, 256, positions)
    np.testing.assert_allclose(dynamic, plain, atol=1e-12)


def test_dynamic_beyond_it_depends_on_the_position_alone_and_equals_transformers_step_by_step() -> None:
    """transformers meets position p in a sequence of p + 1 when it decodes token by token."""
    import torch

    config = theirs("dynamic", 10_000.0, {"factor": 4.0}, 16)
    config.max_position_embeddings = 64
    embedding = LlamaRotaryEmbedding(config)
    rope = RopeConfig(kind="dynamic", factor=4.0, original_positions=64)
    cos, sin = cos_sin(rope, 16, 256, np.arange(200))
    for position in range(200):
        their_cos, their_sin = embedding(torch.zeros(1, dtype=torch.float32), torch.tensor([[position]]))
        np.testing.assert_allclose(cos[position], their_cos[0, 0, :8].numpy(), atol=1e-4)
        np.testing.assert_allclose(sin[position], their_sin[0, 0, :8].numpy(), atol=1e-4)
        np.testing.assert_array_equal(cos_sin(rope, 16, 256, np.array([position]))[0][0], cos[position])


@pytest.mark.parametrize(
    ("rope", "head_dim", "message"),
    [
        (
            RopeConfig(kind="longrope"),
            64,
            "rope scaling 'longrope' is not supported; supported are default, linear",
        ),
        (RopeConfig(kind=""), 64, "rope scaling '' is not supported"),
        (RopeConfig(), 7, "head_dim must be even"),
        (RopeConfig(theta=float("nan")), 64, "theta must be finite"),
        (RopeConfig(theta=0.0), 64, "theta must be finite and above 1"),
        (RopeConfig(kind="linear", factor=0.0), 64, "factor must be finite and above 0"),
        (RopeConfig(kind="dynamic", factor=0.5), 64, "factor must be at least 1"),
        (RopeConfig(kind="dynamic", factor=2.0), 2, "head_dim must be above 2"),
        (RopeConfig(kind="llama3", low_freq_factor=4.0), 64, "low_freq_factor must be"),
        (RopeConfig(kind="yarn", beta_fast=0.5), 64, "beta_slow must be"),
        (RopeConfig(kind="yarn", original_positions=-1), 64, "original_positions must be above 0"),
    ],
)
def test_k4_07_unknown_or_out_of_range_is_refused(rope: RopeConfig, head_dim: int, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        cos_sin(rope, head_dim, CONTEXT, np.arange(4))
