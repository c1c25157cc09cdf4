"""Hugging Face directories and hub ids: configuration, tensors, refusals. transformers is the oracle."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from hvd.errors import CheckpointError, ModelError, UnsupportedModelError
from hvd.models import checkpoint as checkpoint_module
from hvd.models.checkpoint import load_checkpoint
from hvd.models.config import FAMILIES
from hvd.models.hf_config import read_hf_config
from hvd.models.safetensors_file import SafetensorsFile

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: list[dict[str, Any] | None] = [
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 4.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 64,
    },
    {"rope_theta": 5e5, "rope_type": "default"},
    {"rope_theta": 5e5} | LLAMA3,
]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(family: str, **options: Any) -> dict[str, Any]:
    window = {"sliding_window": None} if family == "mistral" else {}
    return {"model_type": family, **SHAPE, **window, **options}


def edit(path: Path, **options: Any) -> None:
    """Change config.json; the value `...` removes a key."""
    config = json.loads((path / "config.json").read_text()) | options
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.fixture
def model(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny model of one's own."""
    return Path(shutil.copytree(tiny_model("llama", vocab=16, layers=2), tmp_path / "model"))


class TestConfig:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("rope", ROPES, ids=str)
    def test_as_transformers_reads_it(
        self, family: str, rope: dict[str, Any] | None, tiny_model: Callable[..., Path]
    ) -> None:
        path = tiny_model(family, rope=rope, vocab=16, layers=1)
        config, theirs = load_checkpoint(path).config, AutoConfig.from_pretrained(path)
        self.same(config, theirs)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_defaults_are_those_of_transformers(self, family: str) -> None:
        small = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"} | {
            "num_attention_heads": 32
        }
        written = {"model_type": family, **small, "hidden_size": 128, "sliding_window": None}
        self.same(read_hf_config(written), AutoConfig.for_model(**written))

    def same(self, config: Any, theirs: Any) -> None:
        assert config.family == theirs.model_type
        assert (config.num_layers, config.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
        assert config.num_kv_heads == theirs.num_key_value_heads
        dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert (config.head_dim, config.norm_eps) == (dim, theirs.rms_norm_eps)
        assert (config.context_limit, config.tied) == (
            theirs.max_position_embeddings,
            theirs.tie_word_embeddings,
        )
        rope, parameters = config.rope, theirs.rope_parameters
        assert (rope.kind, rope.theta) == (parameters["rope_type"], parameters["rope_theta"])
        assert rope.factor == parameters.get("factor", 1.0)
        if rope.kind in ("llama3", "yarn"):
            assert rope.original_positions == parameters["original_max_position_embeddings"]
        if rope.kind == "dynamic":
            assert rope.original_positions == theirs.max_position_embeddings
        for name, default in {
            "attention_factor": None,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0,
            "mscale_all_dim": 0,
        }.items():
            assert getattr(rope, name) == parameters.get(name, default), name
        assert rope.truncate == parameters.get("truncate", True)

    @pytest.mark.parametrize(
        ("family", "options", "biases"),
        [
            ("llama", {}, (False, False, False)),
            ("llama", {"attention_bias": True}, (True, True, False)),
            ("llama", {"mlp_bias": True}, (False, False, True)),
            ("mistral", {"attention_bias": True, "mlp_bias": True}, (False, False, False)),
            ("qwen2", {}, (True, False, False)),
            ("qwen3", {"attention_bias": True}, (True, True, False)),
        ],
    )
    def test_biases(self, family: str, options: dict[str, Any], biases: tuple[bool, ...]) -> None:
        config = read_hf_config(config_of(family, **options))
        assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
        assert config.qk_norm == (family == "qwen3")

    @pytest.mark.parametrize(
        ("family", "options"),
        [
            ("mistral", {"sliding_window": None}),
            ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}),
            ("qwen2", {"use_sliding_window": False, "sliding_window": 100}),
            ("qwen3", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 100}),
            ("qwen3", {"layer_types": ["full_attention", "full_attention"]}),
            (
                "llama",
                {"hidden_act": "swish", "architectures": ["LlamaForCausalLM"], "partial_rotary_factor": 1.0},
            ),
        ],
    )
    def test_harmless_options(self, family: str, options: dict[str, Any]) -> None:
        assert read_hf_config(config_of(family, **options)).family == family

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"model_type": "mistral", "sliding_window": 4096}, "sliding window (4096 of"),
            ({"model_type": "mistral", "sliding_window": ...}, "sliding window (4096 of"),
            (
                {
                    "model_type": "qwen2",
                    "use_sliding_window": True,
                    "sliding_window": 64,
                    "max_window_layers": 1,
                },
                "sliding window",
            ),
            (
                {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
                "sliding_attention",
            ),
            ({"model_type": "mixtral", "num_local_experts": 8}, "'mixtral' is a mixture of experts"),
            ({"model_type": "qwen3_moe", "num_experts": 8}, "'qwen3_moe' is a mixture of experts"),
            ({"num_local_experts": 4}, "mixture of experts"),
            ({"model_type": "mamba", "state_size": 16}, "'mamba' is a state-space"),
            ({"model_type": "jamba", "mamba_d_state": 16}, "'jamba' is a state-space or hybrid"),
            (
                {"model_type": "llava", "text_config": {}, "vision_config": {}},
                "'llava' wraps several modalities",
            ),
            ({"vision_config": {}}, "multimodal"),
            ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
            ({"model_type": "gemma2"}, "'gemma2'"),
            ({"model_type": ...}, "without a model_type"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
            ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
            ({"hidden_act": "gelu"}, "'gelu'"),
            ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope'"),
            ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope'"),
            ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between layers"),
            ({"partial_rotary_factor": 0.5}, "partial rotary factor of 0.5"),
        ],
    )
    def test_refused_by_name_with_what_is_supported(self, options: dict[str, Any], named: str) -> None:
        config = {key: value for key, value in (config_of("llama") | options).items() if value is not ...}
        with pytest.raises(UnsupportedModelError) as error:
            read_hf_config(config)
        assert named in str(error.value)
        assert "Llama, Mistral, Qwen2 and Qwen3" in str(error.value)

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"hidden_size": ...}, "hidden_size"),
            ({"num_hidden_layers": "2"}, "num_hidden_layers"),
            ({"num_hidden_layers": -2}, "num_hidden_layers"),
            ({"num_key_value_heads": 3}, "num_key_value_heads"),
            ({"num_attention_heads": 0}, "num_attention_heads"),
            ({"rms_norm_eps": True}, "rms_norm_eps"),
            ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
            ({"rope_scaling": [2]}, "rope_scaling"),
        ],
    )
    def test_faults_are_named(self, options: dict[str, Any], named: str) -> None:
        config = {key: value for key, value in (config_of("llama") | options).items() if value is not ...}
        with pytest.raises(CheckpointError, match=named):
            read_hf_config(config)


