"""Features: the same bits live and rebuilt, whatever the cycles; and what single ones mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.payoff.features import POLICY_NAMES, STATE_NAMES, TOKEN_NAMES, state_features, token_features
from hvd.payoff.history import HIT_WINDOW, History
from hvd.types import Arm, Draft

VOCAB = 50
CLASSES = np.random.default_rng(3).integers(0, 256, VOCAB).astype(np.uint8)
TEXT_COLUMNS = [i for i, name in enumerate(STATE_NAMES) if name not in POLICY_NAMES]


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def make_draft(n: int, seed: int = 0, match_len: int = 5) -> Draft:
    rng = np.random.default_rng(seed)
    counts = np.sort(rng.integers(1, 9, n))[::-1].astype(np.int32)
    parents = np.concatenate(([12], counts[:-1])).astype(np.int32)
    probs = (counts / parents).astype(np.float32)
    ids = rng.integers(0, VOCAB, n).astype(np.int32)
    return Draft.chain(ids, Arm.CACHE, probs, float(np.cumprod(probs).sum()), match_len, counts, parents)


@st.composite
def cycles(draw: st.DrawFn) -> list[tuple[np.ndarray, np.ndarray, Arm, int, int]]:
    out = []
    for size in draw(st.lists(st.integers(1, 70), max_size=12)):
        ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
        hits = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
        arm = draw(st.sampled_from(list(Arm)))
        out.append((np.array(ids, np.int32), np.array(hits, np.uint8), arm, size - 1, size - 1))
    return out


def live(prompt: np.ndarray, done: list[tuple[np.ndarray, np.ndarray, Arm, int, int]], chunk: int) -> History:
    history = History(CLASSES)
    for start in range(0, len(prompt), chunk):
        history.prompt(prompt[start : start + chunk])
    for ids, hits, arm, drafted, accepted in done:
        history.commit(ids, hits, arm, drafted, accepted, offered=0)
    return history


@settings(max_examples=60, deadline=None)
@given(cycles(), st.integers(1, 40), st.integers(1, 64), st.integers(0, 99))
def test_live_and_rebuilt_features_have_the_same_bits(done, chunk: int, length: int, seed: int) -> None:  # type: ignore[no-untyped-def]
    prompt = np.random.default_rng(seed).integers(0, VOCAB, 40).astype(np.int32)
    draft = make_draft(length, seed)
    served = live(prompt, done, chunk)
    rebuilt = live(prompt, done, len(prompt))
    assert state_features(served, draft).tobytes() == state_features(rebuilt, draft).tobytes()
    assert token_features(served, draft).tobytes() == token_features(rebuilt, draft).tobytes()
    # Token by token, as a replay of plain decoding walks: all but the policy's own columns must agree.
    walked = History(CLASSES)
    walked.prompt(prompt)
    for ids, hits, *_ in done:
        for i in range(len(ids)):
            walked.commit(ids[i : i + 1], hits[i : i + 1], Arm.PLAIN, 0, 0, 0)
    one, other = state_features(served, draft), state_features(walked, draft)
    assert one[TEXT_COLUMNS].tobytes() == other[TEXT_COLUMNS].tobytes()
    assert token_features(served, draft).tobytes() == token_features(walked, draft).tobytes()


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 200])
def test_shapes_and_finiteness(length: int) -> None:
    history = live(tokens(1, 2, 3), [(tokens(4, 5), np.ones(2, np.uint8), Arm.CACHE, 4, 1)], 3)
    draft = make_draft(length)
    state, token = state_features(history, draft), token_features(history, draft)
    assert state.shape == (len(STATE_NAMES),)
    assert state.dtype == np.float32
    assert token.shape == (length, len(TOKEN_NAMES))
    assert token.dtype == np.float32
    assert np.isfinite(state).all()
    assert np.isfinite(token).all()
    assert len(set(STATE_NAMES)) == len(STATE_NAMES)
    assert len(set(TOKEN_NAMES)) == len(TOKEN_NAMES)


def test_features_before_anything_happened_are_finite() -> None:
    history = History(History.UNKNOWN_CLASSES)
    draft = make_draft(3, match_len=0)
    assert np.isfinite(state_features(history, draft)).all()
    assert np.isfinite(token_features(history, draft)).all()


def test_shadow_hits_by_window() -> None:
    history = History(CLASSES)
    hits = [1, 0, 0, 1, 1, 1]
    history.commit(tokens(*range(6)), np.array(hits, np.uint8), Arm.PLAIN, 0, 0, 0)
    assert [history.hit(i) for i in range(6)] == [bool(h) for h in reversed(hits)]
    assert history.hit_run == 3
    assert history.hit_runs == 2
    assert history.hit_rate(2) == 2.5 / 3
    assert history.hit_rate(64) == 4.5 / 7
    state = dict(zip(STATE_NAMES, state_features(history, make_draft(4)), strict=True))
    assert state["hits_4"] == np.float32(3.5 / 5)
    assert state["hit_run"] == np.float32(np.log1p(3))
    assert state["hit_run_mean"] == np.float32(np.log1p(2))


def test_only_the_window_of_hits_is_kept() -> None:
    history = History(CLASSES)
    for _ in range(3):
        history.commit(tokens(*[1] * 50), np.ones(50, np.uint8), Arm.PLAIN, 0, 0, 0)
    assert history.hit_run == HIT_WINDOW
    assert history.generated_length == 150
    with pytest.raises(ValueError, match="remembered"):
        history.hit(HIT_WINDOW)


def test_hits_must_match_tokens() -> None:
    with pytest.raises(ValueError, match="one entry a token"):
        History(CLASSES).commit(tokens(1, 2), np.ones(1, np.uint8), Arm.PLAIN, 0, 0, 0)


def test_recent_cycles() -> None:
    history = History(CLASSES)
    for arm, drafted, accepted in ((Arm.CACHE, 10, 7), (Arm.PLAIN, 0, 0), (Arm.CACHE, 10, 1), (Arm.EAGLE3, 4, 2)):
        ids = np.zeros(accepted + 1, np.int32)
        history.commit(ids, np.zeros(len(ids), np.uint8), arm, drafted, accepted, 10)
    state = dict(zip(STATE_NAMES, state_features(history, make_draft(4)), strict=True))
    assert state["cache_rate"] == 0.5
    assert [state[f"accepted_{i}"] for i in (1, 2, 3)] == [np.float32(np.log1p(a)) for a in (2, 1, 0)]
    assert state["accepted_mean"] == np.float32(np.log1p(2.5))
    assert state["cache_accept_ratio"] == np.float32(8 / 20)


def test_token_columns() -> None:
    history = History(CLASSES)
    history.prompt(tokens(7))
    draft = Draft.chain(
        tokens(3, 3, 9),
        Arm.CACHE,
        np.array([0.5, 1.0, 0.25], np.float32),
        1.0,
        2,
        counts=tokens(4, 4, 1),
        parent_counts=tokens(8, 4, 4),
    )
    rows = [dict(zip(TOKEN_NAMES, row, strict=True)) for row in token_features(history, draft)]
    assert [r["product"] for r in rows] == [0.5, 0.5, 0.125]
    assert [r["single"] for r in rows] == [0, 0, 1]
    assert [r["repeat"] for r in rows] == [0, 1, 0]
    assert [r["log_depth"] for r in rows] == [np.float32(np.log(2 + k + 1)) for k in (1, 2, 3)]

    def bits(prefix: str, row: dict[str, float]) -> list[float]:
        return [row[name] for name in TOKEN_NAMES if name.startswith(prefix)]

    def expected(token: int) -> list[float]:
        return [float((int(CLASSES[token]) >> bit) & 1) for bit in range(8)]

    assert [bits("token_", r) for r in rows] == [expected(t) for t in (3, 3, 9)]
    assert [bits("before_", r) for r in rows] == [expected(t) for t in (7, 3, 3)]


def test_ids_beyond_the_vocabulary_have_no_class() -> None:
    history = History(CLASSES)
    assert history.classes(tokens(VOCAB, 2**31 - 1)).tolist() == [0, 0]
    history.prompt(tokens(VOCAB + 5, -1))
    draft = Draft.chain(tokens(-1, VOCAB, 2**31 - 1), Arm.CACHE)
    assert np.isfinite(token_features(history, draft)).all()
