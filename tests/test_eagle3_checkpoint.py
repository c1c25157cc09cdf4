"""Loading heads: every layout, what is filled, and that everything wrong is named."""

from __future__ import annotations

import json
import logging
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd.errors import CheckpointError, MissingExtraError, UnsupportedModelError
from hvd.models.eagle3_checkpoint import HeadWeights, find_eagle3, load_eagle3, stated_aux_layers
from hvd.models.rope import cos_sin
from tiny_head import (
    LAYOUTS,
    TARGET,
    Tensors,
    head_config,
    head_tensors,
    make_head,
    target_tensor,
    target_with,
    write_head,
)


def load(folder: Path, **target: Any) -> HeadWeights:
    return load_eagle3(folder, target_with(**target), target_tensor)


def write(tmp_path: Path, tensors: Tensors, layout: str = "safeailab", **config: Any) -> Path:
    return write_head(tmp_path / "head", tensors, head_config(tensors, layout, **config))


# -- what loads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_with_sizes_from_the_weights(tmp_path: Path, layout: str) -> None:
    weights = load(make_head(tmp_path, layout))
    spec = weights.spec
    assert (spec.hidden_size, spec.target_hidden_size, spec.intermediate_size) == (16, 16, 24)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (1, 4, 2, 16)
    assert (spec.norm_eps, spec.context_limit, spec.draft_vocab_size) == (1e-5, 256, 8)
    assert spec.aux_layers == (2, 6, 9)
    for name, tensor in head_tensors().items():
        if name not in ("d2t", "t2d"):
            np.testing.assert_array_equal(weights.tensors[name], tensor)
    np.testing.assert_array_equal(weights.embedding, target_tensor("model.embed_tokens.weight"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pickled", [False, True])
def test_half_precision_files(tmp_path: Path, dtype: str, pickled: bool) -> None:
    if pickled and dtype == "bfloat16":
        weights = load(pickled_bfloat16(tmp_path))
    else:
        weights = load(make_head(tmp_path, dtype=dtype, pickled=pickled, embedding=True))
    expected = head_tensors(embedding=True)
    for name, tensor in weights.tensors.items():
        assert tensor.dtype == np.float32
        np.testing.assert_allclose(tensor, expected[name], rtol=0.01)
    np.testing.assert_allclose(weights.embedding.astype(np.float32), expected["embed_tokens.weight"], rtol=0.01)


def pickled_bfloat16(folder: Path) -> Path:
    import torch

    make_head(folder, embedding=True, pickled=True)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    half = {name: x.bfloat16() if x.dtype == torch.float32 else x for name, x in tensors.items()}
    torch.save(half, folder / "pytorch_model.bin")
    return folder


def test_training_leftovers_are_ignored(tmp_path: Path) -> None:
    tensors = head_tensors()
    tensors["verifier_lm_head.weight"] = np.zeros((8, 16), np.float32)
    tensors["verifier_norm.weight"] = np.zeros(16, np.float32)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    assert set(load(write(tmp_path, tensors)).tensors) == set(head_tensors()) - {"d2t", "t2d"}


# -- K4-01: missing, unknown and mis-shaped tensors -------------------------------------------------------------------

FULL_OPTIONS: dict[str, Any] = {"qk_norm": True, "bias": True, "norm_before_fc": True, "embedding": True, "layers": 2}


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
@pytest.mark.parametrize("name", sorted(head_tensors(**FULL_OPTIONS)))
def test_k4_01_each_missing_tensor_is_filled_or_named(tmp_path: Path, layout: str, name: str) -> None:
    tensors = head_tensors(**FULL_OPTIONS)
    del tensors[name]
    extra = {"model_type": "qwen3", "attention_bias": True} if layout == "speculators" else {}
    folder = write(tmp_path, tensors, layout, norm_before_fc=True, **extra)
    if name == "t2d":
        load(folder)
    elif name == "embed_tokens.weight":
        np.testing.assert_array_equal(load(folder).embedding, target_tensor("model.embed_tokens.weight"))
    elif layout == "safeailab" and name.endswith("o_proj.bias"):
        assert name not in load(folder).tensors  # Qwen2's attention has no such bias: complete without
    else:
        in_file = name if layout == "speculators" else name.replace("layers.0.", "midlayer.")
        with pytest.raises(CheckpointError, match=f"missing .*{in_file}"):
            load(folder)


def test_k4_01_output_matrix_of_the_target_stands_in_for_a_full_vocabulary(tmp_path: Path) -> None:
    tensors = head_tensors(vocab=32)
    del tensors["lm_head.weight"]
    folder = write(tmp_path, tensors)
    np.testing.assert_array_equal(load(folder).tensors["lm_head.weight"], target_tensor("lm_head.weight"))


def test_k4_01_a_tied_target_gives_its_embedding(tmp_path: Path) -> None:
    def tied(name: str) -> np.ndarray:
        if name == "lm_head.weight":
            raise CheckpointError("no tensor lm_head.weight")
        return target_tensor(name)

    tensors = head_tensors(vocab=32)
    del tensors["lm_head.weight"]
    weights = load_eagle3(write(tmp_path, tensors), TARGET, tied)
    np.testing.assert_array_equal(weights.tensors["lm_head.weight"], target_tensor("model.embed_tokens.weight"))


def test_a_head_of_another_width_needs_its_own_embedding(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing embed_tokens\.weight; .* hidden size is 16 and the head's 8"):
        load(write(tmp_path, head_tensors(hidden=8)))


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.g_proj.weight", "lm_head.bias", "fc.bias", "layers.0.mlp.up_proj.bias"]
)
def test_unknown_tensors_are_named(tmp_path: Path, name: str) -> None:
    tensors = head_tensors() | {name: np.zeros(4, np.float32)}
    with pytest.raises(CheckpointError, match=f"unknown {name.replace('layers.0', 'midlayer')}"):
        load(write(tmp_path, tensors))


@pytest.mark.parametrize("name", sorted(set(head_tensors(**FULL_OPTIONS)) - {"fc.weight"}))
def test_each_misshaped_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = head_tensors(**FULL_OPTIONS)
    tensors[name] = tensors[name][:-1].copy()
    with pytest.raises(CheckpointError, match=misshaped(name)):
        load(write(tmp_path, tensors, norm_before_fc=True, draft_vocab_size=8))


def misshaped(name: str) -> str:
    """What the message must have: sizes that others are inferred from show up beside what does not fit them."""
    inferred = {"lm_head.weight": "lm_head", "d2t": "d2t", "layers.0.mlp.gate_proj.weight": r"midlayer\.mlp\.up_proj"}
    short = name.replace("layers.0.", "midlayer.")
    if name.startswith("layers.0.self_attn.") and name.endswith(("q_proj.weight", "k_proj.weight")):
        return "rows of q_proj"
    return inferred.get(name, short)


def test_all_faults_come_in_one_line(tmp_path: Path) -> None:
    tensors = head_tensors()
    del tensors["norm.weight"], tensors["layers.0.hidden_norm.weight"]
    tensors["surplus"] = np.zeros(1, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load(write(tmp_path, tensors))
    assert str(caught.value) == "EAGLE3 head: missing midlayer.hidden_norm.weight, norm.weight; unknown surplus"


def test_fc_norm_of_the_wrong_count(tmp_path: Path) -> None:
    tensors = head_tensors(fc_norm=True)
    del tensors["fc_norm.1.weight"]
    with pytest.raises(CheckpointError, match=r"fc_norm\.1\.weight"):
        load(write(tmp_path, tensors, fc_norm=True))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (np.full(16, np.nan, np.float32), "norm.weight holds values that are not finite"),
        (np.zeros(16, np.int8), "norm.weight is of type int8"),
    ],
)
def test_values_that_are_no_weights(tmp_path: Path, tensor: np.ndarray, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(write(tmp_path, head_tensors() | {"norm.weight": tensor}))


def test_heads_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"5 heads .* 64 rows of q_proj"):
        load(write(tmp_path, head_tensors(), heads=5))
    with pytest.raises(CheckpointError, match="4 heads and 4 key/value heads"):
        load(write(tmp_path, head_tensors(), num_key_value_heads=4))


# -- K4-03: the draft vocabulary --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_k4_03_offsets(tmp_path: Path, dtype: type) -> None:
    tensors = head_tensors()
    expected = np.arange(8) + tensors["d2t"]
    tensors["d2t"] = tensors["d2t"].astype(dtype)
    ids = load(write(tmp_path, tensors)).target_ids
    assert ids.dtype == np.int32
    assert ids.tolist() == expected.tolist() == np.flatnonzero(tensors["t2d"]).tolist()


def test_k4_03_maps_absent_with_equal_vocabularies(tmp_path: Path) -> None:
    assert load(write(tmp_path, head_tensors(vocab=32))).target_ids.tolist() == list(range(32))


def _d2t(change: Callable[[np.ndarray], None]) -> Callable[[Tensors], None]:
    return lambda tensors: change(tensors["d2t"])


def _drop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def _zero(d2t: np.ndarray) -> None:
    d2t[:] = 0


def _beyond(d2t: np.ndarray) -> None:
    d2t[3] = 32 - 3


def _before(d2t: np.ndarray) -> None:
    d2t[0] = -1


def _twice(d2t: np.ndarray) -> None:
    d2t[4] = d2t[3] - 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop("d2t", "t2d"), r"missing d2t; needed because the draft vocabulary \(8\) is not the target's \(32\)"),
        (_d2t(_zero), "t2d marks are not those that d2t maps to"),
        (_d2t(_beyond), "draft id 3 to token 32, outside the target's vocabulary of 32"),
        (_d2t(_before), "draft id 0 to token -1"),
        (_d2t(_twice), "1 draft ids to tokens that other draft ids have already"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"].astype(np.float32)), "d2t is of type float32"),
        (lambda tensors: tensors.update(t2d=tensors["t2d"][:-1].copy()), r"t2d is \[31\] and should be \[32\]"),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:0].copy()}),
            "0 by lm_head.weight",
        ),
    ],
)
def test_k4_03_faults_of_the_map(tmp_path: Path, change: Callable[[Tensors], None], words: str) -> None:
    tensors = head_tensors()
    change(tensors)
    with pytest.raises(CheckpointError, match=words):
        load(write(tmp_path, tensors, draft_vocab_size=8))


