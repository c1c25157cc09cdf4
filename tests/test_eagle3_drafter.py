"""Drafting with a head: chains and trees against brute force, and the invariants that any mix of arms must keep."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from hvd.config import Eagle3Config
from hvd.drafters import eagle3
from hvd.drafters.eagle3 import Eagle3Drafter, load_eagle3_drafter
from hvd.models.eagle3 import Eagle3Head, NumpyHead
from hvd.models.eagle3_checkpoint import load_eagle3
from hvd.models.onnx.eagle3 import load_head
from hvd.types import ROOT, Arm, Draft
from reference_head import ReferenceHead
from tiny_head import TARGET, head_config, head_tensors, target_tensor, target_with, write_head

WIDTH = 48
Text = tuple[list[int], np.ndarray]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = head_tensors(seed=3)
    return write_head(tmp_path, tensors, head_config(tensors, max_position_embeddings=1024))


@pytest.fixture
def reference() -> ReferenceHead:
    return ReferenceHead(head_tensors(seed=3), target_tensor("model.embed_tokens.weight"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def drafter_for(folder: Path, weights: str = "fp32", **config: object) -> Eagle3Drafter:
    options = Eagle3Config(**{"min_prob": 0.0, "weights": weights, **config})  # type: ignore[arg-type]
    return load_eagle3_drafter(folder, TARGET, target_tensor, options)


def some_text(count: int, seed: int = 0) -> Text:
    """Tokens, and the state of each."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 32, count).tolist(), rng.normal(size=(count, WIDTH)).astype(np.float32)


def feed(drafter: Eagle3Drafter, key: int, text: Text, start: int, stop: int) -> None:
    """Commit tokens start..stop-1 as the engine does: row i is the state of the token in front, zeros at first."""
    tokens, states = text
    shifted = np.concatenate([np.zeros((1, WIDTH), np.float32), states])
    drafter.observe(key, np.asarray(tokens[start:stop], np.int32), shifted[start:stop], prompt=False)


def opened(drafter: Eagle3Drafter, text: Text, key: int = 1) -> Eagle3Drafter:
    drafter.open(key)
    feed(drafter, key, text, 0, len(text[0]))
    return drafter


def logprobs(reference: ReferenceHead, text: Text, path: list[int]) -> np.ndarray:
    return reference.behind(text[0], torch.as_tensor(text[1]), path).log_softmax(-1).numpy()


# -- chains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4, 9])
def test_chain_is_the_likeliest_token_again_and_again(folder: Path, reference: ReferenceHead, length: int) -> None:
    text = some_text(20)
    draft = opened(drafter_for(folder, chain_length=length), text).propose(1, 100)
    assert draft is not None
    assert draft.is_chain
    assert draft.arm == Arm.EAGLE3
    path: list[int] = []
    for token, prob in zip(draft.tokens.tolist(), draft.probs.tolist(), strict=True):
        expected = logprobs(reference, text, path)
        assert token == reference.token(int(expected.argmax()))
        assert prob == pytest.approx(np.exp(expected.max()), rel=1e-4)
        path.append(token)
    assert len(path) == length
    assert draft.score == pytest.approx(np.cumprod(draft.probs).sum(), rel=1e-5)


def test_a_chain_ends_where_the_head_no_longer_believes_in_it(folder: Path) -> None:
    lengths = set()
    for size in range(12, 30):
        whole = opened(drafter_for(folder, chain_length=6), some_text(size)).propose(1, 6)
        assert whole is not None
        beliefs = np.cumprod(whole.probs.astype(np.float64))
        drafter = opened(drafter_for(folder, chain_length=6, min_prob=0.15), some_text(size))
        draft = drafter.propose(1, 6)
        assert draft is not None
        expected = max(1, int((beliefs >= 0.15).sum()))
        assert draft.tokens.tolist() == whole.tokens[:expected].tolist()
        assert len(opened(drafter.unhesitating(), some_text(size)).propose(1, 6) or ()) == 6
        lengths.add(len(draft))
    assert len(lengths) > 1


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("room", [0, 1, 3])
def test_room_bounds_the_draft(folder: Path, shape: str, room: int) -> None:
    draft = opened(drafter_for(folder, shape=shape), some_text(20)).propose(1, room)
    assert (0 if draft is None else len(draft)) == room


