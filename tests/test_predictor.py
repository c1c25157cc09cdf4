"""Predictors: survival never increases, a folded forward pass is the plain one, files are sound and ours or refused."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.errors import PredictorError
from hvd.payoff.features import STATE_NAMES, features, slots, state_features
from hvd.payoff.history import History
from hvd.payoff.kernels import LEAST_SURVIVAL
from hvd.payoff.online import HeadAcceptance, OnlineSurvival
from hvd.payoff.predictor import (
    MLPWeights,
    ScalarPredictor,
    SurvivalPredictor,
    load_predictor,
    save_predictor,
)
from hvd.payoff.predictor_file import MAGIC
from hvd.types import Arm, Draft

INPUTS = len(SurvivalPredictor.input_names)


def weights(inputs: int, *hidden: int, seed: int = 0) -> MLPWeights:
    rng = np.random.default_rng(seed)
    sizes = [inputs, *hidden, 1]
    layers = tuple(
        ((rng.normal(size=(a, b)) / np.sqrt(a)).astype(np.float32), rng.normal(size=b).astype(np.float32))
        for a, b in itertools.pairwise(sizes)
    )
    return MLPWeights(
        layers, rng.normal(size=inputs).astype(np.float32), rng.uniform(0.5, 2, inputs).astype(np.float32)
    )


def history(hits: int = 3, misses: int = 2) -> History:
    made = History(np.arange(256).astype(np.uint8))
    made.prompt(np.arange(30, dtype=np.int32))
    flags = np.array([0] * misses + [1] * hits, np.uint8)
    made.commit(np.arange(len(flags), dtype=np.int32), flags, Arm.CACHE, 4, 2, 10)
    return made


def make_draft(n: int, match_len: int = 4, seed: int = 0) -> Draft:
    rng = np.random.default_rng(seed)
    counts = np.sort(rng.integers(1, 9, n))[::-1].astype(np.int32)
    parents = np.concatenate(([int(counts[0]) + 2], counts[:-1])).astype(np.int32)
    probs = (counts / parents).astype(np.float32)
    return Draft.chain(rng.integers(0, 256, n).astype(np.int32), Arm.CACHE, probs, 2.0, match_len, counts, parents)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 130), st.integers(0, 40), st.integers(0, 1000), st.sampled_from(["fallback", "linear", "deep"]))
def test_survival_never_increases(n: int, match_len: int, seed: int, which: str) -> None:
    model = {
        "fallback": None,
        "linear": SurvivalPredictor(weights(INPUTS, seed=seed)),
        "deep": SurvivalPredictor(weights(INPUTS, 16, 8, seed=seed)),
    }[which]
    past, draft = history(seed % 7, seed % 5), make_draft(n, match_len, seed)
    survival = OnlineSurvival(model).forecast(past, draft).survival
    assert len(survival) == n or (len(survival) < n and survival[-1] < LEAST_SURVIVAL <= survival[:-1].min(initial=1.0))
    assert survival.dtype == np.float32
    assert (survival >= 0).all()
    assert (survival <= 1).all()
    assert (np.diff(survival) <= 0).all()


@pytest.mark.parametrize("hidden", [(), (12,), (16, 8), (16, 8, 4)])
def test_the_split_first_layer_equals_the_plain_forward_pass(hidden: tuple[int, ...]) -> None:
    mlp = weights(INPUTS, *hidden)
    past, draft = history(), make_draft(20)
    state, token = features(past, slots([draft]), 0)
    inputs = np.concatenate((token, np.broadcast_to(state, (20, len(state)))), axis=1)
    x = (inputs.astype(np.float64) - mlp.mean) / mlp.std
    for i, (weight, bias) in enumerate(mlp.layers):
        x = x @ weight + bias
        x = np.maximum(x, 0) if i + 1 < len(mlp.layers) else x
    np.testing.assert_allclose(mlp.forward(inputs)[:, 0], x[:, 0], rtol=1e-3, atol=1e-3)
    served = OnlineSurvival(SurvivalPredictor(mlp)).forecast(past, draft).trained
    expected = 1.0 / (1.0 + np.exp(-x[:, 0]))
    np.testing.assert_allclose(served, expected[: len(served)], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(SurvivalPredictor(mlp).hazard(past, draft), expected, rtol=1e-3, atol=1e-3)


def test_a_column_that_was_constant_in_training_is_ignored() -> None:
    mlp = weights(4, 8)
    mlp = MLPWeights(mlp.layers, mlp.mean, np.array([1, 0, 2, 1], np.float32))
    x = np.zeros((2, 4), np.float32)
    x[1, 1] = 1e6
    out = mlp.forward(x)
    assert out[0] == out[1]


def test_scalar_prediction_is_not_negative() -> None:
    mlp = weights(len(STATE_NAMES), 8)
    low = MLPWeights((*mlp.layers[:-1], (mlp.layers[-1][0], np.array([-1e4], np.float32))), mlp.mean, mlp.std)
    features = state_features(history(), make_draft(5))
    assert ScalarPredictor(low).predict(features) == 0.0
    assert ScalarPredictor(mlp).predict(features) == pytest.approx(max(0.0, float(mlp.forward(features)[0])))


# -- the fallback ------------------------------------------------------------------------------------------------------


def test_fallback_likes_long_matches_hits_and_evidence() -> None:
    cold, warm = history(0, 8), history(8, 0)

    def hazard(past: History, draft: Draft) -> np.ndarray:
        return OnlineSurvival().forecast(past, draft).fallback

    def above(one: np.ndarray, other: np.ndarray) -> bool:
        n = min(len(one), len(other))
        return bool((one[:n] > other[:n]).all())

    assert above(hazard(warm, make_draft(8)), hazard(cold, make_draft(8)))
    assert above(hazard(warm, make_draft(8, match_len=20)), hazard(warm, make_draft(8, match_len=1)))
    sure = Draft.chain(
        np.zeros(1, np.int32), Arm.CACHE, match_len=4, counts=np.array([90]), parent_counts=np.array([90])
    )
    weak = Draft.chain(np.zeros(1, np.int32), Arm.CACHE, match_len=4, counts=np.array([1]), parent_counts=np.array([1]))
    assert hazard(warm, sure)[0] > hazard(warm, weak)[0]


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.98])
def test_fallback_comes_to_the_observed_rate(rate: float) -> None:
    model = OnlineSurvival()
    past, draft = history(), make_draft(1)
    rng = np.random.default_rng(0)
    for _ in range(400):
        model.learn(model.forecast(past, draft), 1, int(rng.random() < rate))
    assert abs(float(model.forecast(past, draft).fallback[0]) - rate) < 0.08


def test_fallback_learns_only_from_tokens_that_were_reached() -> None:
    model = OnlineSurvival()
    past, draft = history(8, 0), make_draft(30, match_len=1)
    before = model.forecast(past, draft)
    model.learn(before, 30, 0)
    after = model.forecast(past, draft)
    assert after.fallback[0] < before.fallback[0]
    n = min(len(after.bucket), len(before.bucket))
    unseen = before.bucket[:n] != before.bucket[0]
    assert unseen.any()
    assert (after.fallback[:n][unseen] == before.fallback[:n][unseen]).all()


# -- corrections online ------------------------------------------------------------------------------------------------


def constant(logit: float) -> SurvivalPredictor:
    flat = (np.zeros((INPUTS, 1), np.float32), np.array([logit], np.float32))
    return SurvivalPredictor(MLPWeights((flat,), np.zeros(INPUTS, np.float32), np.ones(INPUTS, np.float32)))


@pytest.mark.parametrize(("logit", "payoff"), [(6.0, 0), (-6.0, 12)])
def test_a_wrong_predictor_loses_its_say(logit: float, payoff: int) -> None:
    online = OnlineSurvival(constant(logit))
    past, draft = history(), make_draft(12)
    start = online.trust
    for _ in range(5):
        online.learn(online.forecast(past, draft), 12, payoff)
    assert start > 0.8
    assert online.trust < 0.1


def test_a_good_predictor_keeps_its_say() -> None:
    online = OnlineSurvival(constant(2.2))  # hazards of 0.9
    past, draft = history(), make_draft(40)
    rng = np.random.default_rng(1)
    for _ in range(100):
        online.learn(online.forecast(past, draft), 40, int(min(40, rng.geometric(0.1) - 1)))
    assert online.trust > 0.5
    assert abs(online.shift) < 0.5


def test_a_mixture_lies_between_its_parts_and_learns_nothing_from_nothing() -> None:
    online = OnlineSurvival(constant(3.0))
    forecast = online.forecast(history(), make_draft(1))
    low, high = sorted((float(forecast.fallback[0]), float(forecast.trained[0])))
    assert low <= forecast.survival[0] <= high
    online.learn(forecast, 0, 0)
    assert online.shift == 0.0
    assert online.trust == OnlineSurvival(constant(3.0)).trust


def test_head_acceptance_by_depth() -> None:
    heads = HeadAcceptance()
    record = heads.open()
    assert heads.survival(record, 3).tolist() == [0.5, 0.25, 0.125]  # worth a try
    for _ in range(200):
        heads.learn(record, 4, 2)
    first, second, third, fourth = heads.survival(record, 4)
    assert first > 0.9
    assert second > 0.9
    assert third < 0.1
    assert fourth <= third
    assert heads.survival(heads.open(), 3)[1] > 0.8  # a new request starts from what the engine knows
    assert (heads.survival(record, 100)[64:] == 0).all()


def test_idle_heads_are_tried_again_one_day() -> None:
    heads = HeadAcceptance()
    record = heads.open()
    for _ in range(30):
        heads.learn(record, 4, 0)
    bad = heads.survival(record, 1)[0]
    for _ in range(5000):
        heads.idle(record)
    assert bad < 0.15
    assert heads.survival(record, 1)[0] > 0.2


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scalar", "survival"])
def test_files_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    made = (
        ScalarPredictor(weights(len(STATE_NAMES), 8, 8), {"trained_on": ["a"], "precision": 0.5})
        if kind == "scalar"
        else SurvivalPredictor(weights(INPUTS, 8), {"trained_on": ["a"], "precision": 0.5})
    )
    path = tmp_path / "p.hvd"
    save_predictor(path, made)
    found = load_predictor(path)
    assert type(found) is type(made)
    assert found.metadata == made.metadata
    for one, other in zip(found.weights.layers, made.weights.layers, strict=True):
        assert one[0].tobytes() == other[0].tobytes()
        assert one[1].tobytes() == other[1].tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["p.hvd"]


def saved(tmp_path: Path, **changes: object) -> Path:
    """A sound file with entries of its header changed."""
    path = tmp_path / "p.hvd"
    save_predictor(path, SurvivalPredictor(weights(INPUTS, 4)))
    with np.load(io.BytesIO(path.read_bytes()[len(MAGIC) + 32 :])) as archive:
        arrays = dict(archive)
    header = json.loads(arrays["header"].tobytes()) | changes
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(MAGIC + hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "format version 99"),
        ({"features": 0}, "feature version 0"),
        ({"kind": "tarot"}, "unknown kind"),
        ({"inputs": ["a"]}, "other features"),
        ({"inputs": None}, "incomplete"),
        ({"kind": "scalar"}, "other features"),
    ],
)
def test_foreign_files_are_refused_and_left_alone(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = saved(tmp_path, **changes)
    content = path.read_bytes()
    with pytest.raises(PredictorError, match=message):
        load_predictor(path)
    assert path.read_bytes() == content


def test_torn_and_altered_files_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    for cut in (len(MAGIC), len(MAGIC) + 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(PredictorError, match="torn"):
            load_predictor(path)
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with pytest.raises(PredictorError):
            load_predictor(path)


def test_missing_files_pickles_and_bare_arrays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PredictorError, match="can't be read"):
        load_predictor(tmp_path / "none.hvd")
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    for content in (buffer.getvalue(), b"\x80\x04N.", b"{}", b"", MAGIC[:5]):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(PredictorError, match="not a predictor file"):
            load_predictor(tmp_path / "x")
    np.save(tmp_path / "bare.npy", np.ones(3))
    with pytest.raises(PredictorError, match="not a predictor file"):
        load_predictor(tmp_path / "bare.npy")


@pytest.mark.parametrize("fault", ["nan", "shape", "inputs", "dtype"])
def test_bad_weights_are_refused(fault: str) -> None:
    mlp = weights(INPUTS, 4)
    first, bias = mlp.layers[0]
    layers = {
        "nan": (np.full_like(first, np.nan), bias),
        "shape": (first, bias[:-1]),
        "inputs": (first[:-1], bias),
        "dtype": (first.astype(np.float64), bias),
    }[fault]
    with pytest.raises(PredictorError):
        MLPWeights((layers, *mlp.layers[1:]), mlp.mean, mlp.std)


def test_weights_for_other_features_are_refused() -> None:
    with pytest.raises(PredictorError, match="features"):
        SurvivalPredictor(weights(3))
    with pytest.raises(PredictorError, match="features"):
        ScalarPredictor(weights(INPUTS))
