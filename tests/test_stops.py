"""Stops and limits inside accepted drafts, and what a stream shows (hard cases K2-01, K2-04, K2-07)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.types import Arm, FinishReason
from support import OracleDrafter, make_llm, plain

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
V = 300
"""Above 256, so that the tiny tokenizer is byte-level and tokens are torn characters."""


@pytest.fixture(scope="module")
def tokenizer_with(tiny_model: Callable[..., Path]) -> Callable[..., Tokenizer]:
    return lambda eos=None: Tokenizer.from_directory(tiny_model("llama", vocab=V, eos=eos))


@pytest.fixture(scope="module")
def target() -> FakeTarget:
    return FakeTarget(vocab_size=V, seed=11)


@pytest.fixture(scope="module")
def text_of(target: FakeTarget) -> list[int]:
    """60 tokens of plain text without any stop."""
    return plain(target, PROMPT, SamplingParams(max_tokens=60)).token_ids


def warm(target: FakeTarget, text: list[int], tokenizer: Tokenizer | None, arm: Arm) -> LLM:
    """An LLM whose drafts hold the whole text: in the suffix cache, or in a head."""
    if arm is Arm.EAGLE3:
        return make_llm(
            target, tokenizer, policy="eagle3", eagle3=OracleDrafter({tuple(PROMPT): text}, V, wrong_every=9, tree=True)
        )
    llm = make_llm(target, tokenizer, policy="cache")
    llm.generate([PROMPT], SamplingParams(max_tokens=60, ignore_eos=True))
    return llm


@pytest.mark.parametrize("arm", [Arm.CACHE, Arm.EAGLE3])
@pytest.mark.parametrize("place", range(1, 30))
def test_a_stop_inside_an_accepted_draft_ends_the_request_there(
    arm: Arm, place: int, target: FakeTarget, text_of: list[int], tokenizer_with: Callable[..., Tokenizer]
) -> None:
    """K2-01: as model EOS, as one of several, and as stop_token_ids; with ignore_eos, plain text."""
    stop = text_of[place]
    first = text_of.index(stop)
    for eos, ids in ((stop, ()), ([299, stop], ()), (299, (stop,))):
        llm = warm(target, text_of, tokenizer_with(eos=eos), arm)
        answer = llm.generate([PROMPT], SamplingParams(max_tokens=60, stop_token_ids=ids))[0]
        assert answer.token_ids == text_of[: first + 1]
        assert answer.finish_reason is FinishReason.STOP
        assert answer.stats.committed == answer.stats.cycles + sum(a.accepted for a in answer.stats.arms.values())
        if not ids:
            ignoring = llm.generate([PROMPT], SamplingParams(max_tokens=60, ignore_eos=True))[0]
            assert ignoring.token_ids == text_of
            assert ignoring.stats.tokens_per_cycle > 1.5, "void: drafts were not accepted"


def test_the_stop_is_looked_for_before_the_limit(
    target: FakeTarget, text_of: list[int], tokenizer_with: Callable[..., Tokenizer]
) -> None:
    """K2-04: stop at s, limit at m, both swept over 1..12."""
    llm = warm(target, text_of, tokenizer_with(), Arm.CACHE)
    for s, m in itertools.product(range(1, 13), repeat=2):
        stop = text_of[s - 1]
        s_first = text_of.index(stop) + 1
        answer = llm.generate([PROMPT], SamplingParams(max_tokens=m, stop_token_ids=(stop,)))[0]
        ends = (FinishReason.STOP, s_first) if s_first <= m else (FinishReason.LENGTH, m)
        assert (answer.finish_reason, len(answer.token_ids)) == ends


@pytest.mark.parametrize("arm", [Arm.CACHE, Arm.EAGLE3])
def test_stop_texts_end_where_plain_ends_and_never_show(
    arm: Arm, target: FakeTarget, text_of: list[int], tokenizer_with: Callable[..., Tokenizer]
) -> None:
    tokenizer = tokenizer_with()
    whole = tokenizer.decode(text_of)
    llm = warm(target, text_of, tokenizer, arm)
    for start, length in itertools.product(range(1, 25, 2), (1, 2, 5)):
        stop = whole[start : start + length]
        params = SamplingParams(max_tokens=60, stop=(stop, "never there"))
        expected = plain(target, PROMPT, params, tokenizer)
        stream = llm.stream(PROMPT, params)
        joined = "".join(piece.text for piece in stream)
        answer = stream.completion()
        assert answer.text == joined == expected.text == whole[: whole.index(stop)]
        assert answer.token_ids == expected.token_ids
        assert answer.finish_reason is FinishReason.STOP


def test_min_tokens_puts_every_kind_of_stop_off(
    target: FakeTarget, text_of: list[int], tokenizer_with: Callable[..., Tokenizer]
) -> None:
    for arm, least in itertools.product((Arm.CACHE, Arm.EAGLE3), (1, 5, 13)):
        tokenizer = tokenizer_with(eos=text_of[3])
        stop_text = tokenizer.decode(text_of)[4]
        params = SamplingParams(max_tokens=40, min_tokens=least, stop=(stop_text,))
        answer = warm(target, text_of, tokenizer, arm).generate([PROMPT], params)[0]
        expected = plain(target, PROMPT, params, tokenizer)
        assert answer.token_ids == expected.token_ids
        assert answer.text == expected.text
        assert len(answer.token_ids) > least


def test_a_stop_text_begun_before_min_tokens_and_complete_behind_it_ends_the_request(
    target: FakeTarget, text_of: list[int], tokenizer_with: Callable[..., Tokenizer]
) -> None:
    tokenizer = tokenizer_with()
    words = [tokenizer.decode([token]) for token in text_of]
    place = next(i for i in range(4, 40) if "\ufffd" not in words[i] + words[i + 1] and words[i] and words[i + 1])
    stop = words[place] + words[place + 1]
    if stop in tokenizer.decode(text_of[: place + 1]):
        pytest.fail("choose another seed: the stop text must not occur earlier")
    llm = warm(target, text_of, tokenizer, Arm.CACHE)
    for least in range(place - 2, place + 2):
        answer = llm.generate([PROMPT], SamplingParams(max_tokens=60, min_tokens=least, stop=(stop,)))[0]
        assert answer.token_ids == text_of[: place + 2]
        assert answer.text == tokenizer.decode(text_of[:place])


@pytest.mark.parametrize("arm", [Arm.CACHE, Arm.EAGLE3])
@pytest.mark.parametrize("max_tokens", range(1, 40))
def test_streams_join_to_the_text_and_hold_no_half_characters(
    arm: Arm, max_tokens: int, target: FakeTarget, text_of: list[int], tokenizer_with: Callable[..., Tokenizer]
) -> None:
    """K2-07, with random bytes: only the last piece may bring the mark of a torn character that plain has too."""
    tokenizer = tokenizer_with()
    llm = warm(target, text_of, tokenizer, arm)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=max_tokens))
    pieces = list(stream)
    assert "".join(p.text for p in pieces) == stream.completion().text == tokenizer.decode(text_of[:max_tokens])
