"""Text <-> ids, token bytes and classes, files of a Hugging Face directory."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from hvd.errors import CheckpointError, RequestError
from hvd.models.checkpoint import load_checkpoint
from hvd.tokenizer import TokenClass, Tokenizer, read_eos_token_ids

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "Hi, wörld 你好 שלום 👩‍👩‍👧 1 2\n\n  é!"


def byte_level(*added: AddedToken) -> tokenizers.Tokenizer:
    """All bytes, two merges, and added tokens behind."""
    vocab = {letter: id_ for id_, letter in enumerate([*ALPHABET, "he", "Ġt"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "t")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(list(added))
    return inner


EOS = AddedToken("<|end|>", special=True, normalized=False)
CALL = AddedToken("<call>", special=False, normalized=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Hugging Face directory's tokenizer files."""
    byte_level(EOS, CALL).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<|end|>", "bos_token": {"content": "<|end|>"}})
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


class TestText:
    def test_there_and_back(self) -> None:
        tokenizer = Tokenizer(byte_level(EOS))
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT

    def test_special_tokens_are_skipped_unless_asked_for(self) -> None:
        tokenizer = Tokenizer(byte_level(EOS, CALL))
        ids = tokenizer.encode("a<|end|>b<call>")
        assert len(ids) == 4
        assert tokenizer.decode(ids) == "ab<call>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|>b<call>"

    def test_ids_outside_the_vocabulary_are_no_text(self) -> None:
        """K4-09: a model's vocabulary is often padded beyond its tokenizer's."""
        tokenizer = Tokenizer(byte_level(EOS))
        size = tokenizer.vocab_size
        a = tokenizer.encode("a")
        assert size == 259
        assert tokenizer.decode([size, *a, -1, size + 5, 2**31, 2**40, *a]) == "aa"
        assert tokenizer.token_bytes(size) == tokenizer.token_bytes(-1) == b""

    def test_free_ids_in_the_middle(self) -> None:
        tokenizer = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 3, "c": 4, "d": 5}, unk_token="a")))
        assert tokenizer.vocab_size == 6
        assert tokenizer.decode([0, 1, 5]) == "a d"
        assert len(tokenizer.token_classes()) == 6

    def test_numpy_ids(self) -> None:
        tokenizer = Tokenizer(byte_level(EOS))
        assert tokenizer.decode(np.array(tokenizer.encode(TEXT), np.int32)) == TEXT  # type: ignore[arg-type]

    @pytest.mark.parametrize("text", ["a\ud800", None, 3, ["a"]])
    def test_no_unicode_text_is_refused(self, text: Any) -> None:
        with pytest.raises(RequestError, match="valid Unicode"):
            Tokenizer(byte_level()).encode(text)


class TestTokenBytes:
    def test_byte_level_pieces_join_to_the_text(self) -> None:
        tokenizer = Tokenizer(byte_level(EOS, CALL))
        ids = tokenizer.encode(TEXT + "<call>")
        assert b"".join(map(tokenizer.token_bytes, ids)) == (TEXT + "<call>").encode()

    def test_every_byte_has_its_letter(self) -> None:
        tokenizer = Tokenizer(byte_level())
        assert {tokenizer.token_bytes(id_) for id_ in range(256)} == {bytes([byte]) for byte in range(256)}

    def test_special_tokens_have_none(self) -> None:
        tokenizer = Tokenizer(byte_level(EOS))
        assert tokenizer.token_bytes(tokenizer.encode("<|end|>")[0]) == b""

    def test_added_token_of_other_letters_is_itself(self) -> None:
        tokenizer = Tokenizer(byte_level(AddedToken("a 你", normalized=False)))
        assert tokenizer.token_bytes(258) == "a 你".encode()
        assert tokenizer.decode([258]) == "a 你"

    def test_sentencepiece(self) -> None:
        tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"<0x0A>": 0, "▁ab": 1, "<0xZZ>": 2}, merges=[])))
        assert [tokenizer.token_bytes(id_) for id_ in range(3)] == [b"\n", b" ab", b"<0xZZ>"]


