"""GGUF files: block formats, names and row order, configuration, refusals, torn files."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hvd.errors import CheckpointError, UnsupportedModelError
from hvd.models.checkpoint import expected_shapes, load_checkpoint
from hvd.models.gguf_checkpoint import dequantize, hugging_face_name, rotate_half_rows
from hvd.models.gguf_config import llama3_divisors, read_gguf_config
from hvd.models.gguf_file import TYPE_NAMES, GGUFFile
from hvd.models.gguf_tokenizer import read_eos_ids

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{TO_GGUF[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{TO_GGUF[part]}.{kind}"


def interleave(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """What llama.cpp's converter does to the rows of q and k, pair by pair."""
    dim = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = rows[head * dim + i]
            out[head * dim + 2 * i + 1] = rows[head * dim + dim // 2 + i]
    return out


def write(
    path: Path,
    tensors: dict[str, NDArray[Any]],
    *,
    architecture: str = "llama",
    kind: str = "F32",
    more: dict[str, Any] | None = None,
    extra: dict[str, NDArray[Any]] | None = None,
) -> Path:
    """A GGUF file of Hugging Face tensors, matrices in the format `kind`; `more` are keys under the architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (KEYS | (more or {})).items():
        if value is not None:
            full = f"{architecture}.{key}"
            add = {
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
                list: writer.add_array,
            }
            add[type(value)](full, value)
    for name, tensor in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleave(tensor, 4 if "q_proj" in name else 2)
        stored = GGMLQuantizationType[kind] if tensor.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quants.quantize(tensor, stored), raw_dtype=stored)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tensors(tiny_model: Callable[..., Path]) -> dict[str, NDArray[Any]]:
    return load_file(tiny_model("llama", layers=2) / "model.safetensors")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


class Block:
    """One block of each format by the formulae of ggml's dequantize_row_*, one float at a time."""

    def __init__(self, kind: str, data: bytes) -> None:
        self.data = data
        self.floats: list[float] = getattr(self, kind.lower())()

    def half(self, at: int) -> float:
        return float(struct.unpack_from("<e", self.data, at)[0])

    def f32(self) -> list[float]:
        return list(struct.unpack("<f", self.data))

    def f16(self) -> list[float]:
        return [self.half(0)]

    def bf16(self) -> list[float]:
        return list(struct.unpack("<f", b"\0\0" + self.data))

    def nibbles(self, at: int) -> list[int]:
        return [byte & 15 for byte in self.data[at : at + 16]] + [byte >> 4 for byte in self.data[at : at + 16]]

    def fifth_bits(self, at: int) -> list[int]:
        (bits,) = struct.unpack_from("<I", self.data, at)
        return [(bits >> i) & 1 for i in range(32)]

    def q4_0(self) -> list[float]:
        return [self.half(0) * (q - 8) for q in self.nibbles(2)]

    def q4_1(self) -> list[float]:
        return [self.half(0) * q + self.half(2) for q in self.nibbles(4)]

    def q5_0(self) -> list[float]:
        pairs = zip(self.nibbles(6), self.fifth_bits(2), strict=True)
        return [self.half(0) * ((q | high << 4) - 16) for q, high in pairs]

    def q5_1(self) -> list[float]:
        pairs = zip(self.nibbles(8), self.fifth_bits(4), strict=True)
        return [self.half(0) * (q | high << 4) + self.half(2) for q, high in pairs]

    def q8_0(self) -> list[float]:
        return [self.half(0) * q for q in struct.unpack_from("<32b", self.data, 2)]

    def scale_and_min(self, group: int) -> tuple[int, int]:
        """Eight 6-bit scales and eight 6-bit minima in twelve bytes from byte 4 on."""
        packed = self.data[4:16]
        if group < 4:
            return packed[group] & 63, packed[group + 4] & 63
        low, high = packed[group + 4], packed[group - 4]
        return (low & 15) | (high >> 6) << 4, (low >> 4) | (packed[group] >> 6) << 4

    def q4_k(self) -> list[float]:
        out = []
        for group in range(8):
            scale, minimum = self.scale_and_min(group)
            for byte in self.data[16 + 32 * (group // 2) :][:32]:
                q = byte >> 4 if group % 2 else byte & 15
                out.append(self.half(0) * scale * q - self.half(2) * minimum)
        return out

    def q5_k(self) -> list[float]:
        out = []
        for group in range(8):
            scale, minimum = self.scale_and_min(group)
            for i, byte in enumerate(self.data[48 + 32 * (group // 2) :][:32]):
                q = (byte >> 4 if group % 2 else byte & 15) | ((self.data[16 + i] >> group) & 1) << 4
                out.append(self.half(0) * scale * q - self.half(2) * minimum)
        return out

    def q6_k(self) -> list[float]:
        out = []
        scales = struct.unpack_from("<16b", self.data, 192)
        for i in range(256):
            half, quarter, lane = i // 128, i % 128 // 32, i % 32
            low = self.data[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter // 2)) & 15
            high = self.data[128 + 32 * half + lane] >> (2 * quarter) & 3
            out.append(self.half(208) * scales[i // 16] * ((low | high << 4) - 32))
        return out


BLOCK_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
BLOCK_BYTES |= {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", TYPE_NAMES)
def test_block_formats_by_hand(kind: str) -> None:
    rng, size = np.random.default_rng(0), BLOCK_BYTES[kind]
    rows = rng.integers(0, 256, (6, 3 * size), np.uint8)
    if kind in ("F32", "BF16"):
        rows = rng.normal(size=(6, 3 * size // 4 * 2)).astype(np.float32).view(np.uint8)[:, : 6 * size]
    else:
        for at in HALVES.get(kind, (0,)):  # finite scales
            for block in range(3):
                rows[:, block * size + at : block * size + at + 2] = (
                    rng.normal(size=(6, 1)).astype(np.float16).view(np.uint8)
                )
    blocks = [row.tobytes()[at : at + size] for row in rows for at in range(0, rows.shape[1], size)]
    by_hand = np.array([Block(kind, block).floats for block in blocks]).reshape(6, -1)
    found = dequantize(kind, rows)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, by_hand, rtol=1e-6, atol=1e-6)


class TestTensors:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    def test_equal_to_the_checkpoint_it_was_made_of(
        self, family: str, path: Path, tiny_model: Callable[..., Path]
    ) -> None:
        original = tiny_model(family, layers=2)
        tensors = load_file(original / "model.safetensors")
        dim = load_checkpoint(original).config.head_dim
        more = {"attention.key_length": dim, "attention.value_length": dim}
        checkpoint = load_checkpoint(write(path, tensors, architecture=family, more=more))
        assert checkpoint.config == load_checkpoint(original).config
        assert checkpoint.names() == list(expected_shapes(checkpoint.config))
        assert set(checkpoint.names()) == set(tensors)
        for name, values in tensors.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), values)
            assert checkpoint.tensor(name).dtype == np.float32
            assert checkpoint.quantized(name) is None

    def test_biases_are_in_the_same_order_as_their_rows(self, path: Path, tiny_model: Callable[..., Path]) -> None:
        original = tiny_model("llama", layers=2, qkv_bias=True, mlp_bias=True)
        tensors = load_file(original / "model.safetensors")
        checkpoint = load_checkpoint(write(path, tensors))
        assert checkpoint.config == load_checkpoint(original).config
        for name, values in tensors.items():
            np.testing.assert_array_equal(checkpoint.tensor(name), values)

    @pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
    def test_quantized_matrices(self, kind: str, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        checkpoint = load_checkpoint(write(path, tensors, kind=kind))
        tolerance = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.02}.get(kind, 0.3)
        for name, values in tensors.items():
            tensor, raw = checkpoint.tensor(name), checkpoint.quantized(name)
            np.testing.assert_allclose(tensor, values, atol=tolerance * np.abs(values).max())
            if values.ndim == 1 or "F16" in kind:
                assert raw is None
                continue
            assert raw is not None
            assert (raw.kind, raw.shape) == (kind, values.shape)
            assert raw.data.shape == (len(values), values.shape[1] // 32, BLOCK_BYTES[kind])
            np.testing.assert_array_equal(dequantize(kind, raw.data.reshape(len(values), -1)), tensor)

    def test_tied(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        del tensors["lm_head.weight"]
        checkpoint = load_checkpoint(write(path, tensors))
        assert checkpoint.config.tied
        assert "lm_head.weight" not in checkpoint.names()

    def test_rows_of_pairs(self) -> None:
        """Hugging Face's row 1 of a head of 8 is the second pair's first half, GGUF's row 2."""
        assert rotate_half_rows(2, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
        rows = np.arange(24)
        np.testing.assert_array_equal(interleave(rows, 3)[rotate_half_rows(3, 8)], rows)

    def test_unknown_name(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        checkpoint = load_checkpoint(write(path, tensors))
        for read in (checkpoint.tensor, checkpoint.quantized):
            with pytest.raises(CheckpointError, match="no tensor blk"):
                read("blk.0.attn_q.weight")

    def test_each_missing_tensor_is_named(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        for name in set(tensors) - {"lm_head.weight"}:
            write(path, {other: values for other, values in tensors.items() if other != name})
            with pytest.raises(CheckpointError) as error:
                load_checkpoint(path)
            assert name in str(error.value)

    def test_extra_and_misshaped_tensors_are_named(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        tensors["model.norm.weight"] = np.ones(64, np.float32)
        write(path, tensors, extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(path)
        assert "blk.0.attn_sinks.weight" in str(error.value)
        assert "model.norm.weight is (64,) instead of (32,)" in str(error.value)

    def test_names(self) -> None:
        assert hugging_face_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
        assert hugging_face_name("output.weight") == "lm_head.weight"
        assert hugging_face_name("blk.0.unknown.weight") == "blk.0.unknown.weight"

    def test_fingerprint(self, path: Path, tmp_path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        one = load_checkpoint(write(path, tensors)).fingerprint
        assert load_checkpoint(write(tmp_path / "other.gguf", tensors)).fingerprint == one
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
        assert load_checkpoint(write(path, tensors)).fingerprint != one
        assert load_checkpoint(write(path, tensors, kind="F16")).fingerprint != one


class TestConfig:
    def read(self, path: Path, tensors: dict[str, NDArray[Any]], **options: Any) -> Any:
        return read_gguf_config(GGUFFile(write(path, tensors, **options)))

    def test_defaults(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        config = self.read(path, tensors, more={"attention.head_count_kv": None, "rope.freq_base": None})
        assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10000.0)
        assert (config.family, config.vocab_size, config.tied, config.norm_eps) == ("llama", 64, False, 1e-5)

    def test_one_number_a_layer(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        assert self.read(path, tensors, more={"attention.head_count_kv": [2, 2]}).num_kv_heads == 2
        with pytest.raises(UnsupportedModelError, match="differs between layers"):
            self.read(path, tensors, more={"attention.head_count_kv": [2, 1]})

    @pytest.mark.parametrize(
        ("more", "kind", "factor", "original"),
        [
            ({"rope.scaling.type": "none"}, "default", 1.0, 0),
            ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear", 4.0, 0),
            ({"rope.scale_linear": 2.5}, "linear", 2.5, 0),
            (
                {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 4.0,
                    "rope.scaling.original_context_length": 128,
                },
                "yarn",
                4.0,
                128,
            ),
            ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn", 4.0, 512),
        ],
    )
    def test_rope_scaling(
        self,
        more: dict[str, Any],
        kind: str,
        factor: float,
        original: int,
        path: Path,
        tensors: dict[str, NDArray[Any]],
    ) -> None:
        rope = self.read(path, tensors, more=more).rope
        assert (rope.kind, rope.factor, rope.original_positions) == (kind, factor, original)

    @pytest.mark.parametrize(
        ("theta", "dim", "factor", "low", "high", "original"),
        [
            (500000.0, 128, 8.0, 1.0, 4.0, 8192),  # Llama 3.1 8B
            (500000.0, 64, 32.0, 1.0, 4.0, 8192),  # Llama 3.2 1B
            (10000.0, 64, 4.0, 2.0, 6.0, 2048),
        ],
    )
    def test_llama3_scaling_is_recovered(
        self,
        theta: float,
        dim: int,
        factor: float,
        low: float,
        high: float,
        original: int,
        path: Path,
        tensors: dict[str, NDArray[Any]],
    ) -> None:
        """The divisors are written down as llama.cpp's converter computes them."""
        divisors = []
        for i in range(0, dim, 2):
            wavelength = 2 * math.pi * theta ** (i / dim)
            smooth = (original / wavelength - low) / (high - low)
            between = 1 / ((1 - smooth) / factor + smooth)
            divisors.append(1.0 if wavelength < original / high else factor if wavelength > original / low else between)
        more = {"attention.key_length": dim, "attention.value_length": dim, "rope.freq_base": theta}
        rope = self.read(path, tensors, more=more, extra={"rope_freqs.weight": np.array(divisors, np.float32)}).rope
        assert (rope.kind, rope.factor) == ("llama3", factor)
        if low == 1.0:
            assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_positions) == (
                low,
                high,
                original,
            )
        rotations = theta ** (-np.arange(0, dim, 2) / dim) / (2 * math.pi)
        np.testing.assert_allclose(llama3_divisors(rope, rotations), divisors, rtol=1e-4)

    def test_neutral_rope_factors(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        checkpoint = load_checkpoint(write(path, tensors, extra={"rope_freqs.weight": np.ones(4, np.float32)}))
        assert checkpoint.config.rope.kind == "default"
        assert "rope_freqs.weight" not in checkpoint.names()

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"architecture": "gemma2"}, "architecture 'gemma2'"),
            ({"architecture": "qwen3moe"}, "mixture of experts"),
            ({"architecture": "mamba"}, "state-space"),
            ({"more": {"expert_count": 8}}, "mixture of experts"),
            ({"more": {"attention.sliding_window": 128}}, "sliding window of 128"),
            ({"more": {"rope.dimension_count": 4}}, r"partial rotary embedding \(4 of 8\)"),
            (
                {"more": {"attention.key_length": 8, "attention.value_length": 16}},
                "keys of 8 and values of 16",
            ),
            ({"more": {"rope.scaling.type": "longrope"}}, "'longrope'"),
            ({"more": {"rope.scaling.attn_factor": 1.5}}, r"attn_factor = 1\.5"),
            (
                {"extra": {"rope_freqs.weight": np.array([1, 2, 9, 3], np.float32)}},
                "not Llama 3's rope scaling",
            ),
        ],
    )
    def test_refused_by_name_with_what_is_supported(
        self, options: dict[str, Any], named: str, path: Path, tensors: dict[str, NDArray[Any]]
    ) -> None:
        with pytest.raises(UnsupportedModelError, match=named + ".*Llama, Mistral, Qwen2 and Qwen3"):
            self.read(path, tensors, **options)

    @pytest.mark.parametrize(
        ("more", "named"),
        [
            ({"embedding_length": None}, "embedding_length"),
            ({"attention.head_count": 0}, "head_count"),
            ({"attention.head_count_kv": 3}, "4 attention heads"),
            ({"attention.layer_norm_rms_epsilon": None}, "rms_epsilon"),
            ({"block_count": "2"}, "block_count"),
        ],
    )
    def test_faults_are_named(
        self, more: dict[str, Any], named: str, path: Path, tensors: dict[str, NDArray[Any]]
    ) -> None:
        with pytest.raises(CheckpointError, match=named):
            self.read(path, tensors, more=more)

    def test_vocabulary_only(self, path: Path) -> None:
        with pytest.raises(CheckpointError, match="token_embd"):
            self.read(path, {})


class TestFile:
    def test_other_number_formats_are_refused(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("a", np.zeros((1, 84), np.uint8), raw_dtype=GGMLQuantizationType.Q2_K)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(UnsupportedModelError, match=r"Q2_K; read are F32.*Q6_K"):
            GGUFFile(path)

    def test_metadata_of_every_type(self, path: Path) -> None:
        values = {"uint8": 3, "int8": -3, "uint16": 300, "int16": -300, "uint32": 70000, "int32": -70000}
        values |= {
            "uint64": 2**40,
            "int64": -(2**40),
            "float32": 0.5,
            "float64": 0.1,
            "bool": True,
            "string": "é",
        }
        values["array"] = ["a", ""]
        writer = gguf.GGUFWriter(path, "llama")
        for kind, value in values.items():
            getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        writer.add_array("x.numbers", [1, 2, 3])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        read = GGUFFile(path).metadata
        assert {kind: read[f"x.{kind}"] for kind in values} == values
        assert read["x.numbers"] == [1, 2, 3]

    def test_truncated_anywhere(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        content = write(path, tensors, more={"note": ["a", "b"], "numbers": [1, 2]}).read_bytes()
        for length in [*range(0, 900, 13), *range(900, len(content), len(content) // 40), len(content) - 33]:
            path.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=r"model\.gguf"):
                load_checkpoint(path)

    def test_garbled_anywhere(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        """Any byte of the header overwritten: either it still fits, or the error is one of ours."""
        content = bytearray(write(path, tensors, more={"note": ["a", "b"]}).read_bytes())
        refused = 0
        for at in range(0, 900, 3):
            path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
            try:
                load_checkpoint(path)
            except (CheckpointError, UnsupportedModelError):
                refused += 1
        assert refused > 100

    @pytest.mark.parametrize("content", [b"", b"GGUF"])
    def test_empty(self, content: bytes, path: Path) -> None:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            load_checkpoint(path)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            *(("split.count", value) for value in ("x", 1.5, True, [1, 2])),
            *(("general.alignment", value) for value in ("x", 1.5, True, [1, 2], 0)),
            *(("tokenizer.ggml.tokens", value) for value in ("x", 5, [1, 2])),
            *(("tokenizer.ggml.token_type", value) for value in ("x", 5, ["a"], [1.5])),
        ],
    )
    def test_values_of_other_kinds(self, key: str, value: Any, path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        add: dict[type, Any] = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        (add | {bool: writer.add_bool, list: writer.add_array})[type(value)](key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=key.removeprefix("general.")):
            read_eos_ids(GGUFFile(path).metadata)

    @pytest.mark.parametrize("shape", [(0,), (0, 32), (32, 0)])
    def test_a_tensor_of_nothing(self, shape: tuple[int, ...], path: Path) -> None:
        entry = (
            struct.pack("<Q1sI", 1, b"t", len(shape))
            + struct.pack(f"<{len(shape)}Q", *shape)
            + struct.pack("<IQ", 0, 0)
        )
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + b"\0" * 64)
        with pytest.raises(CheckpointError, match="tensor t of shape"):
            GGUFFile(path)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
    def test_numbers_out_of_range(self, key: str, value: float, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        with pytest.raises(CheckpointError, match=rf"model\.gguf: llama {key} must be a positive, finite number"):
            load_checkpoint(write(path, tensors, more={key: value}))

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0, -1])
    def test_rotary_divisors_out_of_range(self, value: float, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        divisors = np.array([1, 2, value, 3], np.float32)
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must hold positive"):
            load_checkpoint(write(path, tensors, extra={"rope_freqs.weight": divisors}))

    @pytest.mark.parametrize(("version", "named"), [(1, "version 1"), (3 << 24, "big-endian")])
    def test_other_versions(self, version: int, named: str, path: Path) -> None:
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(UnsupportedModelError, match=named):
            GGUFFile(path)

    def test_pieces(self, path: Path, tensors: dict[str, NDArray[Any]]) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.count", 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(UnsupportedModelError, match="one of 2 pieces"):
            GGUFFile(path)


@pytest.mark.model
class TestRealModels:
    def test_smollm2_is_what_others_read(self, smollm2: Path) -> None:
        """The gguf package finds and dequantizes the tensors, transformers puts the rows of q and k in order."""
        from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

        checkpoint = load_checkpoint(smollm2)
        order = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
        theirs = gguf.GGUFReader(smollm2).tensors
        assert {hugging_face_name(tensor.name) for tensor in theirs} == set(checkpoint.names())
        for tensor in theirs[1:13]:
            values = order.process(quants.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
            np.testing.assert_array_equal(
                checkpoint.tensor(hugging_face_name(tensor.name)), values, err_msg=tensor.name
            )

    def test_qwen_coder(self, qwen_coder: Path) -> None:
        checkpoint = load_checkpoint(qwen_coder)
        config = checkpoint.config
        assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == (
            "qwen2",
            24,
            896,
            151936,
        )
        assert (config.qkv_bias, config.o_bias, config.qk_norm, config.tied) == (True, False, False, False)
        assert checkpoint.name == "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M"
        assert checkpoint.tokenizer().vocab_size == 151665