@pytest.mark.parametrize("size", [0, -8, 9, 7, "8", True])
def test_k4_03_senseless_sizes(tmp_path: Path, size: Any) -> None:
    with pytest.raises(CheckpointError, match="draft_vocab_size"):
        load(write(tmp_path, head_tensors(), draft_vocab_size=size))


# -- K4-05: auxiliary layers ------------------------------------------------------------------------------------------

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_k4_05_one_to_four_layers(tmp_path: Path, count: int, nested: bool, layout: str) -> None:
    """Nested ids mean "after layer i", those at top level "entering layer i"."""
    layers = (1, 4, 8, 10)[:count]
    stated = {"eagle_config": {KEY: [layer - 1 for layer in layers]}} if nested else {KEY: list(layers)}
    folder = write(tmp_path, head_tensors(aux=count), layout, **stated)
    weights = load(folder, aux_layers=layers)
    assert weights.spec.aux_layers == layers == stated_aux_layers(folder, 12)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("ids", [[2, 6, 9], [1, 5, 8]])
def test_k4_05_the_two_defaults_mean_the_same_states_wherever_they_stand(
    tmp_path: Path, ids: list[int], nested: bool
) -> None:
    stated: dict[str, Any] = {"eagle_config": {KEY: ids}} if nested else {KEY: ids}
    assert load(write(tmp_path, head_tensors(), **stated)).spec.aux_layers == (2, 6, 9)


