"""K2-07: pieces joined are the whole text, in every grouping, and no piece ends inside a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from hvd.models.checkpoint import load_checkpoint
from hvd.tokenizer import IncrementalDetokenizer, Tokenizer

TEXT = "👩‍👩‍👧‍👦🏳️‍🌈 你好，世界 שלום עולם e\u0301a\u0308 ok\n\n  \u200b\ufffd!"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokens.json").read_text(encoding="utf-8"))
SPECIAL = AddedToken("<s>", special=True, normalized=False)
ADDED = AddedToken("a 你", normalized=False)


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("ðŁ", "ĳ"), ("ä", "½"), ("Ġ", "Ġ")]
    vocab = {letter: id_ for id_, letter in enumerate([*alphabet, *(a + b for a, b in merges)])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([SPECIAL, ADDED])
    return inner


def sentencepiece(*, prefix: bool) -> tokenizers.Tokenizer:
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁▁", "a", "▁a", "é", "你", "▁你a", "<0x4>"]
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    inner.add_tokens([SPECIAL, ADDED])
    return inner


def with_decoder(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    inner = sentencepiece(prefix=True)
    if decoder is None:
        inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "▁c": 2, "é": 3}, unk_token="a"))
        inner.add_tokens([SPECIAL])
        return inner
    inner.decoder = decoder
    return inner


KINDS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(prefix=True),
    "sentencepiece without prefix": sentencepiece(prefix=False),
    "strip two": with_decoder(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ),
    "metaspace": with_decoder(decoders.Metaspace()),
    "metaspace never": with_decoder(decoders.Metaspace(prepend_scheme="never")),
    "fuse": with_decoder(decoders.Fuse()),
    "strip each token": with_decoder(decoders.Strip(" ", 1, 0)),
    "replace by pattern": with_decoder(decoders.Replace(Regex("[a▁]+"), "x")),
    "replace behind fuse": with_decoder(decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")])),
    "word piece": with_decoder(decoders.WordPiece()),
    "none": with_decoder(None),
}


def pieces(tokenizer: Tokenizer, groups: Sequence[Sequence[int]], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


def grouped(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_grouping(kind: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(KINDS[kind])
    some = st.integers(-1, tokenizer.vocab_size + 1) | st.integers(
        max(tokenizer.vocab_size - 12, 0), tokenizer.vocab_size
    )
    ids = data.draw(st.lists(some, max_size=24))
    skip = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    groups = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(pieces(tokenizer, groups, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=20), size=st.integers(1, 6))
def test_any_text_comes_whole(text: str, size: int) -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode(text)
    out = pieces(tokenizer, grouped(ids, size))
    assert "".join(out) == tokenizer.decode(ids)
    assert out[-1] == ""
    if "<s>" not in text:
        assert all("\ufffd" not in piece for piece in out) or "\ufffd" in text


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("size", range(1, 7))
def test_no_piece_carries_half_a_character(kind: str, size: int) -> None:
    tokenizer = Tokenizer(KINDS[kind])
    ids = tokenizer.encode(TEXT)
    out = pieces(tokenizer, grouped(ids, size))
    assert "".join(out) == TEXT
    assert sum(piece.count("\ufffd") for piece in out) == TEXT.count("\ufffd")


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_cut_in_mid_character(kind: str) -> None:
    """By max_tokens, say: what stands is final; the rest of the character becomes replacement marks in flush."""
    tokenizer = Tokenizer(KINDS[kind])
    ids = tokenizer.encode("a😀")
    for length in range(len(ids) + 1):
        *out, rest = pieces(tokenizer, grouped(ids[:length], 1))
        assert "".join(out) + rest == tokenizer.decode(ids[:length])
        assert "\ufffd" not in "".join(out)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_pending_is_what_the_end_would_bring(kind: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(KINDS[kind])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=16))
    detokenizer, text = IncrementalDetokenizer(tokenizer), ""
    for count, id_ in enumerate(ids, 1):
        text += detokenizer.push([id_])
        assert text + detokenizer.pending() == tokenizer.decode(ids[:count])
    assert detokenizer.pending() == detokenizer.flush()


def test_a_byte_token_that_completes_a_character_is_pending_at_once() -> None:
    detokenizer = IncrementalDetokenizer(Tokenizer(sentencepiece(prefix=True)))
    assert (detokenizer.push([0x0A]), detokenizer.pending()) == ("", "\n")
    assert (detokenizer.push([0xE2]), detokenizer.pending()) == ("", "\ufffd\ufffd")
    assert (detokenizer.push([0x82]), detokenizer.push([0xAC]), detokenizer.pending()) == ("", "", "\n€")


def test_text_comes_as_early_as_it_is_whole() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("a")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    euro = tokenizer.encode("€")
    assert [detokenizer.push([id_]) for id_ in euro] == ["", "", "€"]
    assert detokenizer.push([]) == ""
    assert detokenizer.push(np.array(euro, np.int32)) == "€"  # type: ignore[arg-type]


def test_a_token_costs_the_same_however_long_the_text() -> None:
    """Counted in what the tokenizer is asked for: each token once."""

    class Counting(Tokenizer):
        asked = 0

        def token(self, id_: int, skip_special_tokens: bool) -> str | None:
            self.asked += 1
            return super().token(id_, skip_special_tokens)

        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            raise AssertionError("must not decode again")

    for inner in (byte_level(), sentencepiece(prefix=True)):
        tokenizer = Counting(inner)
        ids = tokenizer.encode("aé 你" * 500)
        text = "".join(pieces(tokenizer, grouped(ids, 1)))
        assert text == "aé 你" * 500
        assert tokenizer.asked == len(ids)


@pytest.mark.model
@pytest.mark.parametrize("fixture", ["smollm2", "qwen_coder"])
def test_real_tokenizers(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_checkpoint(request.getfixturevalue(fixture)).tokenizer()
    for text in GOLDEN["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for size in range(1, 7):
            out = pieces(tokenizer, grouped(ids, size), skip=False)
            assert "".join(out) == text
            assert not any("\ufffd" in piece for piece in out)
