"""The ONNX Runtime backend against transformers, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hvd.errors import ConfigError, MissingExtraError
from hvd.models.loader import load_target
from hvd.models.onnx.linear import PACKED
from hvd.models.onnx.target import MAX_WIDTH, OnnxTarget, chains
from hvd.models.target import Span
from hvd.models.torch_target import TorchTarget
from hvd.types import Int32Array
from test_torch_target import OPTIONS

Tiny = Callable[..., Path]
TEXT = np.random.default_rng(7).integers(0, 64, 90).astype(np.int32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_CACHE", str(tmp_path / "cache"))


def open_tiny(path: Path, weights: str = "fp32", **options: Any) -> OnnxTarget:
    target, _ = load_target(path, weights=weights, **{"threads": 1, **options})
    assert isinstance(target, OnnxTarget)
    return target


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_and_hidden_states_equal_those_of_transformers(name: str, tiny_model: Tiny) -> None:
    family, options = OPTIONS[name]
    path = tiny_model(family, **options)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(torch.from_numpy(TEXT[None].astype(np.int64)), output_hidden_states=True)
    target = open_tiny(path)
    [output] = target.forward([Span(target.open(), TEXT, hidden=True)])
    logits = wanted.logits[0].numpy()
    assert np.abs(output.logits - logits).max() <= 1e-3 * np.abs(logits).max()
    hidden = np.concatenate([wanted.hidden_states[i][0].numpy() for i in target.spec.aux_layers], axis=-1)
    assert output.hidden is not None
    assert np.abs(output.hidden - hidden).max() <= 1e-3 * np.abs(hidden).max()


def test_quantized_models_come_closer_the_more_bits_they_have(tiny_model: Tiny) -> None:
    path = tiny_model("llama", hidden=64, head_dim=16, spread=0.7)
    logits = {}
    for weights in ("fp32", "int8", "int4"):
        target = open_tiny(path, weights)
        [output] = target.forward([Span(target.open(), TEXT)])
        logits[weights] = output.logits.copy()
    scale = np.abs(logits["fp32"]).max()
    errors = {weights: np.abs(logits[weights] - logits["fp32"]).max() / scale for weights in ("int8", "int4")}
    assert 0 < errors["int8"] < errors["int4"] < 0.5
    assert errors["int8"] < 0.05


def test_rows_and_hidden_states_are_those_asked_for(tiny_model: Tiny) -> None:
    target = open_tiny(tiny_model("llama"))
    cache = target.open()
    [every] = target.forward([Span(cache, TEXT, hidden=True)])
    logits, hidden = every.logits.copy(), every.hidden
    assert logits.shape == (90, 64)
    assert hidden is not None
    assert hidden.shape == (90, 32 * len(target.spec.aux_layers))
    cache.rollback(0)
    [last] = target.forward([Span(cache, TEXT, rows="last")])
    assert last.hidden is None
    assert np.array_equal(last.logits, logits[-1:])
    cache.rollback(0)
    [none] = target.forward([Span(cache, TEXT, rows="none")])
    assert none.logits.shape == (0, 64)


def test_other_layers_need_no_other_conversion(tiny_model: Tiny) -> None:
    path = tiny_model("qwen2", layers=5)
    target = open_tiny(path, aux_layers=(0, 1, 4))
    torch_target = TorchTarget(target_checkpoint(path), aux_layers=(0, 1, 4), threads=1)
    [output] = target.forward([Span(target.open(), TEXT, hidden=True)])
    [wanted] = torch_target.forward([Span(torch_target.open(), TEXT, hidden=True)])
    assert output.hidden is not None
    assert wanted.hidden is not None
    assert np.allclose(output.hidden, wanted.hidden, rtol=1e-3, atol=1e-3)


def target_checkpoint(path: Path) -> Any:
    from hvd.models.checkpoint import load_checkpoint

    return load_checkpoint(path)


def test_a_long_prompt_is_computed_in_pieces(tiny_model: Tiny) -> None:
    target = open_tiny(tiny_model("llama", context=1024))
    text = np.random.default_rng(1).integers(0, 64, 2 * MAX_WIDTH + 9).astype(np.int32)
    cache, other = target.open(), target.open()
    [whole] = target.forward([Span(cache, text, hidden=True)])
    logits, hidden = whole.logits.copy(), whole.hidden
    pieces = []
    for start in range(0, len(text), 100):
        [piece] = target.forward([Span(other, text[start : start + 100], hidden=True)])
        other.keep(range(len(piece.logits)))
        pieces.append((piece.logits.copy(), piece.hidden))
    assert np.array_equal(logits, np.concatenate([logits for logits, _ in pieces]))
    assert hidden is not None
    assert np.array_equal(hidden, np.concatenate([hidden for _, hidden in pieces if hidden is not None]))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "at least one token"), ([3, 64], "got 64"), ([-1], "got -1"), ([1] * 65, "context limit of 64")],
)
def test_what_can_not_be_computed_is_refused_and_changes_nothing(
    tokens: list[int], message: str, tiny_model: Tiny
) -> None:
    target = open_tiny(tiny_model("llama", context=64))
    cache = target.open()
    with pytest.raises(ValueError, match=message):
        target.forward([Span(cache, np.array(tokens, np.int32))])
    assert (cache.length, cache.pending) == (0, 0)


def test_the_context_is_used_to_its_last_position(tiny_model: Tiny) -> None:
    target = open_tiny(tiny_model("llama", context=40))
    cache = target.open()
    [whole] = target.forward([Span(cache, TEXT[:40])])
    wanted = whole.logits.copy()
    cache.rollback(0)
    target.forward([Span(cache, TEXT[:39])])
    cache.keep(range(39))
    [last] = target.forward([Span(cache, TEXT[39:40])])
    assert np.array_equal(last.logits, wanted[39:])


def test_a_cache_is_used_once_a_pass_settled_open_and_of_this_backend(tiny_model: Tiny) -> None:
    path = tiny_model("llama")
    target = open_tiny(path)
    cache = target.open()
    with pytest.raises(ValueError, match="only once"):
        target.forward([Span(cache, TEXT[:2]), Span(cache, TEXT[:2])])
    target.forward([Span(cache, TEXT[:2])])
    with pytest.raises(ValueError, match="pending"):
        target.forward([Span(cache, TEXT[:2])])
    cache.close()
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        target.forward([Span(cache, TEXT[:2])])
    foreign = TorchTarget(target_checkpoint(path), threads=1).open()
    with pytest.raises(TypeError, match="TorchKVCache"):
        target.forward([Span(foreign, TEXT[:2])])


def test_the_spec_names_the_model(tiny_model: Tiny) -> None:
    path = tiny_model("qwen3")
    spec = open_tiny(path, "int4").spec
    assert (spec.family, spec.backend, spec.weights) == ("qwen3", "onnx", "int4")
    assert (spec.min_width, spec.shared_passes) == (1 if PACKED else 2, True)
    assert open_tiny(path, "fp32").spec.min_width == 2
    assert spec.fingerprint == target_checkpoint(path).fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "weights"),
        ({"backend": "jax"}, "backend"),
        ({"backend": "onnx", "device": "cuda"}, "device"),
        ({"threads": 0}, "threads"),
        ({"aux_layers": (2, 1)}, "aux_layers"),
        ({"aux_layers": (3,)}, "aux_layers"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str, tiny_model: Tiny) -> None:
    with pytest.raises(ConfigError, match=message):
        load_target(tiny_model("llama"), **{"weights": "fp32", **options})


def test_the_torch_backend_is_found_too(tiny_model: Tiny) -> None:
    target, tokenizer = load_target(tiny_model("llama"), backend="torch", weights="float64", device="cpu", threads=1)
    assert (target.spec.backend, target.spec.weights) == ("torch", "float64")
    assert tokenizer.encode("t3 t5") == [3, 5]


WITHOUT = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Forbid())
import numpy as np
from hvd.models.loader import load_target
from hvd.models.target import Span
target, tokenizer = load_target({path!r}, threads=1, **{options!r})
cache = target.open()
ids = np.array(tokenizer.encode("t1 t2 t3"), np.int32)
for _ in range(5):
    [output] = target.forward([Span(cache, ids, rows="last")])
    cache.keep(range(len(ids)))
    ids = output.logits.argmax(axis=1).astype(np.int32)
print(sorted({forbidden!r} & {{name.split(".")[0] for name in sys.modules}}))
"""