def test_proposing_again_gives_the_same_draft(folder: Path) -> None:
    drafter = opened(drafter_for(folder), some_text(20))
    first, second = drafter.propose(1, 4), drafter.propose(1, 2)
    assert first is not None
    assert second is not None
    assert second.tokens.tolist() == first.tokens[:2].tolist()


# -- trees ------------------------------------------------------------------------------------------------------------


def brute_force(
    reference: ReferenceHead, text: Text, total: int, depth: int, top_k: int
) -> dict[tuple[int, ...], float]:
    """The tree of EAGLE-2, section 4.1: {path of tokens: natural-log probability of the path}."""
    grown: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path, above in frontier.items():
            given = logprobs(reference, text, list(path))
            for entry in np.argsort(-given)[:top_k]:
                level[(*path, reference.token(int(entry)))] = above + float(given[entry])
        grown |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(grown.items(), key=lambda item: -item[1])[:total])


def paths_of(draft: Draft) -> dict[tuple[int, ...], float]:
    """{path of tokens: product of probs along it}; topological order is checked on the way."""
    paths: list[tuple[tuple[int, ...], float]] = []
    for node, (token, parent, prob) in enumerate(zip(draft.tokens, draft.parents, draft.probs, strict=True)):
        assert ROOT <= parent < node
        above, before = paths[parent] if parent != ROOT else ((), 1.0)
        paths.append(((*above, int(token)), before * float(prob)))
    assert len(dict(paths)) == len(paths)
    return dict(paths)