def test_k4_05_unstated_layers_are_those_of_the_target(tmp_path: Path) -> None:
    folder = write(tmp_path, head_tensors(aux=2))
    assert stated_aux_layers(folder, 12) is None
    assert load(folder, aux_layers=(0, 3)).spec.aux_layers == (0, 3)


@pytest.mark.parametrize(
    ("aux", "config", "target", "words"),
    [
        (2, {KEY: [2, 6, 9]}, {}, "states of 2 layers, its config.json names 3"),
        (2, {}, {}, "states of 2 layers, its config.json names none, and the target offers 3"),
        (3, {}, {"hidden_size": 20, "name": "other"}, "fc.weight takes 48 features, not a multiple .* 20"),
        (3, {KEY: [2, 6, 12]}, {}, r"states of layers \[2, 6, 12\], .*12 layers"),
        (3, {KEY: [2, 6, 10]}, {}, r"entering layers \[2, 6, 10\], the target was opened for \[2, 6, 9\]"),
        (3, {KEY: [2, 2, 9]}, {}, "must be a list of different layer numbers"),
        (3, {KEY: "2,6,9"}, {}, "must be a list of different layer numbers"),
    ],
)
def test_k4_05_layers_that_do_not_fit(
    tmp_path: Path, aux: int, config: dict[str, Any], target: dict[str, Any], words: str
) -> None:
    folder = write(tmp_path, head_tensors(aux=aux, embedding=True), **config)
    with pytest.raises(CheckpointError, match=words):
        load(folder, **target)