class TestTensors:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_every_tensor_comes_as_float32(self, dtype: str, tiny_model: Callable[..., Path]) -> None:
        path = tiny_model("qwen3", vocab=16, dtype=dtype)
        stored, checkpoint = load_file(path / "model.safetensors"), load_checkpoint(path)
        assert set(checkpoint.names()) == set(stored)
        for name, values in stored.items():
            tensor = checkpoint.tensor(name)
            assert tensor.dtype == np.float32
            np.testing.assert_array_equal(tensor, values.astype(np.float32))
            assert checkpoint.quantized(name) is None

    def test_families(self, tiny_family: Path) -> None:
        checkpoint = load_checkpoint(tiny_family)
        assert set(checkpoint.names()) == set(load_file(tiny_family / "model.safetensors"))

    def test_shards(self, model: Path) -> None:
        whole = load_checkpoint(model)
        tensors = load_file(model / "model.safetensors")
        names = sorted(tensors)
        files = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
        for file, part in files.items():
            save_file({name: tensors[name] for name in part}, model / file)
        weight_map = {name: file for file, part in files.items() for name in part}
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (model / "model.safetensors").unlink()
        sharded = load_checkpoint(model)
        assert sharded.fingerprint == whole.fingerprint
        for name in names:
            np.testing.assert_array_equal(sharded.tensor(name), tensors[name])
        (model / "model-2-of-2.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"lacks 1 of 2 files of weights: model-2-of-2"):
            load_checkpoint(model)

    def test_index_and_shard_disagree(self, model: Path) -> None:
        (model / "model.safetensors").rename(model / "a.safetensors")
        names = [*SafetensorsFile(model / "a.safetensors").names(), "more"]
        (model / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
        )
        with pytest.raises(CheckpointError, match="lacks tensor more"):
            load_checkpoint(model)

    def test_unknown_name(self, model: Path) -> None:
        checkpoint = load_checkpoint(model)
        for read in (checkpoint.tensor, checkpoint.quantized):
            with pytest.raises(CheckpointError, match="no tensor foo"):
                read("foo")

    def test_each_missing_tensor_is_named(self, model: Path) -> None:
        """K4-01's kind: nothing is made up for a tensor that is not there."""
        tensors = load_file(model / "model.safetensors")
        for name in tensors:
            save_file(
                {other: value for other, value in tensors.items() if other != name},
                model / "model.safetensors",
            )
            with pytest.raises(CheckpointError, match=f"1 missing \\({name}\\)") as error:
                load_checkpoint(model)
            assert ("tied" in str(error.value)) == (name == "lm_head.weight")

    def test_all_faults_in_one_message(self, model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        norm = "model.layers.1.input_layernorm.weight"
        tensors[norm] = tensors[norm][:-1].copy()
        tensors["model.layers.0.self_attn.q_norm.weight"] = tensors["model.norm.weight"]
        for index in range(7):
            tensors[f"extra.{index}"] = tensors["model.norm.weight"]
        del tensors["model.embed_tokens.weight"]
        save_file(tensors, model / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(model)
        text = str(error.value)
        assert "1 missing (model.embed_tokens.weight)" in text
        assert "8 not part of the model" in text
        assert "and 3 more" in text
        assert f"1 mis-shaped ({norm} is (31,) instead of (32,))" in text
        assert "\n" not in text

    def test_buffers_of_old_checkpoints_do_no_harm(self, model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        before = load_checkpoint(model).fingerprint
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        save_file(tensors, model / "model.safetensors")
        assert load_checkpoint(model).fingerprint == before

    def test_tied_output_matrix(self, model: Path) -> None:
        edit(model, tie_word_embeddings=True)
        with_copy = load_checkpoint(model)
        assert with_copy.config.tied
        assert "lm_head.weight" not in with_copy.names()
        tensors = load_file(model / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, model / "model.safetensors")
        assert load_checkpoint(model).fingerprint == with_copy.fingerprint

    def test_integer_weights_are_refused(self, model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"] = np.ones(32, np.int8)
        save_file(tensors, model / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8"):
            load_checkpoint(model)


class TestTornFiles:
    def test_truncated_anywhere(self, model: Path) -> None:
        content = (model / "model.safetensors").read_bytes()
        for length in [0, 1, 7, 8, 9, 100, *range(200, len(content), len(content) // 40), len(content) - 1]:
            (model / "model.safetensors").write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=r"model\.safetensors"):
                load_checkpoint(model)

    @pytest.mark.parametrize(
        "header",
        [
            b"[]",
            b"{",
            b"\xff\xff",
            b'{"a": 3}',
            b'{"a": {"dtype": "F32", "shape": [1]}}',
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
            b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}',
        ],
    )
    def test_garbled_header(self, header: bytes, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)

    @pytest.mark.parametrize("content", ["", "{", "[]"])
    def test_config(self, model: Path, content: str) -> None:
        (model / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_checkpoint(model)

    @pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
    def test_deep_nesting(self, model: Path, file: str) -> None:
        if file.startswith("model"):
            (model / "model.safetensors").unlink()
        (model / file).write_text("[" * 100_000)
        with pytest.raises(CheckpointError, match=file):
            load_checkpoint(model)

    @pytest.mark.parametrize("offsets", [["0", "128"], [0.0, 128.0], [False, 128], 5, [0, 9, 3], [2**70, 2**70 + 128]])
    def test_offsets_of_other_kinds(self, offsets: object, tmp_path: Path) -> None:
        header = json.dumps({"a": {"dtype": "F32", "shape": [32], "data_offsets": offsets}}).encode()
        path = tmp_path / "model.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 128)
        with pytest.raises(CheckpointError, match="tensor a"):
            SafetensorsFile(path)

    def test_a_header_nested_too_deep(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
        with pytest.raises(CheckpointError, match="header is no JSON"):
            SafetensorsFile(path)

    @pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "", ".", "../a.safetensors"])
    def test_an_index_of_impossible_names(self, model: Path, name: str) -> None:
        (model / "model.safetensors").unlink()
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="lacks 1 of 1 files") as error:
            load_checkpoint(model)
        assert len(str(error.value)) < 500


def each(key: str, values: Iterable[object]) -> list[tuple[str, dict[str, object]]]:
    return [(key, {key: value}) for value in values]


class TestValuesOfOtherKinds:
    """Always one line that names the key."""

    @pytest.mark.parametrize(
        ("key", "options"),
        [
            *each("architectures", ("LlamaForCausalLM", 5, {"a": 1}, [None], [["x"]])),
            *each("layer_types", ("full_attention", 5, {"a": 1}, [None], [[]])),
            *each("rms_norm_eps", (0, -1e-5, "x", True, [], float("nan"), float("inf"), 10**400)),
            *each("rope_theta", (0, -1.0, "x", False, float("nan"), float("inf"))),
            *each("num_hidden_layers", (10**6, 10**12, 1.5, True)),
            *each("head_dim", (0, 7, 2**40)),
            ("max_position_embeddings", {"max_position_embeddings": 10**9}),
            ("factor", {"rope_scaling": {"rope_type": "linear", "factor": 0}}),
            ("factor", {"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}),
            ("high_freq_factor", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}),
            ("rope_theta", {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
            *each("eos_token_id", (True, -1, 1.5, "5", "", {}, 16, 2**70, [5, -1], [None], [[5]])),
        ],
    )
    def test_config(self, model: Path, key: str, options: dict[str, Any]) -> None:
        edit(model, **options)
        (model / "generation_config.json").unlink()
        with pytest.raises((CheckpointError, UnsupportedModelError), match=key) as error:
            load_checkpoint(model)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 400

    @pytest.mark.parametrize("value", ["x", [4], {}, 0.5, True, -1])
    def test_sliding_window(self, value: Any) -> None:
        with pytest.raises(CheckpointError, match="sliding_window"):
            read_hf_config(config_of("mistral") | {"sliding_window": value})

    @pytest.mark.parametrize("value", [True, -1, 1.5, "5", 16, 2**70, [5, "x"]])
    def test_generation_config(self, model: Path, value: Any) -> None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id must be ids from 0 to 15"):
            load_checkpoint(model)

    @pytest.mark.parametrize("value", [None, [], [3], 3])
    def test_null_says_nothing(self, model: Path, value: Any) -> None:
        edit(model, eos_token_id=3)
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        assert load_checkpoint(model).eos_token_ids == (3,)


class TestFingerprint:
    def test_same_for_a_copy(self, model: Path, tmp_path: Path) -> None:
        copy = shutil.copytree(model, tmp_path / "elsewhere" / "other")
        assert load_checkpoint(copy).fingerprint == load_checkpoint(model).fingerprint
        assert len(load_checkpoint(copy).fingerprint) == 64

    def test_any_changed_tensor_or_option_shows(self, model: Path) -> None:
        seen = {load_checkpoint(model).fingerprint}
        tensors = load_file(model / "model.safetensors")
        for name in tensors:
            save_file(tensors | {name: tensors[name] * 2}, model / "model.safetensors")
            seen.add(load_checkpoint(model).fingerprint)
        edit(model, rope_theta=5000.0)
        seen.add(load_checkpoint(model).fingerprint)
        assert len(seen) == len(tensors) + 2

    def test_one_row_of_a_large_tensor_shows(self, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
        model = Path(shutil.copytree(tiny_model("llama", vocab=2048), tmp_path / "model"))
        before = load_checkpoint(model).fingerprint
        tensors = load_file(model / "model.safetensors")
        tensors["model.embed_tokens.weight"][777] *= -1
        save_file(tensors, model / "model.safetensors")
        assert load_checkpoint(model).fingerprint != before

    def test_files_that_did_not_change_are_read_once(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HVD_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(checkpoint_module, "_REMEMBERED_FROM", 0)
        monkeypatch.setattr(checkpoint_module, "_SETTLED_NS", 0)
        first = load_checkpoint(model).fingerprint
        (note,) = (tmp_path / "cache" / "fingerprints").iterdir()
        mark = json.loads(note.read_text()) | {"fingerprint": "remembered"}
        note.write_text(json.dumps(mark))
        assert load_checkpoint(model).fingerprint == "remembered"
        for changed in ({"facts": "other"}, {"stamps": [*mark["stamps"][:-1], 0]}, {"stamps": None}):
            note.write_text(json.dumps(mark | changed))
            assert load_checkpoint(model).fingerprint == first
        for torn in ("", "[]", "[" * 100_000):
            note.write_text(torn)
            assert load_checkpoint(model).fingerprint == first
        note.write_text(json.dumps(mark))
        edit(model, rope_theta=5000.0)
        assert load_checkpoint(model).fingerprint not in ("remembered", first)

    def test_a_file_changed_just_now_is_not_remembered(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HVD_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(checkpoint_module, "_REMEMBERED_FROM", 0)
        monkeypatch.setattr(checkpoint_module, "_SETTLED_NS", 10**18)
        load_checkpoint(model)
        assert not (tmp_path / "cache").exists()

    def test_a_cache_that_can_not_be_written_is_no_obstacle(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "cache").write_text("a file")
        fingerprint = load_checkpoint(model).fingerprint
        monkeypatch.setenv("HVD_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(checkpoint_module, "_REMEMBERED_FROM", 0)
        monkeypatch.setattr(checkpoint_module, "_SETTLED_NS", 0)
        assert load_checkpoint(model).fingerprint == fingerprint
        assert "can't keep the fingerprint" in caplog.text


class TestSources:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"no such directory or file.*hub id"):
            load_checkpoint(tmp_path / "missing")
        with pytest.raises(ModelError, match=r"no model at 'x/y\.gguf'"):
            load_checkpoint("x/y.gguf")

    @pytest.mark.parametrize("name", ["", "  "])
    def test_no_name(self, name: str) -> None:
        with pytest.raises(ModelError, match="model name is empty"):
            load_checkpoint(name)

    @pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
    def test_names_that_no_file_has(self, name: str) -> None:
        with pytest.raises(ModelError, match="no model at"):
            load_checkpoint(name)

    def test_directory_of_a_gguf_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.gguf").write_bytes(b"GGUF")
        with pytest.raises(ModelError, match=r"give that file: '.*a\.gguf'"):
            load_checkpoint(tmp_path)

    def test_a_text_file(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("hello")
        with pytest.raises(ModelError, match=r"neither a GGUF file nor a directory with config\.json"):
            load_checkpoint(tmp_path / "notes.txt")

    def test_directory_without_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            load_checkpoint(tmp_path)

    def test_pickled_weights_are_never_opened(self, model: Path) -> None:
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="pickled weights are not read"):
            load_checkpoint(model)
        with pytest.raises(ModelError, match="pickled weights"):
            load_checkpoint(model / "pytorch_model.bin")

    def test_single_file_of_a_directory(self, model: Path) -> None:
        with pytest.raises(ModelError, match="give its directory"):
            load_checkpoint(model / "model.safetensors")

    def test_end_tokens_and_tokenizer(self, tiny_model: Callable[..., Path]) -> None:
        checkpoint = load_checkpoint(tiny_model("llama", vocab=300, eos=[257, 3]))
        assert checkpoint.eos_token_ids == checkpoint.tokenizer().eos_token_ids == (257, 3)
        assert checkpoint.tokenizer().encode("ab") == [258 + 1]

    def test_hub_id_out_of_the_cache(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        repository = tmp_path / "hub" / "models--owner--name"
        shutil.copytree(model, repository / "snapshots" / "abc")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        checkpoint = load_checkpoint("owner/name")
        assert checkpoint.name == "owner/name"
        assert checkpoint.fingerprint == load_checkpoint(model).fingerprint
        with pytest.raises(ModelError, match=r"'owner/other'.*neither cached nor reachable"):
            load_checkpoint("owner/other")

    def test_neither_torch_nor_transformers(self, model: Path) -> None:
        program = (
            "import sys; from hvd.models.checkpoint import load_checkpoint; c = load_checkpoint(sys.argv[1]);"
            "[c.tensor(n) for n in c.names()]; c.tokenizer().encode('t1');"
            "print(sorted({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
        )
        out = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, check=True)
        assert out.stdout.strip() == "[]"