def expected_class(piece: bytes) -> int:
    """The definition, letter by letter."""
    text = piece.decode("latin-1")
    bits = TokenClass.STARTS_WITH_SPACE * (text[:1] in string.whitespace and text != "")
    bits |= TokenClass.HAS_NEWLINE * ("\n" in text)
    bits |= TokenClass.ONLY_SPACE * (text != "" and all(letter in string.whitespace for letter in text))
    for letters, bit in (
        (string.punctuation, TokenClass.HAS_PUNCTUATION),
        ("()[]{}", TokenClass.HAS_BRACKET),
        ("\"'`,:;=", TokenClass.HAS_DELIMITER),
        (string.digits, TokenClass.HAS_DIGIT),
    ):
        bits |= bit * any(letter in letters for letter in text)
    return bits


class TestTokenClasses:
    def test_of_each_byte(self) -> None:
        tokenizer = Tokenizer(byte_level(EOS, CALL))
        classes = tokenizer.token_classes()
        assert classes.dtype == np.uint8
        for id_ in range(256):
            assert classes[id_] == expected_class(tokenizer.token_bytes(id_)), tokenizer.token_bytes(id_)
        assert classes[256] == 0
        assert classes[257] == TokenClass.STARTS_WITH_SPACE
        assert classes[258] == TokenClass.SPECIAL
        assert classes[259] == TokenClass.HAS_PUNCTUATION

    def test_of_sentencepiece_tokens(self) -> None:
        words = {"<unk>": 0, "▁": 1, "▁x1": 2, "<0x0A>": 3, "{": 4, "é": 5, "▁▁": 6}
        tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True)))
        assert tokenizer.token_classes().tolist() == [8, 5, 1 | 64, 1 | 2 | 4, 8 | 16, 0, 5]

    @pytest.mark.model
    def test_of_a_real_vocabulary(self, smollm2: Path) -> None:
        tokenizer = load_checkpoint(smollm2).tokenizer()
        classes = tokenizer.token_classes()
        for id_ in [*range(17, 400), *range(400, tokenizer.vocab_size, 37)]:
            assert classes[id_] == expected_class(tokenizer.token_bytes(id_))
        assert (classes[:17] == TokenClass.SPECIAL).all()


