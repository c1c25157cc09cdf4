"""The sampler: filter order, penalties, masks, exact distributions, log-probabilities (K1-01, K1-03, K1-10, K1-13)."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from hvd.config import SamplingParams
from hvd.errors import ConfigError, RequestError
from hvd.verify.noise import uniform
from hvd.verify.sampler import Sampler, raw_logprobs

V = 16
LOGITS = np.random.default_rng(0).normal(0, 2, V).astype(np.float32)


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, min-p as docs/losslessness.md states them, one token at a time and unhurried."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.temperature == 0 or params.top_k == 1:
        return np.eye(len(logits))[order[0]]
    probs = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(probs[i] for i in order)
    if params.top_p < 1:
        kept, mass = [], 0.0
        for i in order:
            if kept and mass >= params.top_p * total:
                break
            kept.append(i)
            mass += probs[i]
        order = kept
    order = [i for i in order if probs[i] >= params.min_p * probs[order[0]]]
    result = np.zeros(len(logits))
    result[order] = probs[order] / probs[order].sum()
    return result


def draws(params: SamplingParams, n: int) -> np.ndarray:
    sampler = Sampler(params, [0])
    return np.bincount([sampler.next(LOGITS) for _ in range(n)], minlength=V)


@pytest.mark.parametrize("top_k", [1, 2, 5, 0, -1, 10**6])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.99, 1.0])
def test_distribution_is_that_of_the_written_order(top_k: int, top_p: float) -> None:
    for min_p, temperature in itertools.product((0.0, 0.1, 1.0), (0.01, 1.0, 2.0)):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
        expected = reference_distribution(LOGITS, params)
        counts = draws(params, 1500)
        assert counts[expected == 0].sum() == 0, "a token outside the candidates was drawn"
        likely = expected * 1500 >= 5
        if likely.sum() > 1:
            rest_seen, rest_expected = counts[~likely].sum(), expected[~likely].sum() * 1500
            seen = np.append(counts[likely], rest_seen) if rest_expected > 0 else counts[likely]
            want = np.append(expected[likely] * 1500, rest_expected) if rest_expected > 0 else expected[likely] * 1500
            g = stats.power_divergence(seen, want * seen.sum() / want.sum(), lambda_="log-likelihood")
            assert g.pvalue > 1e-5


@example(logits=[0.0, 5.427001159978022e-31], p=0.5, k=0)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=600),
    p=st.floats(0.001, 0.999),
    k=st.integers(0, 40),
)
def test_candidates_never_run_out_and_match_the_reference(logits: list[float], p: float, k: int) -> None:
    row = np.asarray(logits, np.float32)
    params = SamplingParams(temperature=1.0, top_k=k, top_p=p, seed=3)
    expected = reference_distribution(row, params)
    token = Sampler(params, [0]).next(row)
    # At the edge of top-p the two sums may round differently, and of equally likely tokens another one be kept.
    whole = reference_distribution(row, replace(params, top_p=1.0))
    edge = np.isclose(np.sort(whole)[::-1].cumsum(), p, atol=1e-9).any()
    assert expected[token] > 0 or edge or np.isclose(whole[token], whole[expected > 0].min(), rtol=1e-9)


def test_greedy_takes_the_first_of_equals() -> None:
    assert Sampler(SamplingParams(), [0]).next(np.asarray([1, 3, 3, 0], np.float32)) == 1


def test_penalties_follow_every_committed_token() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(params, [2])
    row = np.asarray([4.0, 3.9, 3.8, -1.0], np.float32)
    seen: Counter[int] = Counter()
    for _ in range(12):
        want = row.astype(np.float64)
        for i in {2} | set(seen):
            want[i] = want[i] / 2 if want[i] > 0 else want[i] * 2
        for i, n in seen.items():
            want[i] -= 0.5 + 0.25 * n
        assert sampler.next(row) == int(np.argmax(want))
        seen[sampler.output[-1]] += 1
    assert len(seen) > 2


def test_bias_bans_and_forces() -> None:
    best = int(np.argmax(LOGITS))
    banned = Sampler(SamplingParams(logit_bias={best: -100.0}, temperature=1.5, seed=1), [0])
    assert best not in {banned.next(LOGITS) for _ in range(300)}
    forced = Sampler(SamplingParams(logit_bias={(best + 1) % V: 100.0}), [0])
    assert {forced.next(LOGITS) for _ in range(20)} == {(best + 1) % V}


def test_bias_beyond_the_vocabulary_is_harmless() -> None:
    assert Sampler(SamplingParams(logit_bias={V + 5: 100.0}), [0]).next(LOGITS) == int(np.argmax(LOGITS))


def test_bad_words_fall_only_behind_their_beginning() -> None:
    row = np.asarray([0.0, 5.0, 4.0, 1.0], np.float32)
    sampler = Sampler(SamplingParams(bad_words=((1, 1),)), [1])
    assert [sampler.next(row) for _ in range(4)] == [1, 2, 1, 2]


def test_min_tokens_masks_stops_until_enough_are_out() -> None:
    row = np.asarray([0.0, 5.0, 4.0], np.float32)
    sampler = Sampler(SamplingParams(min_tokens=2), [0], frozenset({1, 99}))
    assert [sampler.next(row) for _ in range(3)] == [2, 2, 1]


def test_processors_see_the_history_and_the_row_stays_untouched() -> None:
    seen: list[int] = []

    def forbid_last(output: list[int], logits: np.ndarray) -> None:
        seen.append(len(output))
        if output:
            logits[output[-1]] = -np.inf

    row = LOGITS.copy()
    sampler = Sampler(SamplingParams(logprobs=2), [0], processors=[forbid_last])
    tokens = [sampler.next(row) for _ in range(6)]
    assert all(a != b for a, b in itertools.pairwise(tokens))
    assert seen == list(range(6))
    assert np.array_equal(row, LOGITS)
    assert sampler.logprobs[1] == raw_logprobs(LOGITS, tokens[1], 2), "log-probabilities are those of the raw row"


def test_logprobs_equal_log_softmax() -> None:
    entry = raw_logprobs(LOGITS, 3, 5)
    want = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert entry.logprob == pytest.approx(want[3], abs=1e-6)
    assert [i for i, _ in entry.top] == list(np.argsort(-LOGITS)[:5])
    assert raw_logprobs(LOGITS, 3, 0).top == ()
    assert len(raw_logprobs(LOGITS, 3, 1000).top) == V


def test_nothing_allowed_is_an_error_of_that_request() -> None:
    with pytest.raises(RequestError, match="no token can follow"):
        Sampler(SamplingParams(), [0]).next(np.full(4, np.nan, np.float32))
    with pytest.raises(RequestError, match="no token can follow"):
        Sampler(SamplingParams(bad_words=((0,), (1,)), temperature=1.0), [0]).next(np.zeros(2, np.float32))


def test_noise_is_uniform_and_depends_on_seed_and_position_alone() -> None:
    along = [uniform(5, i) for i in range(4000)]
    across = [uniform(i, 0) for i in range(4000)]
    assert stats.kstest(along, "uniform").pvalue > 1e-4
    assert stats.kstest(across, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 0.06
    assert uniform(5, 7) == along[7]
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(
            ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
            (float("nan"), float("inf"), "1", True, [], -1000.0),
        ),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", 1.0),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", "text"),
        ("stop_token_ids", (-1,)),
        ("bad_words", ((),)),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {-1: 0.0}),
    ],
)
def test_bad_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.split("_")[0]):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
