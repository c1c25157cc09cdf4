"""The torch backend against transformers, and against itself cut into passes in every way."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hvd.errors import ConfigError
from hvd.models.checkpoint import load_checkpoint
from hvd.models.target import KVCache, Span
from hvd.models.torch_target import TorchTarget
from hvd.types import Float32Array, Int32Array

Tiny = Callable[..., Path]
RNG = np.random.default_rng(7)
TEXT = RNG.integers(0, 64, 90).astype(np.int32)

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-all-biases": ("llama", {"qkv_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"kv_heads": 4}),
    "llama-mqa": ("llama", {"kv_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-narrow-heads": ("llama", {"head_dim": 4}),
    "llama-half-weights": ("llama", {"dtype": "bfloat16"}),
    "mistral": ("mistral", {}),
    "mistral-wide-heads": ("mistral", {"head_dim": 16, "tied": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tied": True, "kv_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 16, "tied": True}),
    "qwen3-biases": ("qwen3", {"qkv_bias": True}),
    "linear": ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": (
        "llama",
        {
            "rope": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn": ("qwen3", {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "dynamic": ("llama", {"rope": {"rope_type": "dynamic", "factor": 2.0}}),
    "new-form-theta": ("qwen2", {"rope": {"rope_type": "default", "rope_theta": 500000.0}}),
}


def target(path: Path, dtype: str = "float64", **options: Any) -> TorchTarget:
    return TorchTarget(load_checkpoint(path), dtype=dtype, **{"threads": 1, **options})


def one_shot(model: TorchTarget, tokens: Int32Array) -> tuple[Float32Array, Float32Array]:
    """Logits and hidden states of a whole text in one pass."""
    cache = model.open()
    [output] = model.forward([Span(cache, tokens, hidden=True)])
    assert output.hidden is not None
    return output.logits, output.hidden


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_those_of_transformers(name: str, tiny_model: Tiny) -> None:
    family, options = OPTIONS[name]
    path = tiny_model(family, **options)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        output = reference(torch.from_numpy(TEXT[None].astype(np.int64)), output_hidden_states=True)
    model = target(path, "float32")
    logits, hidden = one_shot(model, TEXT)
    expected = output.logits[0].numpy()
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
    states = np.concatenate([output.hidden_states[i][0].numpy() for i in model.spec.aux_layers], axis=-1)
    assert np.abs(hidden - states).max() <= 1e-4 * np.abs(states).max()


def test_float64_is_close_to_float32_but_finer(tiny_family: Path) -> None:
    fine, _ = one_shot(target(tiny_family, "float64"), TEXT)
    coarse, _ = one_shot(target(tiny_family, "float32"), TEXT)
    assert fine.dtype == np.float64
    assert 0 < np.abs(fine - coarse).max() < 1e-3 * np.abs(fine).max()


@pytest.mark.parametrize(("dtype", "weights"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_half_precision_gives_float32_logits_near_the_reference(dtype: str, weights: str, tiny_model: Tiny) -> None:
    path = tiny_model("llama", spread=1.0)
    model = target(path, dtype)
    logits, hidden = one_shot(model, TEXT)
    expected, _ = one_shot(target(path), TEXT)
    assert (logits.dtype, hidden.dtype, model.spec.weights) == (np.float32, np.float32, weights)
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.1 * np.sqrt(np.mean(expected**2))


def feed(model: TorchTarget, cache: KVCache, tokens: Int32Array, cuts: list[int]) -> Float32Array:
    """Logits of a text cut into passes before the given places."""
    rows = []
    for piece in np.split(tokens, cuts):
        [output] = model.forward([Span(cache, piece)])
        cache.keep(range(len(piece)))
        rows.append(output.logits)
    return np.concatenate(rows)


@pytest.mark.parametrize("cuts", [[1], [89], [7, 30, 31, 64], list(range(1, 90))], ids=["1", "89", "uneven", "single"])
def test_chunks_equal_one_pass(cuts: list[int], tiny_family: Path) -> None:
    model = target(tiny_family)
    expected, _ = one_shot(model, TEXT)
    np.testing.assert_allclose(feed(model, model.open(), TEXT, cuts), expected, atol=1e-9)


def test_the_cache_grows_without_losing_a_position(tiny_model: Tiny) -> None:
    model = target(tiny_model("llama", context=700))
    text = RNG.integers(0, 64, 700).astype(np.int32)
    expected, _ = one_shot(model, text)
    np.testing.assert_allclose(feed(model, model.open(), text, [250, 300, 511, 513]), expected, atol=1e-9)


def random_tree(size: int, rng: np.random.Generator) -> tuple[Int32Array, Int32Array]:
    tokens = rng.integers(0, 64, size).astype(np.int32)
    parents = np.array([-1] + [rng.integers(0, i) for i in range(1, size)], dtype=np.int32)
    return tokens, parents


def ancestry(parents: Int32Array, node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


@pytest.mark.parametrize("seed", range(4))
def test_every_node_of_a_tree_equals_the_chain_of_its_ancestors(seed: int, tiny_family: Path) -> None:
    model = target(tiny_family)
    tokens, parents = random_tree(17, np.random.default_rng(seed))
    cache = model.open()
    feed(model, cache, TEXT[:20], [])
    [output] = model.forward([Span(cache, tokens, parents, hidden=True)])
    assert output.hidden is not None
    for node in range(len(tokens)):
        path = ancestry(parents, node)
        logits, hidden = one_shot(model, np.concatenate([TEXT[:20], tokens[path]]))
        np.testing.assert_allclose(output.logits[node], logits[-1], atol=1e-9)
        np.testing.assert_allclose(output.hidden[node], hidden[-1], rtol=1e-6, atol=1e-6)


def test_several_roots_stand_side_by_side_behind_the_committed_text(tiny_model: Tiny) -> None:
    model = target(tiny_model())
    cache = model.open()
    feed(model, cache, TEXT[:5], [])
    [output] = model.forward([Span(cache, TEXT[5:8], np.array([-1, -1, -1], np.int32))])
    for i in range(3):
        logits, _ = one_shot(model, np.append(TEXT[:5], TEXT[5 + i]))
        np.testing.assert_allclose(output.logits[i], logits[-1], atol=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_a_kept_path_continues_like_the_chain(seed: int, tiny_family: Path) -> None:
    model, rng = target(tiny_family), np.random.default_rng(seed)
    cache, text = model.open(), TEXT[:9]
    feed(model, cache, text, [])
    for _ in range(5):
        tokens, parents = random_tree(12, rng)
        path = ancestry(parents, int(rng.integers(0, 12)))
        model.forward([Span(cache, tokens, parents)])
        cache.keep(path)
        text = np.concatenate([text, tokens[path]])
    [output] = model.forward([Span(cache, TEXT[:4])])
    expected, _ = one_shot(model, np.concatenate([text, TEXT[:4]]))
    assert cache.length == len(text)
    np.testing.assert_allclose(output.logits, expected[-4:], atol=1e-9)


def test_rollback_and_dropped_drafts_leave_no_trace(tiny_family: Path) -> None:
    model = target(tiny_family)
    cache = model.open()
    feed(model, cache, TEXT[:40], [11])
    model.forward([Span(cache, TEXT[50:60])])
    cache.keep(())
    cache.rollback(25)
    got = feed(model, cache, TEXT[25:60], [3])
    expected, _ = one_shot(model, TEXT[:60])
    np.testing.assert_allclose(got, expected[25:], atol=1e-9)


def test_a_mixed_batch_equals_each_request_alone(tiny_family: Path) -> None:
    model = target(tiny_family)
    tree, parents = random_tree(9, np.random.default_rng(3))
    lengths = [0, 13, 30, 5, 0]
    caches = [model.open() for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        if length:
            feed(model, cache, TEXT[:length], [])
    outputs = model.forward(
        [
            Span(caches[0], TEXT[:33], rows="last"),
            Span(caches[1], TEXT[13:14], hidden=True),
            Span(caches[2], tree, parents, hidden=True),
            Span(caches[3], TEXT[5:12]),
            Span(caches[4], TEXT[:8], rows="none"),
        ]
    )
    logits, hidden = one_shot(model, TEXT)
    assert [output.logits.shape[0] for output in outputs] == [1, 1, 9, 7, 0]
    assert [output.hidden is None for output in outputs] == [True, False, False, True, True]
    np.testing.assert_allclose(outputs[0].logits, logits[32:33], atol=1e-9)
    np.testing.assert_allclose(outputs[1].logits, logits[13:14], atol=1e-9)
    np.testing.assert_allclose(outputs[1].hidden, hidden[13:14], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(outputs[3].logits, logits[5:12], atol=1e-9)
    alone, states = one_shot(model, np.concatenate([TEXT[:30], tree[ancestry(parents, 8)]]))
    np.testing.assert_allclose(outputs[2].logits[8], alone[-1], atol=1e-9)
    np.testing.assert_allclose(outputs[2].hidden[8], states[-1], rtol=1e-6, atol=1e-6)
    for cache, tokens in zip(caches, (33, 1, 9, 7, 8), strict=True):
        assert cache.pending == tokens


def test_hidden_states_of_a_text_do_not_depend_on_the_chunk(tiny_family: Path) -> None:
    model = target(tiny_family, aux_layers=(0, 2))
    _, expected = one_shot(model, TEXT)
    got = model.hidden_states(TEXT, chunk=32)
    assert got.shape == (90, 2 * 32)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    embedding = load_checkpoint(tiny_family).tensor("model.embed_tokens.weight")
    np.testing.assert_allclose(got[:, :32], embedding[TEXT], rtol=1e-6)
    assert model.hidden_states(TEXT[:0]).shape == (0, 64)


def test_dynamic_scaling_beyond_the_original_context_depends_on_the_prefix_alone(tiny_model: Tiny) -> None:
    checkpoint = load_checkpoint(tiny_model("llama", rope={"rope_type": "dynamic", "factor": 2.0}))
    rope = dataclasses.replace(checkpoint.config.rope, original_positions=32)
    checkpoint.config = dataclasses.replace(checkpoint.config, rope=rope)
    model = TorchTarget(checkpoint, dtype="float64")
    expected, _ = one_shot(model, TEXT)
    np.testing.assert_allclose(feed(model, model.open(), TEXT, [20, 33, 60]), expected, atol=1e-9)


def test_greedy_text_of_the_tiny_models_has_variety_and_clear_gaps(tiny_family: Path) -> None:
    """What every losslessness test on these models stands on (hard cases, M2)."""
    model = target(tiny_family)
    cache, token, text, gaps = model.open(), 1, [], []
    for _ in range(200):
        [output] = model.forward([Span(cache, np.array([token], np.int32))])
        cache.keep((0,))
        second, first = np.sort(output.logits[0])[-2:]
        gaps.append(first - second)
        token = int(output.logits[0].argmax())
        text.append(token)
    assert len(set(text)) >= 16
    assert len(set(text[-50:])) >= 5
    assert min(gaps) > 1e-6


def test_the_spec_names_the_model(tiny_family: Path) -> None:
    model = target(tiny_family, "float32")
    checkpoint = load_checkpoint(tiny_family)
    assert model.spec.fingerprint == checkpoint.fingerprint
    assert model.spec.family == checkpoint.config.family == tiny_family.name
    assert (model.spec.backend, model.spec.weights, model.spec.min_width) == ("torch", "fp32", 1)
    assert model.spec.aux_layers == (0, 1, 2)
    assert model.spec.context_limit == 512


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], None, "at least one token"),
        ([64], None, r"token ids must be in \[0, 64\), got 64"),
        ([3, -1], None, r"token ids must be in \[0, 64\), got -1"),
        ([0] * 33, None, "33 tokens behind 0 pass the context limit of 32 positions"),
        ([1, 2], [-1], "one entry a token"),
        ([1, 2], [-1, 1], "an earlier token"),
        ([1, 2], [-2, 0], "an earlier token"),
    ],
)
def test_what_can_not_be_computed_is_refused_and_changes_nothing(
    tokens: list[int], parents: list[int] | None, message: str, tiny_model: Tiny
) -> None:
    model = target(tiny_model(context=32))
    good, bad = model.open(), model.open()
    tree = None if parents is None else np.array(parents, np.int32)
    with pytest.raises(ValueError, match=message):
        model.forward([Span(good, TEXT[:3]), Span(bad, np.array(tokens, np.int32), tree)])
    assert (good.length, good.pending, bad.length, bad.pending) == (0, 0, 0, 0)


def test_a_cache_is_used_once_a_pass_settled_and_open(tiny_model: Tiny) -> None:
    model = target(tiny_model(context=32))
    cache = model.open()
    with pytest.raises(ValueError, match="only once in a pass"):
        model.forward([Span(cache, TEXT[:1]), Span(cache, TEXT[:1])])
    model.forward([Span(cache, TEXT[:2])])
    with pytest.raises(ValueError, match="2 positions are pending"):
        model.forward([Span(cache, TEXT[:1])])
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        model.forward([Span(cache, TEXT[:1])])


def test_the_context_is_used_to_its_last_position(tiny_model: Tiny) -> None:
    model = target(tiny_model(context=32))
    cache = model.open()
    feed(model, cache, TEXT[:31], [])
    with pytest.raises(ValueError, match="2 tokens behind 31 pass the context limit of 32"):
        model.forward([Span(cache, TEXT[:2])])
    feed(model, cache, TEXT[31:32], [])
    assert cache.length == 32


def test_nothing_to_do_is_no_error(tiny_model: Tiny) -> None:
    assert target(tiny_model()).forward([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype must be one of float64, float32"),
        ({"device": "abacus"}, "device must be 'cpu', 'cuda'"),
        ({"device": "meta"}, "device must be 'cpu', 'cuda'"),
        ({"device": "cuda:99"}, "is not there: torch sees"),
        ({"aux_layers": (1, 0)}, r"must ascend within \[0, 3\)"),
        ({"aux_layers": (3,)}, r"must ascend within \[0, 3\)"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str, tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match=message):
        target(tiny_model(), **{"dtype": "float32", **options})


def test_without_torch_the_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["torch"] = None
from hvd.errors import MissingExtraError
try:
    import hvd.models.torch_target
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(
        "the torch backend needs the extra 'torch'; install it with: pip install 'hvd[torch]'"
    )


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_cuda_equals_the_cpu_within_its_precision(dtype: str, tiny_model: Tiny) -> None:
    path = tiny_model("qwen3", spread=1.0)
    tree, parents = random_tree(9, np.random.default_rng(3))
    rows = []
    for device in ("cpu", "cuda"):
        model = target(path, dtype, device=device)
        cache = model.open()
        feed(model, cache, TEXT[:30], [8])
        [output] = model.forward([Span(cache, tree, parents, hidden=True)])
        rows.append(output.logits)
    tolerance = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.2, "float16": 0.05}[dtype]
    assert np.abs(rows[0] - rows[1]).max() <= tolerance * np.abs(rows[0]).max()


REAL_TEXT = """def moving_average(values, window):
    \"\"\"Mean of every `window` neighbouring values; shorter at the start.\"\"\"
    total, averages = 0.0, []
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        averages.append(total / min(i + 1, window))
    return averages

The harbour froze twice that winter. When the ice broke, in the second week of March, the ferries went out again with
a third of their crews, and the town heard from the islands for the first time in forty days: two births, one fire,
no deaths. "We had potatoes," wrote the teacher, "and each other, and by the end more of the one than of the other."
"""


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "qwen_coder"])
def test_real_models_equal_transformers_on_real_text(name: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(name)
    checkpoint = load_checkpoint(path)
    text = np.array(checkpoint.tokenizer().encode(REAL_TEXT), dtype=np.int32)
    logits, _ = one_shot(TorchTarget(checkpoint), text)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(text[None].astype(np.int64))).logits[0].numpy()
    assert len(text) > 150
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
