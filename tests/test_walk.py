"""The walk down a draft, and what may be shown to the target at all (K4-09, K5-03)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd.config import SamplingParams
from hvd.types import Arm, Draft
from hvd.verify.sampler import Sampler
from hvd.verify.walk import sound_part, walk

V = 8


def rule(prefix: tuple[int, ...]) -> np.ndarray:
    """A target whose next token depends on the whole prefix."""
    return np.random.default_rng([7, *prefix]).normal(0, 3, V).astype(np.float32)


def tree(tokens: list[int], parents: list[int]) -> Draft:
    n = len(tokens)
    zeros = np.zeros(n, np.int32)
    return Draft(
        np.asarray(tokens, np.int32),
        np.asarray(parents, np.int32),
        np.ones(n, np.float32),
        Arm.EAGLE3,
        0.0,
        0,
        zeros,
        zeros,
    )


def rows_of(prefix: tuple[int, ...], draft: Draft | None) -> np.ndarray:
    """What the target's pass returns: a row behind the prefix and behind each node."""
    rows = [rule(prefix)]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True) if draft is not None else ():
        paths.append((*(paths[parent] if parent >= 0 else prefix), int(token)))
        rows.append(rule(paths[-1]))
    return np.stack(rows)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(1, 12))
    return tree([draw(st.integers(0, V - 1)) for _ in range(n)], [draw(st.integers(-1, i - 1)) for i in range(n)])


@given(data=st.data(), seed=st.integers(0, 50), temperature=st.sampled_from([0.0, 1.0]))
def test_any_drafts_give_the_plain_text(data: st.DataObject, seed: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, presence_penalty=0.7, max_tokens=None)
    plain = Sampler(params, [1])
    for _ in range(12):
        plain.next(rule((1, *plain.output)))
    sampler = Sampler(params, [1])
    while len(sampler.output) < 12:
        draft = data.draw(drafts() | st.none())
        before = len(sampler.output)
        walked = walk(draft, rows_of((1, *sampler.output), draft), sampler, lambda token: False)
        assert len(walked.tokens) == len(walked.path) + 1 == len(sampler.output) - before
        assert [int(draft.tokens[node]) for node in walked.path] == walked.tokens[:-1] if draft else not walked.path
    assert sampler.output[:12] == plain.output


def test_a_draft_of_the_true_text_is_accepted_whole() -> None:
    plain = Sampler(SamplingParams(), [1])
    for _ in range(6):
        plain.next(rule((1, *plain.output)))
    draft = Draft.chain(np.asarray(plain.output[:5], np.int32), Arm.CACHE)
    walked = walk(draft, rows_of((1,), draft), Sampler(SamplingParams(), [1]), lambda token: False)
    assert walked.tokens == plain.output
    assert walked.path == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("place", range(6))
def test_the_walk_ends_where_the_request_ends(place: int) -> None:
    plain = Sampler(SamplingParams(), [1])
    for _ in range(6):
        plain.next(rule((1, *plain.output)))
    draft = Draft.chain(np.asarray(plain.output[:5], np.int32), Arm.CACHE)
    seen: list[int] = []
    walked = walk(
        draft, rows_of((1,), draft), Sampler(SamplingParams(), [1]), lambda t: seen.append(t) or len(seen) > place
    )
    assert walked.tokens == plain.output[: place + 1]
    assert len(walked.path) == place


@pytest.mark.parametrize("bad", [-1, V, V + 5, 2**31 - 1])
@pytest.mark.parametrize("place", range(4))
def test_a_draft_is_cut_at_its_first_bad_id(bad: int, place: int) -> None:
    tokens = [1, 2, 3, 4]
    tokens[place] = bad
    sound = sound_part(tree(tokens, [-1, 0, 1, 2]), V, 10)
    assert (len(sound) if sound is not None else 0) == place


def test_a_draft_is_cut_to_the_room_and_at_a_false_parent() -> None:
    assert sound_part(tree([1, 2, 3], [-1, 0, 1]), V, 0) is None
    assert len(sound_part(tree([1, 2, 3], [-1, 0, 1]), V, 2) or ()) == 2
    assert len(sound_part(tree([1, 2, 3], [-1, 1, 1]), V, 9) or ()) == 1
    assert len(sound_part(tree([1, 2, 3], [-1, -2, 1]), V, 9) or ()) == 1
    assert sound_part(None, V, 9) is None