# -- K4-07: rotary embedding ------------------------------------------------------------------------------------------

POSITIONS = np.array([0, 100, 4000])
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


def plain(theta: float) -> list[float]:
    return [theta ** (-2 * j / 16) for j in range(8)]


def llama3(theta: float) -> list[float]:
    def one(f: float) -> float:
        wave = 2 * math.pi / f
        if wave < 8192 / 4:
            return f
        if wave > 8192 / 1:
            return f / 8
        s = (8192 / wave - 1) / 3
        return (1 - s) * f / 8 + s * f

    return [one(f) for f in plain(theta)]


def yarn(theta: float) -> list[float]:
    def bound(turns: float) -> float:
        return 16 * math.log(1024 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(bound(32)), 0), min(math.ceil(bound(1)), 15)
    ramp = [min(max((j - low) / (high - low), 0), 1) for j in range(8)]
    return [f / 4 * r + f * (1 - r) for f, r in zip(plain(theta), ramp, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("new_key", [False, True])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    ("scaling", "formula", "factor"),
    [
        ({}, plain, 1.0),
        ({"rope_type": "linear", "factor": 2.0}, lambda theta: [f / 2 for f in plain(theta)], 1.0),
        ({"rope_type": "llama3", **LLAMA3}, llama3, 1.0),
        ({"rope_type": "yarn", **YARN}, yarn, 0.1 * math.log(4) + 1),
    ],
)
def test_k4_07_angles(
    tmp_path: Path, layout: str, new_key: bool, theta: float, scaling: dict[str, Any], formula: Any, factor: float
) -> None:
    old = {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})
    rope: dict[str, Any] = {"rope_parameters": {"rope_theta": theta, **scaling}} if new_key else old
    spec = load(write(tmp_path, head_tensors(), layout, max_position_embeddings=4096, **rope)).spec
    cos, sin = cos_sin(spec.rope, spec.head_dim, spec.context_limit, POSITIONS)
    angles = POSITIONS[:, None] * np.array(formula(theta))
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=1e-9)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=1e-9)


def test_k4_07_a_missing_theta_is_10000(tmp_path: Path) -> None:
    assert load(write(tmp_path, head_tensors())).spec.rope.theta == 10000.0