@pytest.mark.parametrize(
    ("total", "depth", "top_k"), [(32, 8, 4), (8, 4, 3), (5, 6, 8), (1, 1, 1), (100, 3, 8), (6, 9, 1), (12, 2, 40)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_tree_equals_brute_force(
    folder: Path, reference: ReferenceHead, total: int, depth: int, top_k: int, seed: int
) -> None:
    text = some_text(15, seed)
    drafter = opened(drafter_for(folder, shape="tree", total=total, depth=depth, top_k=top_k), text)
    draft = drafter.propose(1, 1000)
    assert draft is not None
    found, expected = paths_of(draft), brute_force(reference, text, total, depth, top_k)
    assert set(found) == set(expected)
    for path, prob in found.items():
        assert prob == pytest.approx(np.exp(expected[path]), rel=1e-3)
    assert draft.score == pytest.approx(sum(found.values()), rel=1e-4)


def test_a_tree_that_is_far_too_large_stops_growing(folder: Path) -> None:
    drafter = drafter_for(folder, shape="tree", total=1024, depth=1000, top_k=8)
    draft = opened(drafter, some_text(10)).propose(1, 1024)
    assert draft is not None
    assert len(paths_of(draft)) == 1024


def test_tree_of_a_head_without_preferences_keeps_its_ancestors(tmp_path: Path) -> None:
    """All probabilities equal: every choice is a tie."""
    tensors = head_tensors()
    tensors["lm_head.weight"][:] = 0
    drafter = drafter_for(write_head(tmp_path, tensors, head_config(tensors)), shape="tree", total=20, depth=4)
    draft = opened(drafter, some_text(10)).propose(1, 20)
    assert draft is not None
    assert len(paths_of(draft)) == 20


# -- whatever was committed, by whichever arm -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("weights", ["numpy", "fp32", "int8", "int4"])
def test_k3_08_draft_logits_are_those_of_a_fresh_head_after_every_round(folder: Path, shape: str, weights: str) -> None:
    """50 rounds: the head drafts and a random part is accepted, or another arm commits 1 to 12 tokens.

    On ONNX Runtime even bit for bit.
    """
    rng = np.random.default_rng(8)
    text = some_text(600, seed=8)
    drafter = Eagle3Drafter(head_for(folder, weights), Eagle3Config(shape=shape, total=12, depth=4))
    drafter.open(1)
    seen = 7
    feed(drafter, 1, text, 0, seen)
    for _ in range(50):
        committed = int(rng.integers(1, 13))
        if rng.random() < 0.6:
            draft = drafter.propose(1, 12)
            assert draft is not None
            committed = int(rng.integers(1, len(draft) + 2))
            assert drafter.backlog(1) == 0
            request = drafter._requests[1]
            assert request.cache.length == seen - 1 == request.committed - 1
            assert request.output is not None
            fresh = fresh_logits(folder, weights, (text[0][:seen], text[1][:seen]))
            np.testing.assert_allclose(request.output.logits[-1], fresh, atol=1e-4 if weights == "numpy" else 0, rtol=0)
        feed(drafter, 1, text, seen, seen + committed)
        seen += committed


def head_for(folder: Path, weights: str) -> Eagle3Head:
    if weights == "numpy":
        return NumpyHead(load_eagle3(folder, TARGET, target_tensor))
    return load_head(folder, TARGET, target_tensor, weights=weights)


def fresh_logits(folder: Path, weights: str, text: Text) -> np.ndarray:
    """Draft logits of a new head that eats the whole text in one pass."""
    head = head_for(folder, weights)
    tokens = np.asarray(text[0][1:], np.int32)
    return head.forward(tokens, head.fuse(text[1][:-1]), head.open()).logits[-1]


def test_requests_do_not_touch_each_other(folder: Path) -> None:
    drafter = drafter_for(folder)
    texts = {key: some_text(12 + key, seed=key) for key in (1, 2, 3)}
    for key in texts:
        drafter.open(key)
    for stop in range(1, 16):
        for key, text in texts.items():
            if stop <= len(text[0]):
                feed(drafter, key, text, stop - 1, stop)
                drafter.propose(key, 4)
    drafter.close(2, keep=False)
    for key in (1, 3):
        alone = opened(drafter_for(folder), texts[key]).propose(1, 4)
        together = drafter.propose(key, 4)
        assert alone is not None
        assert together is not None
        assert together.tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(together.probs, alone.probs, atol=1e-5)


def test_observe_copies_what_the_target_may_overwrite(folder: Path) -> None:
    text = some_text(20)
    expected = opened(drafter_for(folder), text).propose(1, 4)
    drafter = drafter_for(folder)
    drafter.open(1)
    tokens, states = np.asarray(text[0], np.int32), np.concatenate([np.zeros((1, WIDTH), np.float32), text[1][:-1]])
    drafter.observe(1, tokens, states, prompt=True)
    tokens[:], states[:] = 0, np.nan
    draft = drafter.propose(1, 4)
    assert draft is not None
    assert expected is not None
    assert draft.tokens.tolist() == expected.tokens.tolist()


def test_first_token_alone_offers_nothing(folder: Path) -> None:
    drafter, text = drafter_for(folder), some_text(2)
    drafter.open(1)
    assert drafter.propose(1, 4) is None
    feed(drafter, 1, text, 0, 1)
    assert drafter.limit(1) == drafter.backlog(1) == 0
    assert drafter.propose(1, 4) is None
    feed(drafter, 1, text, 1, 2)
    assert (drafter.limit(1), drafter.backlog(1)) == (4, 1)
    assert drafter.propose(1, 4) is not None


def test_backlog_counts_what_was_committed_without_the_head(folder: Path) -> None:
    drafter, text = opened(drafter_for(folder), some_text(20)), some_text(30)
    assert drafter.backlog(1) == 19
    drafter.propose(1, 1)
    assert drafter.backlog(1) == 0
    feed(drafter, 1, text, 20, 26)
    assert drafter.backlog(1) == 6


def test_a_long_backlog_is_eaten_early_and_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = some_text(100)
    expected = opened(drafter_for(folder), text).propose(1, 4)
    monkeypatch.setattr(eagle3, "MAX_PENDING_BYTES", 20 * WIDTH * 4)
    monkeypatch.setattr(eagle3, "CHUNK", 8)
    drafter = drafter_for(folder)
    drafter.open(1)
    for start in range(0, 100, 10):
        feed(drafter, 1, text, start, start + 10)
        assert drafter.backlog(1) <= 20
    draft = drafter.propose(1, 4)
    assert draft is not None
    assert expected is not None
    assert draft.tokens.tolist() == expected.tokens.tolist()


def test_layers_are_picked_from_those_that_the_target_gives(folder: Path) -> None:
    """The target returns layers 1, 9, 2, 6; the head wants 2, 6, 9."""
    text = some_text(20)
    expected = opened(drafter_for(folder), text).propose(1, 4)
    low, middle, high = np.split(text[1], 3, axis=1)
    wide = np.concatenate([np.full_like(low, np.nan), high, low, middle], axis=1)
    drafter = Eagle3Drafter(
        NumpyHead(load_eagle3(folder, TARGET, target_tensor)), Eagle3Config(min_prob=0.0), (1, 9, 2, 6)
    )
    drafter.open(1)
    rows = np.concatenate([np.zeros((1, 64), np.float32), wide[:-1]])
    drafter.observe(1, np.asarray(text[0], np.int32), rows, prompt=True)
    draft = drafter.propose(1, 4)
    assert draft is not None
    assert expected is not None
    assert draft.tokens.tolist() == expected.tokens.tolist()


def test_missing_or_misshaped_states_are_refused(folder: Path) -> None:
    drafter = drafter_for(folder)
    drafter.open(1)
    assert drafter.wants_hidden
    with pytest.raises(ValueError, match=r"hidden states of shape \(3, 48\), got None"):
        drafter.observe(1, np.zeros(3, np.int32), None, prompt=True)
    with pytest.raises(ValueError, match=r"\(3, 48\), got \(3, 16\)"):
        drafter.observe(1, np.zeros(3, np.int32), np.zeros((3, 16), np.float32), prompt=True)


# -- the head's position limit ----------------------------------------------------------------------------------------


def limited(tmp_path: Path, shape: str) -> Eagle3Drafter:
    tensors = head_tensors(seed=3)
    folder = write_head(tmp_path, tensors, head_config(tensors, max_position_embeddings=32))
    config = Eagle3Config(shape=shape, chain_length=4, total=12, depth=4)
    return load_eagle3_drafter(folder, target_with(context_limit=512), target_tensor, config)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_k3_06_drafting_ends_at_the_heads_own_limit(
    tmp_path: Path, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompt 20 -> 120 tokens and a prompt of 40, two requests at once, max positions 32."""
    drafter, text = limited(tmp_path, shape), some_text(120)
    with caplog.at_level(logging.WARNING, "hvd"):
        opened(drafter, (text[0][:20], text[1][:20]), key=1)
        opened(drafter, (text[0][:40], text[1][:40]), key=2)
        assert drafter.limit(2) == drafter.backlog(2) == 0
        assert drafter.propose(2, 8) is None
        for stop in range(21, 121):
            draft = drafter.propose(1, 8)
            left = 32 - (stop - 1)
            depth = 0 if draft is None else max(map(len, paths_of(draft)))
            assert (depth > 0) == (left > 0)
            assert depth <= max(left, 0)
            assert (drafter.limit(1) == 0) == (left <= 0)
            feed(drafter, 1, text, stop - 1, stop)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "limit of 32 positions" in caplog.text


def test_k3_06_a_short_request_goes_on_beside_a_long_one(tmp_path: Path) -> None:
    drafter, text = limited(tmp_path, "chain"), some_text(60)
    opened(drafter, text, key=1)
    short = (text[0][:10], text[1][:10])
    opened(drafter, short, key=2)
    assert drafter.propose(1, 4) is None
    assert drafter.propose(2, 4) is not None
