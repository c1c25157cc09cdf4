"""The head's forward pass against the independent reference, for every layout and option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd.models.eagle3 import Eagle3Head, HeadOutput, NumpyHead, attention_bias
from hvd.models.eagle3_checkpoint import HeadWeights, load_eagle3
from hvd.models.onnx.eagle3 import OnnxHead
from hvd.models.onnx.eagle3 import write_head as write_converted
from hvd.models.target import TargetSpec
from reference_head import ReferenceHead
from tiny_head import LAYOUTS, TARGET, head_config, head_tensors, target_tensor, target_with, write_head

Case = tuple[HeadWeights, ReferenceHead]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}

# name: (options of head_tensors, options of head_config, options of the reference, changes of the target)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}, {}, {}),
    "norm_before_residual": ({}, {"norm_before_residual": True}, {"norm_before_residual": True}, {}),
    "norm_before_fc": ({"norm_before_fc": True}, {"norm_before_fc": True}, {"norm_before_fc": True}, {}),
    "fc_norm": ({"fc_norm": True}, {"fc_norm": True}, {"fc_norm": True}, {}),
    "norm_output": ({}, {"norm_output": True}, {"norm_output": True}, {}),
    "aux 1": ({"aux": 1}, {"eagle_aux_hidden_state_layer_ids": [6]}, {}, {}),
    "aux 2": ({"aux": 2}, {"eagle_aux_hidden_state_layer_ids": [2, 9]}, {}, {}),
    "aux 4": (
        {"aux": 4},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 6, 9]},
        {},
        {"aux_layers": (1, 2, 6, 9)},
    ),
    "full vocabulary": ({"vocab": 32}, {}, {}, {}),
    "one head": ({"heads": 1, "kv_heads": 1, "head_dim": 32}, {"heads": 1}, {"heads": 1}, {}),
    "no groups": ({"kv_heads": 4}, {}, {}, {}),
    "one kv head": ({"kv_heads": 1}, {"num_key_value_heads": 1}, {}, {}),
    "qk norm": ({"qk_norm": True}, {"model_type": "qwen3"}, {}, {}),
    "bias": ({"bias": True}, {"attention_bias": True}, {}, {}),
    "two layers": ({"layers": 2}, {}, {}, {}),
    "own embedding": ({"embedding": True}, {}, {}, {}),
    "narrower than the target": ({"hidden": 8, "embedding": True}, {"target_hidden_size": 16}, {}, {}),
    "theta": ({}, {"rope_theta": 500000.0}, {"theta": 500000.0}, {}),
    "theta, new key": ({}, {"rope_parameters": {"rope_theta": 500000.0}}, {"theta": 500000.0}, {}),
    "linear": ({}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"linear": 2.0}, {}),
    "llama3": (
        {},
        {"rope_theta": 1000.0, "rope_scaling": LLAMA3},
        {"theta": 1000.0, "llama3": {"factor": 4.0, "low": 1.0, "high": 4.0, "original": 16}},
        {},
    ),
}


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str, str], Case]:
    """A head on disk, loaded, and the reference with the same weights."""

    def make(option: str, layout: str = "safeailab") -> Case:
        tensor_options, config_options, reference_options, target_changes = OPTIONS[option]
        tensors = head_tensors(**tensor_options)
        config = head_config(tensors, layout, **config_options)
        target: TargetSpec = target_with(**target_changes)
        weights = load_eagle3(write_head(tmp_path / layout, tensors, config), target, target_tensor)
        embedding = tensors.get("embed_tokens.weight", target_tensor("model.embed_tokens.weight"))
        return weights, ReferenceHead(tensors, embedding, **reference_options)

    return make


def text_and_states(count: int, width: int) -> tuple[list[int], torch.Tensor]:
    rng = np.random.default_rng(count)
    text = rng.integers(0, TARGET.vocab_size, count).tolist()
    return text, torch.as_tensor(rng.normal(size=(count, width)).astype(np.float32))


def eat(head: Eagle3Head, text: list[int], states: torch.Tensor, chunk: int) -> tuple[Any, HeadOutput]:
    """Feed all pairs of the text, `chunk` at a time."""
    cache = head.open()
    tokens, features = np.asarray(text[1:], np.int32), states[:-1].numpy()
    for start in range(0, len(tokens), chunk):
        part = slice(start, start + chunk)
        output = head.forward(tokens[part], head.fuse(features[part]), cache)
        cache.length += len(tokens[part])
    return cache, output


def check(weights: HeadWeights, reference: ReferenceHead, head: Eagle3Head) -> None:
    """Catch-up in chunks, a chain behind it and the two levels of a small tree, all against the reference."""
    width = len(weights.spec.aux_layers) * weights.spec.target_hidden_size
    text, states = text_and_states(30, width)
    cache, output = eat(head, text, states, chunk=7)
    first = reference.behind(text, states, [])
    np.testing.assert_allclose(output.logits[0], first, atol=1e-4)
    path, features = [5, 9, 3], output.features[-1:]
    for depth in range(3):
        start = cache.length + depth
        output = head.forward(np.array(path[depth : depth + 1], np.int32), features, cache, start=start)
        features = output.features[-1:]
        np.testing.assert_allclose(output.logits[0], reference.behind(text, states, path[: depth + 1]), atol=1e-4)
    check_tree(reference, head, text, states)


def check_tree(reference: ReferenceHead, head: Eagle3Head, text: list[int], states: torch.Tensor) -> None:
    """Nodes a, b behind the text, then a-c, b-d, a-e in one level: each sees its ancestors and itself alone."""
    cache, output = eat(head, text, states, chunk=100)
    root = np.repeat(output.features[-1:], 2, axis=0)
    level = head.forward(np.array([4, 7], np.int32), root, cache, depth=0, mask=np.eye(2, dtype=bool), last=False)
    for row, path in enumerate(([4], [7])):
        np.testing.assert_allclose(level.logits[row], reference.behind(text, states, path), atol=1e-4)
    seen = np.array([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]], dtype=bool)
    features = level.features[[0, 1, 0]]
    start = cache.length + 2
    level = head.forward(np.array([1, 2, 3], np.int32), features, cache, start=start, depth=1, mask=seen, last=False)
    for row, path in enumerate(([4, 1], [7, 2], [4, 3])):
        np.testing.assert_allclose(level.logits[row], reference.behind(text, states, path), atol=1e-4)


@pytest.fixture(params=["numpy", "onnx"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[HeadWeights], Eagle3Head]:
    """Both ways to run a head, float32."""

    def onnx(weights: HeadWeights) -> Eagle3Head:
        write_converted(tmp_path / "converted", weights, "fp32")
        return OnnxHead(tmp_path / "converted", threads=1)

    return onnx if request.param == "onnx" else NumpyHead


@pytest.mark.parametrize("option", OPTIONS)
def test_option_equals_reference(case: Callable[..., Case], option: str, run: Callable[..., Eagle3Head]) -> None:
    layout = "speculators" if option in ("qk norm", "bias", "norm_before_fc") else "safeailab"
    weights, reference = case(option, layout)
    check(weights, reference, run(weights))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_reference(case: Callable[..., Case], layout: str) -> None:
    weights, reference = case("default", layout)
    check(weights, reference, NumpyHead(weights))
    assert weights.spec.aux_layers == (2, 6, 9)
    assert weights.target_ids.tolist() == [reference.token(entry) for entry in range(8)]


def test_cache_grows_and_keeps_what_it_holds(case: Callable[..., Case]) -> None:
    weights, reference = case("default")
    text, states = text_and_states(300, 48)
    cache, output = eat(NumpyHead(weights), text, states, chunk=64)
    assert cache.length == 299
    assert cache.capacity >= 299
    np.testing.assert_allclose(output.logits[0], reference.behind(text, states, []), atol=1e-4)


def test_scratch_does_not_reach_the_committed_pairs(case: Callable[..., Case]) -> None:
    """A long wrong draft, then more text: as if it had never been."""
    weights, reference = case("default")
    head = NumpyHead(weights)
    text, states = text_and_states(20, 48)
    cache, output = eat(head, text[:10], states[:10], chunk=100)
    for depth in range(8):
        output = head.forward(np.array([1], np.int32), output.features[-1:], cache, start=cache.length + depth)
    more = head.forward(np.asarray(text[10:], np.int32), head.fuse(states[9:19].numpy()), cache)
    np.testing.assert_allclose(more.logits[0], reference.behind(text, states, []), atol=1e-4)


def test_extreme_gate_values_do_not_warn(case: Callable[..., Case]) -> None:
    weights, _ = case("default")
    weights.tensors["layers.0.mlp.gate_proj.weight"] = np.full((24, 16), -1e3, np.float32)
    with np.errstate(all="raise", under="ignore"):
        text, states = text_and_states(4, 48)
        _, output = eat(NumpyHead(weights), text, states, chunk=100)
    assert np.isfinite(output.logits).all()


def test_attention_bias() -> None:
    no = -np.inf
    assert attention_bias(1, 5, 5, None) is None
    np.testing.assert_array_equal(attention_bias(2, 1, 1, None), [[0, 0, no], [0, 0, 0]])
    np.testing.assert_array_equal(attention_bias(1, 3, 2, np.array([[False, True]])), [[0, 0, no, 0]])
