"""The fakes keep the promises of the interfaces they stand for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.models.target import Span
from hvd.testing import FakeTarget, ScriptedDrafter, ScriptedHead
from hvd.types import Arm, Draft, Float32Array, Int32Array

TEXT = np.random.default_rng(5).integers(0, 64, 300).astype(np.int32)


def ids(*tokens: int) -> Int32Array:
    return np.array(tokens, dtype=np.int32)


def greedy(target: FakeTarget, prompt: Int32Array, count: int) -> list[int]:
    cache, piece, text = target.open(), prompt, []
    for _ in range(count):
        [output] = target.forward([Span(cache, piece, rows="last")])
        cache.keep(range(len(piece)))
        text.append(int(output.logits[0].argmax()))
        piece = ids(text[-1])
    return text


@pytest.mark.parametrize("order", [1, 2, 5])
def test_a_row_depends_on_the_last_tokens_and_on_nothing_else(order: int) -> None:
    target = FakeTarget(order=order)
    [whole] = target.forward([Span(target.open(), TEXT)])
    other = TEXT.copy()
    other[: 100 - order + 1] = (other[: 100 - order + 1] + 1) % 64
    [changed] = target.forward([Span(target.open(), other)])
    np.testing.assert_array_equal(whole.logits[100:], changed.logits[100:])
    assert not np.array_equal(whole.logits[99], changed.logits[99])
    np.testing.assert_array_equal(whole.logits[7], target.logits(TEXT[:8].tolist()))
    np.testing.assert_array_equal(whole.logits[0], target.logits(TEXT[:1].tolist()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cuts_trees_and_batches_give_the_same_bits(data: st.DataObject) -> None:
    target = FakeTarget(order=3)
    cache, text = target.open(), TEXT[: data.draw(st.integers(1, 20))]
    [output] = target.forward([Span(cache, text)])
    cache.keep(range(len(text)))
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(1, 10))
        tokens = np.array(data.draw(st.lists(st.integers(0, 63), min_size=size, max_size=size)), np.int32)
        parents = np.array([data.draw(st.integers(-1, i - 1)) for i in range(size)], np.int32)
        other = target.open()
        output, beside = target.forward([Span(cache, tokens, parents, hidden=True), Span(other, TEXT[:5])])
        np.testing.assert_array_equal(beside.logits[4], target.logits(TEXT[:5].tolist()))
        assert output.hidden is not None
        path = [data.draw(st.integers(0, size - 1))]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        expected = target.logits([*text.tolist(), *tokens[path].tolist()])
        np.testing.assert_array_equal(output.logits[path[-1]], expected)
        cache.keep(path)
        text = np.concatenate([text, tokens[path]])
    assert cache.tokens[: cache.length].tolist() == text.tolist()


def test_greedy_text_repeats_itself_after_some_variety() -> None:
    text = greedy(FakeTarget(), ids(1, 2, 3), 400)
    assert len(set(text[:40])) >= 10
    assert len(set(pairwise(text))) < 300


def test_seeds_differ_and_equal_seeds_agree() -> None:
    a, b, c = (greedy(FakeTarget(seed=seed), ids(1), 30) for seed in (1, 1, 2))
    assert a == b
    assert a != c


def test_rows_hidden_and_log() -> None:
    target = FakeTarget(vocab_size=10, hidden_size=4, aux_layers=(1, 3), min_width=2)
    caches = [target.open() for _ in range(3)]
    outputs = target.forward(
        [
            Span(caches[0], ids(1, 2, 3), rows="all", hidden=True),
            Span(caches[1], ids(1, 2), rows="last"),
            Span(caches[2], ids(1), rows="none"),
        ]
    )
    assert [output.logits.shape for output in outputs] == [(3, 10), (1, 10), (0, 10)]
    assert [output.logits.dtype for output in outputs] == [np.float32] * 3
    assert outputs[0].hidden is not None
    assert outputs[0].hidden.shape == (3, 8)
    assert outputs[1].hidden is None
    np.testing.assert_array_equal(outputs[0].logits[1], outputs[1].logits[0])
    assert target.passes == [[3, 2, 1]]
    assert target.spec.min_width == 2
    assert target.opened == caches


def test_the_target_refuses_as_a_real_one_does() -> None:
    target = FakeTarget(vocab_size=8, context_limit=4)
    for tokens in (ids(), ids(8), ids(-1), ids(0, 0, 0, 0, 0)):
        with pytest.raises(ValueError):
            target.forward([Span(target.open(), tokens)])
    assert target.passes == []
    with pytest.raises(ValueError, match="order must be at least 1"):
        FakeTarget(order=0)


def test_a_scripted_drafter_says_what_its_script_says() -> None:
    drafter = ScriptedDrafter(lambda text, room: [int(text[-1]) + 1, -1, 2**31, 7])
    drafter.open(1)
    drafter.observe(1, ids(4, 5), None, prompt=True)
    drafter.observe(1, ids(6), None, prompt=False)
    draft = drafter.propose(1, 10)
    assert draft is not None
    assert draft.tokens.tolist() == [7, -1, -(2**31), 7]
    assert draft.is_chain
    assert draft.arm == Arm.CACHE
    shorter = drafter.propose(1, 2)
    assert shorter is not None
    assert shorter.tokens.tolist() == [7, -1]
    assert drafter.propose(1, 0) is None
    assert (drafter.texts, drafter.prompts) == ({1: [4, 5, 6]}, {1: 2})
    assert drafter.rooms == [(1, 10), (1, 2), (1, 0)]


@pytest.mark.parametrize("nothing", [None, []])
def test_a_script_may_offer_nothing(nothing: list[int] | None) -> None:
    drafter = ScriptedDrafter(lambda text, room: nothing)
    drafter.open(1)
    assert drafter.propose(1, 4) is None


def test_a_script_may_offer_a_tree() -> None:
    tree = Draft(ids(1, 2, 3), ids(-1, -1, 0), np.ones(3, np.float32), Arm.EAGLE3, 1.0, 0, ids(0, 0, 0), ids(0, 0, 0))
    drafter = ScriptedHead(lambda text, room: tree)
    drafter.open(1)
    assert drafter.propose(1, 3) is tree
    assert drafter.arm == Arm.EAGLE3


@pytest.mark.parametrize("hidden", [None, np.zeros((1, 4), np.float32)])
def test_missing_hidden_states_are_the_callers_fault(hidden: Float32Array | None) -> None:
    drafter = ScriptedHead(lambda text, room: None, wants_hidden=True)
    drafter.open(1)
    with pytest.raises(ValueError, match="2 tokens need as many rows of hidden states"):
        drafter.observe(1, ids(1, 2), hidden, prompt=True)


def test_the_life_of_a_key_is_watched() -> None:
    drafter = ScriptedDrafter(lambda text, room: [1])
    drafter.open(1)
    assert drafter.live == {1}
    drafter.close(1, keep=True)
    assert (drafter.live, drafter.closed) == (set(), {1: True})
    for misuse in (lambda: drafter.propose(1, 1), lambda: drafter.close(1, keep=False), lambda: drafter.open(1)):
        with pytest.raises(ValueError, match="key 1"):
            misuse()