def test_k4_07_unknown_scaling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="longrope"):
        load(write(tmp_path, head_tensors(), rope_scaling={"rope_type": "longrope", "factor": 2.0}))


# -- configuration, files, the target ---------------------------------------------------------------------------------


def test_a_missing_position_limit_is_2048(tmp_path: Path) -> None:
    tensors = head_tensors()
    config = head_config(tensors)
    del config["max_position_embeddings"]
    assert load(write_head(tmp_path, tensors, config)).spec.context_limit == 2048


@pytest.mark.parametrize(
    ("config", "words"),
    [({"hidden_act": "gelu"}, "activation 'gelu'"), ({"layer_types": ["sliding_attention"]}, "sliding-window")],
)
def test_unsupported_heads(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        load(write(tmp_path, head_tensors(), **config))


TORN = ("{", "[]", "{}", '{"num_attention_heads": 0}', '{"num_attention_heads": "4"}')
SENSELESS = ('{"num_attention_heads": 4, "rms_norm_eps": "small"}', '{"num_attention_heads": 4, "layer_types": 7}')


@pytest.mark.parametrize("text", [*TORN, *SENSELESS])
def test_torn_or_senseless_config(tmp_path: Path, text: str) -> None:
    folder = make_head(tmp_path)
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("target_name", value) for value in (5, ["x"], {"a": 1}, True)),
        *(("target_fingerprint", value) for value in (5, ["x"], {"a": 1}, True)),
        *(("target_hidden_size", value) for value in ("16", 16.5, [16], True, -1)),
        *(("rms_norm_eps", value) for value in ("x", -1.0, float("nan"), float("inf"), 10**400)),
        *(("rope_theta", value) for value in ("x", 0, float("nan"))),
    ],
)
def test_values_of_another_kind_are_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key) as error:
        load(write(tmp_path, head_tensors(), **{key: value}))
    assert "\n" not in str(error.value)


def test_a_config_nested_too_deep(tmp_path: Path) -> None:
    folder = make_head(tmp_path)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(folder)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory, and not a hub id"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="an empty text"):
        find_eagle3("")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="it is a file; give the directory"):
        find_eagle3(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load(tmp_path)
    (make_head(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load(tmp_path)


def test_torn_safetensors(tmp_path: Path) -> None:
    file = make_head(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="torn"):
        load(tmp_path)


class _Trap:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "owned"))


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    folder = make_head(tmp_path / "head", pickled=True)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(tmp_path / "trace")))
    with pytest.raises(CheckpointError, match="can't be read as tensors and nothing else"):
        load(folder)
    assert not (tmp_path / "trace").exists()


def test_pickled_head_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_head(tmp_path, pickled=True)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"hvd\[torch\]"):
        load(folder)


def test_fingerprint_of_the_target(tmp_path: Path) -> None:
    folder = make_head(tmp_path, target_fingerprint="f00d", target_name="whatever")
    load(folder)
    with pytest.raises(CheckpointError, match=r"fingerprint f00d, tiny-target has beef.*any_target=True"):
        load(folder, fingerprint="beef")
    load_eagle3(folder, target_with(fingerprint="beef"), target_tensor, any_target=True)


def test_another_targets_name_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_head(tmp_path, "speculators")  # says owner/Tiny-Target
    with caplog.at_level(logging.WARNING, "hvd"):
        load(folder)
        load(folder, name="/models/tiny-target-Q4_1.gguf")
        assert not caplog.records
        load(folder, name="llama")
    assert "trained for owner/Tiny-Target; the target is llama" in caplog.text


def test_a_target_of_another_width(tmp_path: Path) -> None:
    folder = make_head(tmp_path, target_hidden_size=4096)
    with pytest.raises(CheckpointError, match="hidden size 4096; tiny-target has 16"):
        load(folder)


def test_config_is_not_changed_by_reading(tmp_path: Path) -> None:
    folder = make_head(tmp_path, "speculators")
    before = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    load(folder)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == before
