"""Predictor training: gradients, fitting, states, figures, and the file that comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd.errors import ConfigError, TraceError
from hvd.payoff.features import TOKEN_NAMES, state_features
from hvd.payoff.policy import make_policy
from hvd.payoff.predictor import MLPWeights, ScalarPredictor, SurvivalPredictor, load_predictor
from hvd.traces.schema import Trace
from hvd.traces.writer import TraceWriter
from hvd.training.dataset import PAYOFF, Sampling, StateSet, collect_states, hold_out
from hvd.training.fit import TrainOptions, _flat_cost, predict_payoff, survival_at, survival_problem, train_predictor
from hvd.training.mlp import FitOptions, Layers, Loss, Problem, _gradients, _loss, fit_mlp, forward
from hvd.training.replay import Walk, cycles, walks
from hvd.training.report import auc, best_threshold, calibration, expected_calibration_error, fixed_rules, judge, scores
from hvd.types import FinishReason, Float32Array

CLASSES = (np.arange(64) % 9).astype(np.uint8)
QUICK = FitOptions(hidden=(16, 16), epochs=12, batch=512, learning_rate=5e-3, patience=12)


# -- the perceptron -------------------------------------------------------------------------------------------------


def problem(target: Callable[[Float32Array], Float32Array], loss: Loss, rows: int = 4000, columns: int = 5) -> Problem:
    x = np.random.default_rng(0).normal(3.0, 2.0, (rows, columns)).astype(np.float32)
    x[:, 1] = 7.0  # says nothing, ever
    order = np.arange(rows)
    return Problem(
        gather=lambda chosen: x[chosen],
        target=target(x).astype(np.float32),
        weight=np.ones(rows, np.float32),
        train=order[: rows * 3 // 4],
        valid=order[rows * 3 // 4 :],
        ignored=np.arange(columns) == 2,
        loss=loss,
    )


@pytest.mark.parametrize("loss", list(Loss))
def test_gradients_are_those_of_the_loss(loss: Loss) -> None:
    rng = np.random.default_rng(1)
    layers: Layers = [(rng.normal(size=s).astype(np.float64), rng.normal(size=s[1])) for s in ((4, 6), (6, 5), (5, 1))]  # type: ignore[misc]
    x, weight = rng.normal(size=(20, 4)), rng.random(20)
    target = (rng.random(20) < 0.5).astype(float)

    def mean_loss() -> float:
        return _loss(forward(layers, x), target, weight, loss)[0] / weight.sum()  # type: ignore[arg-type]

    _, gradients = _gradients(layers, x, target, weight, loss)  # type: ignore[arg-type]
    for layer, gradient in zip(layers, gradients, strict=True):
        for part, slope in zip(layer, gradient, strict=True):
            for place in np.ndindex(part.shape):
                kept, step = part[place], 1e-6
                part[place] = kept + step
                above = mean_loss()
                part[place] = kept - step
                below = mean_loss()
                part[place] = kept
                assert slope[place] == pytest.approx((above - below) / (2 * step), abs=2e-5)


def test_it_learns_a_curved_function() -> None:
    made = problem(lambda x: np.abs(x[:, 0] - 3.0) + x[:, 3], Loss.SQUARED)
    fitted = fit_mlp(made, FitOptions(hidden=(32, 32), epochs=40, batch=256, learning_rate=3e-3, patience=40))
    assert fitted.losses[fitted.best][1] < 0.05 * made.target.var()


def test_it_learns_probabilities() -> None:
    rng = np.random.default_rng(2)
    made = problem(lambda x: rng.random(len(x)) < 1 / (1 + np.exp(-(x[:, 0] - 3.0))), Loss.LOGISTIC)
    fitted = fit_mlp(made, FitOptions(hidden=(8,), epochs=30, batch=256, learning_rate=1e-2))
    x = made.gather(made.valid)
    output = forward(fitted.layers, (x - fitted.mean) / fitted.std)
    assert np.corrcoef(output, x[:, 0])[0, 1] > 0.95
    assert np.mean(1 / (1 + np.exp(-output))) == pytest.approx(made.target[made.valid].mean(), abs=0.05)


def test_ignored_and_constant_columns_do_not_count() -> None:
    fitted = fit_mlp(problem(lambda x: x[:, 2], Loss.SQUARED), QUICK)
    weights = MLPWeights(tuple(fitted.layers), fitted.mean, fitted.std)
    x = np.ones((1, 5), np.float32)
    other = x.copy()
    other[0, 1:3] = 1e6
    assert weights.forward(x) == weights.forward(other)


def test_the_same_seed_gives_the_same_weights_and_another_others() -> None:
    made = problem(lambda x: x[:, 0], Loss.SQUARED)
    first, second = fit_mlp(made, QUICK), fit_mlp(made, QUICK)
    assert all(
        (a == b).all() for f, s in zip(first.layers, second.layers, strict=True) for a, b in zip(f, s, strict=True)
    )
    other = fit_mlp(made, FitOptions(hidden=(16, 16), epochs=1, seed=1))
    assert (other.layers[0][0] != first.layers[0][0]).any()


def test_it_stops_early_and_keeps_the_best_epoch() -> None:
    noise = np.random.default_rng(3).normal(size=200)
    made = problem(lambda x: noise, Loss.SQUARED, rows=200)
    calls: list[tuple[int, int]] = []
    options = FitOptions(hidden=(64, 64), epochs=300, batch=32, learning_rate=1e-2, patience=4)
    fitted = fit_mlp(made, options, progress=lambda done, total: calls.append((done, total)))
    assert len(fitted.losses) == fitted.best + 1 + 4 < 300
    assert calls[-1] == (len(fitted.losses), 300)
    x = (made.gather(made.valid) - fitted.mean) / fitted.std
    kept = _loss(forward(fitted.layers, x), made.target[made.valid], made.weight[made.valid], Loss.SQUARED)[0] / 50
    assert kept == pytest.approx(min(v for _, v in fitted.losses), rel=1e-4)


@pytest.mark.parametrize("change", [{"hidden": (0,)}, {"epochs": 0}, {"learning_rate": float("nan")}, {"batch": 1.5}])
def test_options_out_of_range_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        FitOptions(**{"hidden": (8,), **change})  # type: ignore[arg-type]


# -- states ---------------------------------------------------------------------------------------------------------


def phrases(rng: np.random.Generator, length: int) -> list[int]:
    """Text out of phrases, each with a slot that differs: long matches that end at the slot."""
    made: list[int] = []
    while len(made) < length:
        made += [*range(10, 18), int(rng.integers(40, 64))] if rng.random() < 0.5 else [*range(20, 23), 30]
    return made[:length]


def make_traces(count: int, length: int = 150, seed: int = 0) -> list[Trace]:
    rng = np.random.default_rng(seed)
    texts = [np.array(phrases(rng, length + 60), np.int32) for _ in range(count)]
    return [Trace(f"g{i}#0", t[:60], t[60:], CLASSES, dataset="xy"[i % 2]) for i, t in enumerate(texts)]


def states_of(traces: list[Trace], most: int = 10**9) -> StateSet:
    sampling = Sampling(sum(len(t.response) for t in traces), most)
    return collect_states(walks(traces), _flat_cost(), sampling)


@pytest.fixture(scope="module")
def states() -> StateSet:
    return states_of(make_traces(12))


def test_every_position_and_every_boundary_is_a_state() -> None:
    traces = make_traces(3)
    made = states_of(traces)
    walked = list(walks(traces))
    expected: list[tuple[bool, int]] = []
    for each in walked:
        offered = [t for t in range(len(each)) if each.drafts[t] is not None]
        expected += [(False, int(each.payoffs[t])) for t in offered]
        boundaries = [c.position for c in cycles(each, make_policy("cache"), _flat_cost())]
        expected += [(True, int(each.payoffs[t])) for t in boundaries if each.drafts[t] is not None]
    boundary, payoff = made.boundary[made.main].tolist(), made.payoff[made.main].tolist()
    assert list(zip(boundary, payoff, strict=True)) == expected
    assert made.bare + made.main.sum() == 3 * 150 + sum(
        len(list(cycles(w, make_policy("cache"), _flat_cost()))) for w in walked
    )


def test_token_rows_reach_from_the_first_token_to_the_first_that_failed(states: StateSet) -> None:
    counts = np.diff(states.first)
    assert (counts == np.minimum(states.length, np.maximum(states.payoff + 1, PAYOFF))).all()
    state, place = states.token_rows()
    assert len(state) == len(states.token) == counts.sum()
    probs = TOKEN_NAMES.index("log_k")
    assert np.allclose(states.token[:, probs], np.log1p(place + 1))


def test_tokens_at_risk_are_the_accepted_ones_and_the_first_that_failed(states: StateSet) -> None:
    train, valid, test = hold_out(states)
    made = survival_problem(states, train, valid, TrainOptions())
    state, place = states.token_rows()
    for row in (*made.train[::97], *made.valid[::31]):
        assert place[row] <= states.payoff[state[row]]
        assert made.target[row] == (place[row] < states.payoff[state[row]])
    assert not set(state[made.train]) & set(test)
    share = made.weight[made.train][states.boundary[state[made.train]]].sum() / made.weight[made.train].sum()
    assert share == pytest.approx(0.5, abs=1e-3)
    assert made.weight[made.train].mean() == pytest.approx(1.0, abs=1e-3)
    assert made.gather(made.train[:3]).shape == (3, len(SurvivalPredictor.input_names))


def test_cut_responses_lose_the_states_whose_payoff_is_unknown() -> None:
    text = np.array([*range(10, 40), 1, *range(10, 20), 2, *range(10, 30)], np.int32)
    stopped = Trace("a", text[:31], text[31:], CLASSES)
    cut = Trace("a", text[:31], text[31:], CLASSES, FinishReason.LENGTH)
    whole, part = states_of([stopped]), states_of([cut])
    assert whole.censored == 0
    assert part.censored > 0
    assert len(whole) == len(part) + part.censored


def test_groups_stay_on_one_side(states: StateSet) -> None:
    parts = hold_out(states, 0.2)
    groups = [set(states.group[rows].tolist()) for rows in parts]
    assert sum(len(rows) for rows in parts) == len(states)
    assert [len(g) for g in groups] == [8, 2, 2]
    assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]


def test_the_bound_on_states_holds_and_draws_evenly(states: StateSet) -> None:
    few = states_of(make_traces(12), most=300)
    assert (~few.boundary & few.main).sum() == pytest.approx(300, rel=0.3)
    assert len(few) < len(states) / 3
    assert few.payoff.mean() == pytest.approx(states.payoff.mean(), rel=0.3)
    assert (states_of(make_traces(12), most=300).state == few.state).all()


# -- figures --------------------------------------------------------------------------------------------------------

ANSWERS = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40)


@given(ANSWERS)
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[int, bool]]) -> None:
    answer, paid = np.array([a for a, _ in pairs], np.float32), np.array([p for _, p in pairs])
    wins = [(a > b) + 0.5 * (a == b) for a in answer[paid] for b in answer[~paid]]
    assert auc(answer, paid) == pytest.approx(np.mean(wins) if wins else float("nan"), nan_ok=True)


@given(ANSWERS)
def test_the_best_threshold_has_the_best_f1(pairs: list[tuple[int, bool]]) -> None:
    answer, paid = np.array([a for a, _ in pairs], np.float32), np.array([p for _, p in pairs])
    best = best_threshold(answer, paid)
    if not paid.any():
        assert np.isnan(best)
        return
    assert scores(answer, paid, best).f1 == pytest.approx(max(scores(answer, paid, t).f1 for t in range(7)))


def test_scores_by_hand() -> None:
    answer, paid = np.array([9, 8, 7, 1, 1], np.float32), np.array([True, False, True, True, False])
    got = scores(answer, paid, 7)
    assert (got.precision, got.recall, got.f1) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert np.isnan(scores(answer, paid, 10).precision)
    assert scores(answer, paid, 10).recall == 0


def test_calibration_by_hand() -> None:
    answer = np.array([0.0, 0.05, 0.95, 1.0, 0.5], np.float32)
    paid = np.array([False, True, True, True, False])
    bins = calibration(answer, paid)
    assert [(b.low, b.states, b.paid) for b in bins] == [(0.0, 2, 0.5), (0.5, 1, 0.0), (0.9, 2, 1.0)]
    assert expected_calibration_error(bins) == pytest.approx((2 * 0.475 + 0.5 + 2 * 0.025) / 5)


def test_macro_is_the_mean_over_data_sets_that_have_the_figure(states: StateSet) -> None:
    rows = np.flatnonzero(states.boundary)
    report = judge(states, rows, fixed_rules(states), "cycle boundaries")
    rule = next(g for g in report.gates if g.name == "match-len 8")
    each = [rows[states.dataset[rows] == i] for i in range(2)]
    by_hand = [scores(states.match_len[r].astype(np.float32), states.payoff[r] >= PAYOFF, 8) for r in each]
    assert rule.macro.recall == pytest.approx(np.mean([s.recall for s in by_hand]))
    assert rule.macro.auc == pytest.approx(np.mean([s.auc for s in by_hand]))
    any_match = report.gates[0]
    assert any_match.name == "any-match"
    assert any_match.micro.precision == pytest.approx(report.paying)
    assert any_match.micro.recall == 1.0
    assert any_match.micro.auc == 0.5


# -- from traces to a file ------------------------------------------------------------------------------------------

OPTIONS = TrainOptions(
    survival=FitOptions(hidden=(16,), epochs=12, batch=256, learning_rate=5e-3, decay=True),
    scalar=FitOptions(hidden=(32, 32), epochs=8, batch=256, learning_rate=2e-3),
)


def write(directory: Path, traces: list[Trace]) -> Path:
    with TraceWriter(directory, CLASSES) as writer:
        for trace in traces:
            writer.add(trace)
    return directory


def test_training_beats_the_rules_and_the_file_says_the_same(tmp_path: Path) -> None:
    source = write(tmp_path / "train", make_traces(24))
    unseen = make_traces(6, seed=9)
    told: list[tuple[str, int, int]] = []
    report = train_predictor(
        source,
        tmp_path / "p.npz",
        "both",
        test_paths=write(tmp_path / "test", unseen),
        options=OPTIONS,
        progress=lambda *call: told.append(call),
        collected=lambda states: told.append(("collected", states, states)),
    )
    names = [what for what, _, _ in told]
    assert set(names) == {"replay", "replay test", "collected", "fit survival", "fit scalar"}
    assert names.index("collected") < names.index("fit survival")
    assert told[names.index("collected")][1] == report.test_states
    assert ("replay", 24 * 150, 24 * 150) in told
    for judged in report.judged:
        gates = {g.name: g for g in judged.gates}
        rules = [g.best.f1 for name, g in gates.items() if name not in ("survival", "scalar")]
        assert gates["survival"].best.f1 > max(rules) + 0.02
        assert gates["survival"].ece < 0.15
        assert gates["survival"].micro.auc > max(gates[name].micro.auc for name in gates if name != "survival")
    survival, scalar = load_predictor(tmp_path / "p.survival.npz"), load_predictor(tmp_path / "p.scalar.npz")
    assert isinstance(survival, SurvivalPredictor)
    assert isinstance(scalar, ScalarPredictor)
    assert survival.metadata["datasets"] == ["x", "y"]
    assert survival.metadata["tokens"] == 24 * 150
    check_against_serving(survival, scalar, list(walks(unseen)))
    tree = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert tree["judged"][0]["kind"] == "every position"
    assert [f["kind"] for f in tree["fits"]] == ["survival", "scalar"]


def check_against_serving(survival: SurvivalPredictor, scalar: ScalarPredictor, walked: list[Walk]) -> None:
    """What the report judged is what the policies would have been told."""
    made = collect_states(walked[:1], _flat_cost(), Sampling(1))
    at_six, payoff = survival_at(survival, made, PAYOFF), predict_payoff(scalar, made)
    mains = np.flatnonzero(made.main)
    count = 0
    for cycle in cycles(walked[0], make_policy("plain"), _flat_cost()):
        draft = cycle.situation.cache
        if draft is None:
            continue
        history = cycle.situation.history
        i, count = mains[count], count + 1
        curve = survival.survival(history, draft, walked[0].alternatives(cycle.position))
        assert max(0.0, payoff[i]) == pytest.approx(scalar.predict(state_features(history, draft)), abs=1e-3)
        assert at_six[i] == pytest.approx(curve[PAYOFF - 1] if len(draft) >= PAYOFF else 0.0, abs=1e-4)
    assert count > 50


def test_requests_are_held_out_of_the_same_traces(tmp_path: Path) -> None:
    source = write(tmp_path / "t", make_traces(20))
    report = train_predictor(source, tmp_path / "p.npz", options=OPTIONS)
    assert report.groups == 20
    assert 0 < report.test_states < report.states / 4
    assert sum(judged.states for judged in report.judged) == report.test_states
    assert isinstance(load_predictor(tmp_path / "p.npz"), SurvivalPredictor)


def test_loops_are_cut_before_training(tmp_path: Path) -> None:
    looping = [
        Trace(f"l{i}", t.prompt, np.append(t.response, [5, 6] * 60).astype(np.int32), CLASSES)
        for i, t in enumerate(make_traces(6))
    ]
    report = train_predictor(write(tmp_path / "t", looping), tmp_path / "p.npz", options=OPTIONS)
    assert report.looped == 6
    assert report.tokens == 6 * 152


def test_too_little_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "t", make_traces(2))
    with pytest.raises(ConfigError, match="2 groups of requests are too few"):
        train_predictor(source, tmp_path / "p.npz", options=OPTIONS)
    bare = write(tmp_path / "bare", [Trace("a", np.array([1], np.int32), np.array([2], np.int32), CLASSES)])
    with pytest.raises(ConfigError, match="no state with a cache draft"):
        train_predictor(bare, tmp_path / "p.npz", options=OPTIONS)
    empty = write(tmp_path / "empty", [Trace("a", np.array([1], np.int32), np.zeros(0, np.int32), CLASSES)])
    with pytest.raises(TraceError, match="hold no responses"):
        train_predictor(empty, tmp_path / "p.npz", options=OPTIONS)
    with pytest.raises(ConfigError, match="kind must be"):
        train_predictor(source, tmp_path / "p.npz", "magic")
    assert not (tmp_path / "p.npz").exists()
