"""Tokenizers out of GGUF files give the ids of llama.cpp and sentencepiece (tests/golden/make_tokens.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd.errors import CheckpointError, UnsupportedModelError
from hvd.models.gguf_file import GGUFFile
from hvd.models.gguf_tokenizer import read_eos_ids, read_gguf_tokenizer
from hvd.tokenizer import BYTE_OF_LETTER, Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokens.json").read_text(encoding="utf-8"))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def read(metadata: dict[str, Any]) -> Tokenizer:
    file: Any = SimpleNamespace(
        path=Path("x.gguf"), metadata={f"tokenizer.{key}": value for key, value in metadata.items()}
    )
    return read_gguf_tokenizer(file)


def byte_level(**more: Any) -> dict[str, Any]:
    """Bytes, "12" and "123", then one token of every other type."""
    tokens = [*BYTE_OF_LETTER, "12", "123", "<s>", "<call>", "[PAD]"]
    kinds = [NORMAL] * 258 + [CONTROL, USER_DEFINED, UNUSED]
    merges = ["1 2", "12 3"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "llama-bpe",
        "ggml.tokens": tokens,
        "ggml.token_type": kinds,
        "ggml.merges": merges,
        **{f"ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece(**more: Any) -> dict[str, Any]:
    golden = {f"ggml.{key}": GOLDEN["sentencepiece"][key] for key in ("tokens", "scores", "token_type")}
    named = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return golden | {f"ggml.{key}": value for key, value in (named | more).items()}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model", value) for value in (5, ["gpt2"], True)),
        *(("pre", value) for value in (5, ["a"], 1.5)),
        *(("tokens", value) for value in ("abc", 5, [1, 2], [1.5])),
        *(("token_type", value) for value in ("abc", 5, ["a"], [1.5])),
        *(("merges", value) for value in ("1 2", 5, [1, 2], ["12"], ["q z"])),
    ],
)
def test_metadata_of_other_kinds_is_refused(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        read(byte_level(**{key: value}))


@pytest.mark.parametrize("scores", ["x", 5, ["a"], [1, 2], [0.5]])
def test_scores_of_other_kinds_are_refused(scores: Any) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores"):
        read(sentencepiece(scores=scores))


def test_a_chat_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template"):
        read(byte_level() | {"chat_template": [1]})


@pytest.mark.model
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['model'][:5]}-{case['pre']}")
def test_byte_level_ids_are_llama_cpps(case: dict[str, Any], models_dir: Path) -> None:
    """With other pre-tokenizers than its own, too: SmolLM2's vocabulary shows the difference."""
    file = GGUFFile(models_dir / case["model"])
    file.metadata["tokenizer.ggml.pre"] = case["pre"]
    tokenizer = read_gguf_tokenizer(file)
    for text, ids in zip(GOLDEN["texts"], case["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("case", GOLDEN["sentencepiece"]["cases"], ids=lambda case: repr(case[0][:12]))
def test_sentencepiece_ids_are_its_own(case: tuple[str, list[int], str]) -> None:
    text, ids, decoded = case
    tokenizer = read(sentencepiece())
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == decoded


class TestFrame:
    """What is put around a text."""

    def test_sentencepiece_begins(self) -> None:
        assert read(sentencepiece()).encode("a")[0] == 1
        assert read(sentencepiece(add_bos_token=False)).encode("a")[0] != 1
        assert read(sentencepiece(add_eos_token=True)).encode("a")[-1] == 2

    def test_llama3_begins_and_others_do_not(self) -> None:
        assert read(byte_level(bos_token_id=258)).encode("12") == [258, 256]
        assert read(byte_level(bos_token_id=258, pre="smollm")).encode("z") == read(byte_level()).encode("z")
        assert read(byte_level(bos_token_id=258, pre="smollm", add_bos_token=True)).encode("z")[0] == 258
        assert read(byte_level()).encode("12") == [256]

    def test_space_prefix(self) -> None:
        with_prefix, without = read(sentencepiece()), read(sentencepiece(add_space_prefix=False))
        ids = without.encode("sea", add_special_tokens=False)
        assert ids != with_prefix.encode("sea", add_special_tokens=False)
        assert without.decode(ids) == "sea"
        assert without.decode(without.encode(" sea")) == " sea"


class TestTokenTypes:
    def test_special_added_and_unused_tokens(self) -> None:
        tokenizer = read(byte_level())
        assert tokenizer.vocab_size == 260
        assert tokenizer.encode("<s><call>", add_special_tokens=False) == [258, 259]
        assert tokenizer.decode([258, 259, 260]) == "<call>"
        assert len(tokenizer.encode("[PAD]", add_special_tokens=False)) == 5

    def test_digits_by_three(self) -> None:
        tokenizer = read(byte_level())
        assert tokenizer.encode("12312") == [257, 256]
        assert read(byte_level(pre="smollm")).encode("12") == tokenizer.encode("1") + tokenizer.encode("2")

    def test_special_names_reach_the_template(self) -> None:
        metadata = byte_level(bos_token_id=258) | {"chat_template": "{{ bos_token }}{{ messages[0].content }}"}
        assert read(metadata).apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x"


class TestEnds:
    def test_named_ids_come_first(self) -> None:
        ids = read_eos_ids(
            {f"tokenizer.{key}": value for key, value in byte_level(eos_token_id=3, eot_token_id=258).items()}
        )
        assert ids == (3, 258)

    def test_known_control_tokens_end_a_text(self) -> None:
        metadata = byte_level(eos_token_id=3)
        metadata["ggml.tokens"] = [*metadata["ggml.tokens"][:258], "<|im_end|>", "</s>", "<|eot_id|>"]
        assert read(metadata).eos_token_ids == (3, 258)

    def test_id_beyond_the_vocabulary_counts_for_nothing(self) -> None:
        assert read(byte_level(eos_token_id=5000)).eos_token_ids == ()

    @pytest.mark.model
    def test_real_models(self, smollm2: Path, qwen_coder: Path) -> None:
        assert read_eos_ids(GGUFFile(smollm2).metadata) == (2, 0)
        assert read_eos_ids(GGUFFile(qwen_coder).metadata) == (151645, 151643)


class TestRefusals:
    def test_unknown_pre_tokenizer(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"'tekken'.*smollm.*qwen2"):
            read(byte_level(pre="tekken"))

    def test_unknown_model(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"'bert'.*gpt2, llama"):
            read(byte_level(model="bert"))

    def test_no_tokens(self) -> None:
        with pytest.raises(CheckpointError, match="no tokenizer"):
            read(byte_level(tokens=[]))

    def test_token_types_of_another_length(self) -> None:
        with pytest.raises(CheckpointError, match="3 token types for 261 tokens"):
            read(byte_level(token_type=[1, 1, 1]))

    def test_merge_of_unknown_tokens(self) -> None:
        with pytest.raises(CheckpointError, match="merges do not fit"):
            read(byte_level(merges=["q w"]))

    def test_scores_are_missing(self) -> None:
        with pytest.raises(CheckpointError, match="score"):
            read(sentencepiece(scores=[0.0]))