class TestDirectory:
    def test_reads_special_tokens(self, directory: Path) -> None:
        tokenizer = Tokenizer.from_directory(directory)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (
            258,
            (258,),
            None,
        )

    @pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 3], (7, 3)), (0, (0,)), (None, (258,))])
    def test_generation_config_names_the_ends(self, directory: Path, value: Any, ids: tuple[int, ...]) -> None:
        write(directory / "generation_config.json", {"eos_token_id": value})
        assert Tokenizer.from_directory(directory).eos_token_ids == ids

    def test_config_names_the_ends_when_generation_config_does_not(self, directory: Path) -> None:
        write(directory / "config.json", {"eos_token_id": [4, 5]})
        assert read_eos_token_ids(directory) == (4, 5)

    @pytest.mark.parametrize("template", ["{{ bos_token }}x", [{"name": "default", "template": "{{ bos_token }}x"}]])
    def test_chat_template_in_the_config(self, directory: Path, template: Any) -> None:
        write(directory / "tokenizer_config.json", {"bos_token": "<|end|>", "chat_template": template})
        chat = Tokenizer.from_directory(directory).apply_chat_template([{"role": "user", "content": ""}])
        assert chat == "<|end|>x"

    def test_chat_template_file_wins(self, directory: Path) -> None:
        write(directory / "tokenizer_config.json", {"chat_template": "old"})
        (directory / "chat_template.jinja").write_text("new", encoding="utf-8")
        assert Tokenizer.from_directory(directory).chat_template == "new"

    def test_added_tokens_of_the_config(self, directory: Path) -> None:
        added = {"260": {"content": "<x>", "special": True}, "261": {"content": "<y>", "special": False}}
        write(directory / "tokenizer_config.json", {"added_tokens_decoder": added})
        tokenizer = Tokenizer.from_directory(directory)
        assert tokenizer.encode("<y><x>") == [261, 260]
        assert tokenizer.decode([261, 260]) == "<y>"

    def test_added_token_under_another_id_is_refused(self, directory: Path) -> None:
        write(directory / "tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<call>"}}})
        with pytest.raises(CheckpointError, match="id 5 by tokenizer_config"):
            Tokenizer.from_directory(directory)

    @pytest.mark.parametrize(
        "added",
        ["x", [1], 5, {"x": {"content": "a"}}, {"5": "x"}, {"5": {}}, {"5": {"content": 5}}, {"-1": {"content": "a"}}],
    )
    def test_added_tokens_of_another_kind_are_refused(self, directory: Path, added: Any) -> None:
        write(directory / "tokenizer_config.json", {"added_tokens_decoder": added})
        with pytest.raises(CheckpointError, match="added_tokens_decoder must be ids with tokens"):
            Tokenizer.from_directory(directory)

    @pytest.mark.parametrize(
        "template", [[{"name": "default"}], [{"template": "x"}], ["x"], [{"name": [], "template": ""}]]
    )
    def test_a_list_without_a_template_is_refused(self, directory: Path, template: Any) -> None:
        write(directory / "tokenizer_config.json", {"chat_template": template})
        with pytest.raises(CheckpointError, match="chat_template in a list needs"):
            Tokenizer.from_directory(directory)

    def test_a_template_that_is_no_text_is_refused(self, directory: Path) -> None:
        (directory / "chat_template.jinja").write_bytes(b"\xff\xfe{")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja can't be read"):
            Tokenizer.from_directory(directory)

    @pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json"])
    def test_deep_nesting_is_refused(self, directory: Path, file: str) -> None:
        (directory / file).write_text("[" * 100_000)
        with pytest.raises(CheckpointError, match=file):
            Tokenizer.from_directory(directory)

    def test_transformers_reads_the_same(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<new>", "eos_token": "<|end|>"}
        write(directory / "tokenizer_config.json", {**names, "add_bos_token": True, "add_eos_token": True})
        ours, theirs = Tokenizer.from_directory(directory), AutoTokenizer.from_pretrained(str(directory))
        assert ours.encode("the <call>") == theirs.encode("the <call>")
        assert (ours.bos_token_id, ours.eos_token_ids) == (theirs.bos_token_id, (theirs.eos_token_id,)) == (260, (258,))

    def test_post_processor_of_the_file_stays(self, directory: Path) -> None:
        inner = byte_level(EOS)
        inner.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 258)])
        inner.save(str(directory / "tokenizer.json"))
        assert Tokenizer.from_directory(directory).encode("h")[0] == 258

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            Tokenizer.from_directory(tmp_path)

    @pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    def test_torn_file(self, directory: Path, file: str) -> None:
        (directory / file).write_text('{"a": ', encoding="utf-8")
        with pytest.raises(CheckpointError, match=f"{file} can't be read"):
            Tokenizer.from_directory(directory)


class TestSave:
    def test_round_trip(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer(
            byte_level(EOS, CALL),
            special_tokens={"bos_token": "<call>", "eos_token": "<|end|>"},
            eos_token_ids=(258, 3),
            chat_template="{{ messages[0].content }}é",
        )
        tokenizer.save(tmp_path / "new")
        self.same(tokenizer, Tokenizer.from_directory(tmp_path / "new"))
        assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]

    @pytest.mark.model
    def test_round_trip_of_a_real_one(self, qwen_coder: Path, tmp_path: Path) -> None:
        tokenizer = load_checkpoint(qwen_coder).tokenizer()
        tokenizer.save(tmp_path)
        self.same(tokenizer, Tokenizer.from_directory(tmp_path))

    def same(self, one: Tokenizer, other: Tokenizer) -> None:
        for name in ("vocab_size", "bos_token_id", "eos_token_ids", "chat_template", "fingerprint"):
            assert getattr(one, name) == getattr(other, name), name
        for add in (True, False):
            assert one.encode(TEXT, add_special_tokens=add) == other.encode(TEXT, add_special_tokens=add)
        messages = [{"role": "user", "content": "x"}]
        assert one.apply_chat_template(messages) == other.apply_chat_template(messages)


class TestFingerprint:
    def test_tells_vocabularies_apart(self) -> None:
        plain = Tokenizer(byte_level(EOS)).fingerprint
        assert plain == Tokenizer(byte_level(EOS), chat_template="x").fingerprint
        assert len(plain) == 64
        others = [byte_level(), byte_level(EOS, CALL), byte_level(CALL), byte_level(AddedToken("<|end|>"))]
        assert len({plain, *(Tokenizer(inner).fingerprint for inner in others)}) == 5
