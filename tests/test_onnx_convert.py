"""Conversion: block weights, what is carried over, and a cache in which nothing torn or foreign is ever used."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hvd.errors import CheckpointError, ConfigError, UnsupportedModelError
from hvd.models.checkpoint import Checkpoint, QuantizedTensor, load_checkpoint
from hvd.models.loader import load_target
from hvd.models.onnx import convert as onnx_convert
from hvd.models.onnx.cache import CONFIG_FILE, WEIGHTS_FILE, cache_root, directory_of, find
from hvd.models.onnx.convert import convert
from hvd.models.onnx.linear import PACKED
from hvd.models.onnx.weights import BLOCK, BlockWeight, carry_over, pack, quantize, unpack
from hvd.models.target import Span
from hvd.types import Float32Array

Tiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tiny_model: Tiny) -> Checkpoint:
    return load_checkpoint(tiny_model("qwen3"))


# -- block weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [2, 32, 33])
def test_packing_is_undone_by_unpacking(bits: int, count: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**bits, (3, count)).astype(np.uint8)
    assert np.array_equal(unpack(pack(values, bits), bits)[:, :count], values)


def nearest_in_range(weight: Float32Array, bits: int) -> Float32Array:
    """Textbook rounding: scale and zero point from the extremes of each block."""
    blocks = weight.reshape(-1, BLOCK)
    low, high = np.minimum(blocks.min(1, keepdims=True), 0), np.maximum(blocks.max(1, keepdims=True), 0)
    scale = (high - low) / (2**bits - 1)
    zero = np.rint(-low / scale)
    rounded = (np.clip(np.rint(blocks / scale) + zero, 0, 2**bits - 1) - zero) * scale
    return rounded.reshape(weight.shape).astype(np.float32)


@pytest.mark.parametrize("heavy_tails", [False, True])
def test_rounding_beats_the_textbook(heavy_tails: bool) -> None:
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((64, 256)) if not heavy_tails else rng.standard_t(4, (64, 256))
    weight = weight.astype(np.float32)
    rounded = quantize(weight, 4)
    error = np.square(rounded.dequantized() - weight).mean()
    assert error < 0.96 * np.square(nearest_in_range(weight, 4) - weight).mean()
    fine = np.square(quantize(weight, 8).dequantized() - weight).mean()
    assert fine < error / 100


def test_what_is_representable_stays_exactly_what_it_is() -> None:
    rng = np.random.default_rng(2)
    values = rng.integers(0, 16, (8, 3, BLOCK)).astype(np.uint8)
    values[..., 0], values[..., 1] = 0, 15
    weight = ((values.astype(np.float32) - 6) * np.float32(0.25)).reshape(8, -1)
    assert np.array_equal(quantize(weight, 4).dequantized(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_constants_and_odd_widths(bits: int) -> None:
    weight = np.zeros((3, 70), np.float32)
    weight[1], weight[2] = 0.75, -0.75
    rounded = quantize(weight, bits)
    assert rounded.blocks.shape == (3, 3, BLOCK * bits // 8)
    assert rounded.dequantized().shape == (3, 70)
    assert np.allclose(rounded.dequantized(), weight, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_these_blocks_of_gguf_carry_over_bit_for_bit(kind: str) -> None:
    weight = np.random.default_rng(3).standard_normal((5, 96)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(weight, type_)
    carried = carry_over(raw, kind, 5, 96)
    assert isinstance(carried, BlockWeight)
    assert carried.exact
    assert np.array_equal(carried.dequantized(), gguf.quants.dequantize(raw, type_))


def test_q4_k_carries_over_too() -> None:
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (3, 2, 144)).astype(np.uint8)
    raw[..., :4] = rng.uniform(0.001, 0.1, (3, 2, 2)).astype(np.float16).view(np.uint8)
    carried = carry_over(raw, "Q4_K", 3, 512)
    assert isinstance(carried, BlockWeight)
    expected = gguf.quants.dequantize(raw.reshape(3, -1), gguf.GGMLQuantizationType.Q4_K)
    assert np.array_equal(carried.dequantized(), expected)


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q6_K"])
def test_other_blocks_do_not(kind: str) -> None:
    assert carry_over(np.zeros((2, 64), np.uint8), kind, 2, 64) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_half_precision_takes_nothing_from_blocks_that_have_it(kind: str) -> None:
    weight = np.random.default_rng(5).standard_normal((5, 96)).astype(np.float32)
    raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    carried = carry_over(raw, kind, 5, 96)
    assert isinstance(carried, BlockWeight)
    assert np.allclose(carried.in_halves().dequantized(), carried.dequantized(), rtol=0, atol=1e-7)


def test_weights_beyond_half_precision_are_one_line() -> None:
    weight = quantize(np.full((2, 32), 1e7, np.float32), 4)
    with pytest.raises(CheckpointError, match="too large for 4 bits"):
        weight.in_halves()


# -- the cache --------------------------------------------------------------------------------------------------------


def test_a_conversion_describes_itself_and_is_made_once(checkpoint: Checkpoint) -> None:
    seen: list[tuple[str, int, int]] = []
    converted = convert(checkpoint, "int4", lambda *step: seen.append(step))
    assert converted.config == checkpoint.config
    assert converted.quantization == {"floats rounded to 8 bits": 2, "floats rounded to 4 bits": 21}
    assert [done for _, done, _ in seen] == list(range(checkpoint.config.num_layers + 3))
    assert {total for *_, total in seen} == {checkpoint.config.num_layers + 2}
    assert find(checkpoint.fingerprint, "int4") == converted
    assert find(checkpoint.fingerprint, "int8") is None
    again = convert(checkpoint, "int4", lambda *step: pytest.fail("converted twice"))
    assert again == converted
    assert [path.name for path in directory_of("", "").parent.iterdir()] == [converted.directory.name]


def test_the_cache_lies_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("HVD_CACHE")
    assert cache_root().name == "hvd"


def test_an_unknown_format_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="int4, int8, fp32, got 'int3'"):
        convert(checkpoint, "int3")


def test_a_start_with_a_converted_model_reads_no_weights(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("llama")
    first, _ = load_target(path, weights="int8", threads=1)
    checkpoint_class = type(load_checkpoint(path))
    for forbidden in ("tensor", "quantized"):
        monkeypatch.setattr(checkpoint_class, forbidden, lambda *_: pytest.fail("the original was opened"))
    again, _ = load_target(path, weights="int8", threads=1)
    assert again.spec == first.spec


def truncate(directory: Path) -> None:
    os.truncate(directory / WEIGHTS_FILE, 4096)


def forget_a_file(directory: Path) -> None:
    (directory / WEIGHTS_FILE).unlink()


def other_format(directory: Path) -> None:
    facts = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps({**facts, "format": -1}))


def other_model(directory: Path) -> None:
    facts = json.loads((directory / CONFIG_FILE).read_text())
    (directory / CONFIG_FILE).write_text(json.dumps({**facts, "fingerprint": "0" * 64}))


def half_a_config(directory: Path) -> None:
    text = (directory / CONFIG_FILE).read_text()
    (directory / CONFIG_FILE).write_text(text[: len(text) // 2])


def no_object(directory: Path) -> None:
    (directory / CONFIG_FILE).write_text("[1, 2]")


@pytest.mark.parametrize("damage", [truncate, forget_a_file, other_format, other_model, half_a_config, no_object])
def test_a_torn_or_foreign_directory_is_not_used_but_made_anew(
    damage: Callable[[Path], None], checkpoint: Checkpoint
) -> None:
    converted = convert(checkpoint, "int4")
    wanted = (converted.directory / WEIGHTS_FILE).read_bytes()
    damage(converted.directory)
    assert find(checkpoint.fingerprint, "int4") is None
    again = convert(checkpoint, "int4")
    assert again == converted
    assert (again.directory / WEIGHTS_FILE).read_bytes() == wanted


def test_an_error_in_the_middle_leaves_nothing(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint, "int4", stop)
    assert list(directory_of("", "").parent.iterdir()) == []
    assert find(checkpoint.fingerprint, "int4") is None


SLOW = """
import sys, time
from hvd.models.checkpoint import load_checkpoint
from hvd.models.onnx.convert import convert
def wait(what, done, total):
    if done == 3:
        print("middle", flush=True)
        time.sleep(60)
