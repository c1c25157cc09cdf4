"""Makes tokens.json: ids of varied texts by an independent tokenizer, llama.cpp's (llama-cpp-python 0.3.36) and
sentencepiece's (0.2.3). From the repository's root, with both installed and the real models in HVD_TEST_MODELS:

    python tests/golden/make_tokens.py
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import llama_cpp
import sentencepiece

MODELS = Path(os.environ.get("HVD_TEST_MODELS", "~/.cache/hvd/models")).expanduser()
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN_CODER = "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"
CASES = [(QWEN_CODER, "qwen2"), *((SMOLLM2, pre) for pre in ("smollm", "gpt-2", "default", "llama-bpe", "qwen2"))]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "def f(x):\n    return {'a': [1, 2.50, 0x1F], \"b\": None}\n\n\n\tif True:\r\n\t\tpass",
    "1234567890 3.14159 1,000,000 2024-05-06 v1.2.3 12345abc",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇮🇱 👍🏽 ☕️",
    "你好，世界！今天天气怎么样？",
    "日本語のテキストと한국어 텍스트",
    "שלום עולם, מה שלומך?",
    "مرحبا بالعالم",
    "e\u0301 a\u0308 n\u0303 Z\u0351\u036b\u0343 café cafe\u0301",
    "don't WE'LL I'm it's O'Neil's they'RE",
    "a  b   c    d\n\n\ne \n \n f\t\tg",
    "\u00a0nbsp\u3000ideographic\u200bzero",
    '<|im_start|>user\nhi<|im_end|>\n<tool_call>{"name": "f"}</tool_call><|endoftext|>',
    "½ ² Ⅷ ٣ ৪ 五",
    "x²+y³=z∑∫√π≈≠",
    "https://example.com/path?q=1&r=%20#frag user@host.org",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x';--",
    "$$\\frac{a}{b}$$ #include <stdio.h> // comment ~~~ ||| ^^^ +++",
    "\x01\x7f",
    "ﬁ ﬂ Å Ω ①",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "😀😀😀😀😀",
    "ZWJ\u200d \ufeffBOM",
    "    \n    \n",
    "Ünïcödé ŁÓDŹ ßẞ ıİ",
    "१२३ कखग क्षि",
]
PROSE = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps on, and the fox runs away.",
    "She sells sea shells by the sea shore. The shells she sells are surely seashells.",
    "def main(argument):\n    print('hello', argument)\n    return argument + 1",
    "Décoder, c'est relire: l'été, la forêt, un garçon. Größe, Übermut, Straße.",
]


def by_llama_cpp(model: str, pre: str) -> list[list[int]]:
    overrides = {"tokenizer.ggml.pre": pre}
    llama = llama_cpp.Llama(str(MODELS / model), vocab_only=True, verbose=False, kv_overrides=overrides)
    return [llama.tokenize(text.encode(), add_bos=False, special=True) for text in TEXTS]


def by_sentencepiece() -> dict[str, Any]:
    """A small SentencePiece BPE model with byte fallback, as Llama 2's, and what it does with the texts."""
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE * 50),
        model_writer=stream,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())
    pieces = range(model.vocab_size())
    texts = [*PROSE, *(text for text in TEXTS if "<" not in text)]
    return {
        "tokens": [model.id_to_piece(i) for i in pieces],
        "scores": [model.get_score(i) for i in pieces],
        "token_type": [_kind(model, i) for i in pieces],
        "cases": [[text, model.encode(text), model.decode(model.encode(text))] for text in texts],
    }


def _kind(model: Any, piece: int) -> int:
    """GGUF's token types: normal 1, unknown 2, control 3, byte 6."""
    if model.is_unknown(piece):
        return 2
    return 3 if model.is_control(piece) else 6 if model.is_byte(piece) else 1


def main() -> None:
    golden = {
        "texts": TEXTS,
        "cases": [{"model": model, "pre": pre, "ids": by_llama_cpp(model, pre)} for model, pre in CASES],
        "sentencepiece": by_sentencepiece(),
    }
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    Path(__file__).with_name("tokens.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