def run_without(forbidden: set[str], path: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(forbidden=forbidden, path=str(path), options=options)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_decoding_needs_neither_torch_nor_transformers(tiny_model: Tiny) -> None:
    first = run_without({"torch", "transformers"}, tiny_model("llama"), weights="int4")
    assert (first.returncode, first.stdout) == (0, "[]\n"), first.stderr


def test_a_converted_model_starts_without_what_conversion_needs(tiny_model: Tiny) -> None:
    path = tiny_model("llama")
    open_tiny(path, "int4")
    again = run_without({"torch", "transformers", "onnx"}, path, weights="int4")
    assert (again.returncode, again.stdout) == (0, "[]\n"), again.stderr


def test_without_torch_the_error_names_the_extra(tiny_model: Tiny) -> None:
    done = run_without({"torch"}, tiny_model("llama"), backend="torch")
    assert done.returncode == 1
    assert MissingExtraError.__name__ in done.stderr
    assert "hvd[torch]" in done.stderr


def test_chains_cover_a_tree_depth_first_with_ancestors_in_place() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        count = int(rng.integers(1, 20))
        parents: Int32Array = np.array([rng.integers(-1, node) if node else -1 for node in range(count)], np.int32)
        found = chains(parents)
        assert sorted(np.concatenate(found).tolist()) == list(range(count))
        places: dict[int, int] = {}  # depth -> node computed there last
        for chain in found:
            for node in chain.tolist():
                depth, ancestor = 0, int(parents[node])
                path = []
                while ancestor != -1:
                    path.append(ancestor)
                    ancestor = int(parents[ancestor])
                    depth += 1
                assert [places[d] for d in range(depth)] == path[::-1]
                places[depth] = node