convert(load_checkpoint(sys.argv[1]), "int4", wait)
"""


def test_a_kill_in_the_middle_leaves_nothing_that_is_used(tiny_model: Tiny) -> None:
    path = tiny_model("qwen3")
    with subprocess.Popen([sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "middle\n"
        process.send_signal(signal.SIGKILL)
    checkpoint = load_checkpoint(path)
    assert find(checkpoint.fingerprint, "int4") is None
    assert not directory_of(checkpoint.fingerprint, "int4").exists()
    [left] = directory_of("", "").parent.iterdir()
    assert convert(checkpoint, "int4").weights == "int4"
    assert left.exists()
    os.utime(left, (0, 0))
    convert(checkpoint, "int8")
    assert not left.exists()


def _convert(path: Path, barrier: multiprocessing.synchronize.Barrier) -> None:
    checkpoint = load_checkpoint(path)
    barrier.wait()
    convert(checkpoint, "int4", lambda what, done, total: time.sleep(0.02))


def test_two_processes_at_once_both_succeed(tiny_model: Tiny) -> None:
    path = tiny_model("llama")
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=_convert, args=(path, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    checkpoint = load_checkpoint(path)
    assert find(checkpoint.fingerprint, "int4") is not None
    names = [path.name for path in directory_of("", "").parent.iterdir()]
    assert names == [directory_of(checkpoint.fingerprint, "int4").name]


def test_a_cache_that_can_not_be_written_is_named(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("HVD_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="set HVD_CACHE"):
        convert(checkpoint, "int4")


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_hidden_size_that_does_not_divide_into_blocks_is_refused(tiny_model: Tiny, weights: str) -> None:
    path = tiny_model("llama", hidden=48)
    with pytest.raises(UnsupportedModelError, match=f"hidden size of 48, {weights} needs a multiple of 32.*'fp32'"):
        load_target(path, weights=weights)
    assert not (cache_root() / "onnx").exists()
    assert load_target(path, weights="fp32", threads=1)[0].spec.hidden_size == 48


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("weights", ["int4", "int8", "fp32"])
def test_weights_that_are_not_finite_are_named(
    tiny_model: Tiny, tmp_path: Path, weights: str, name: str, value: float
) -> None:
    path = shutil.copytree(tiny_model("llama", layers=1), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[name].astype(np.float64)
    tensors[name].reshape(-1)[3] = value
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} of model holds NaN or infinite"):
        convert(load_checkpoint(path), weights)


def test_blocks_that_carry_over_must_be_finite(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.zeros((64, 1, 34), np.uint8)
    raw[5, 0, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    tensor = QuantizedTensor("Q8_0", (64, 32), raw)
    monkeypatch.setattr(checkpoint, "quantized", lambda name: tensor)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight .*NaN or infinite"):
        convert(checkpoint, "int8")


def test_a_graph_that_can_not_be_read_is_named(checkpoint: Checkpoint) -> None:
    from hvd.models.onnx.target import OnnxTarget

    converted = convert(checkpoint, "fp32")
    graph = converted.directory / "model.onnx"
    graph.write_bytes(b"x" * graph.stat().st_size)
    with pytest.raises(CheckpointError, match="can't open the converted model"):
        OnnxTarget(converted)


def test_gguf_blocks_reach_the_converted_model_unchanged(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = load_checkpoint(tiny_model("llama", hidden=64, head_dim=16))
    exact: dict[str, Float32Array] = {}

    def blocks(name: str) -> QuantizedTensor:
        tensor = checkpoint.tensor(name)
        raw = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
        exact[name] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        return QuantizedTensor("Q8_0", tensor.shape, raw.reshape(len(tensor), -1, 34))

    monkeypatch.setattr(checkpoint, "quantized", blocks)
    source = onnx_convert.Weights(checkpoint, "int8")
    weight = source.matrix("model.layers.0.mlp.up_proj.weight")
    assert isinstance(weight, BlockWeight)
    assert np.array_equal(weight.dequantized(), exact["model.layers.0.mlp.up_proj.weight"])
    assert source.fates == {"Q8_0 carried over": 1}


@pytest.mark.model
def test_smollm2_says_what_became_of_its_weights(smollm2: Path) -> None:
    checkpoint = load_checkpoint(smollm2)
    converted = convert(checkpoint, "int4")
    assert converted.quantization == {
        "Q8_0 carried over": 2,
        "Q4_1 carried over" if PACKED else "Q4_1 rounded to 4 bits": 210,
    }
    target, tokenizer = load_target(smollm2, weights="int4")
    ids = np.array(tokenizer.encode("The capital of France is"), np.int32)
    [output] = target.forward([Span(target.open(), ids, rows="last")])
    assert tokenizer.decode([int(output.logits[0].argmax())]).strip() == "Paris"
