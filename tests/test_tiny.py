"""The tiny checkpoints are ordinary ones: transformers loads them, weights, tokenizer and generation config."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny import ARCHITECTURES, make_tiny


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_finds_exactly_the_weights_it_expects(family: str, tied: bool, tmp_path: Path) -> None:
    path = make_tiny(tmp_path, family, tied=tied, layers=2, eos=[5, 9])
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert type(model).__name__ == ARCHITECTURES[family]
    assert not any(report[fault] for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.generation_config.eos_token_id == [5, 9]


@pytest.mark.parametrize(("vocab", "size"), [(256, 256), (257, 256), (258, 258), (300, 300), (1000, 934)])
def test_the_byte_level_tokenizer_knows_every_text(vocab: int, size: int, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path, vocab=vocab))
    text = "naïve 🎉 café\n\tabba"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < size
    assert len(tokenizer) == size


def test_the_word_level_tokenizer_names_its_ids(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path, vocab=16))
    assert tokenizer.encode("t3 t15 t0") == [3, 15, 0]
    assert tokenizer.encode("nonsense") == [0]
    assert tokenizer.decode([3, 15]) == "t3 t15"


@pytest.mark.parametrize(
    ("vocab", "expected"), [(16, "t1 t4 t2 t3"), (300, "<|im_start|>user\nt4<|im_end|>\n<|im_start|>assistant\n")]
)
def test_the_chat_template_wraps_a_message(vocab: int, expected: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(tmp_path, vocab=vocab))
    messages = [{"role": "user", "content": "t4"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    files = [make_tiny(tmp_path / str(i), seed=seed) / "model.safetensors" for i, seed in enumerate((3, 3, 4))]
    contents = [file.read_bytes() for file in files]
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
