"""Recorded conversations as traces, with a small tokenizer of words."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from hvd.tokenizer import Tokenizer
from hvd.traces.importers import encode_turn, recorded_traces
from hvd.traces.prompts import parse_record
from hvd.types import FinishReason

WORDS = ["<unk>", "<s>", "<e>", "user", "assistant", "hello", "there", "what", "now", "end"]
CHATML = (
    "{% for m in messages %}<s> {{ m.role }} {{ m.content | trim }} <e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s> assistant {% endif %}"
)
OTHER_WHEN_DONE = CHATML.replace("<s> assistant {%", "<s> assistant now {%")
SHORT_ONLY = "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}" + CHATML


def make_tokenizer(template: str) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:3]])
    return Tokenizer(inner, eos_token_ids=(2,), chat_template=template)


def words(tokens: object) -> str:
    return " ".join(WORDS[i] for i in tokens)  # type: ignore[attr-defined]


CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hello there"},
    {"role": "user", "content": "what now"},
    {"role": "assistant", "content": "end"},
]


def test_each_recorded_answer_is_a_trace_behind_its_prefix() -> None:
    prompt = parse_record({"id": "d/1#x", "dataset": "d", "category": "c", "split": "dev", "messages": CHAT}, "f", 1)
    first, second = recorded_traces([prompt], make_tokenizer(CHATML))
    assert words(first.prompt) == "<s> user hello <e> <s> assistant"
    assert words(first.response) == "hello there <e>"
    assert (
        words(second.prompt) == "<s> user hello <e> <s> assistant hello there <e> <s> user what now <e> <s> assistant"
    )
    assert words(second.response) == "end <e>"
    assert [first.id, second.id] == ["d/1#x#turn0", "d/1#x#turn1"]
    assert first.group == second.group == "d/1"
    assert (first.dataset, first.category, first.split, first.model) == ("d", "c", "dev", "recorded")
    assert first.finish_reason is FinishReason.STOP
    assert len(first.token_classes) == len(WORDS)
    assert first.tokenizer_fingerprint == make_tokenizer(CHATML).fingerprint


def test_a_template_that_writes_finished_turns_otherwise_gets_the_bare_answer() -> None:
    before, response = encode_turn(make_tokenizer(OTHER_WHEN_DONE), CHAT[:1], "hello there")
    assert words(before) == "<s> user hello <e> <s> assistant now"
    assert words(response) == "hello there <e>"


def test_an_answer_ends_at_its_first_end_token() -> None:
    _, response = encode_turn(make_tokenizer(CHATML), CHAT[:1], "hello <e> there")
    assert words(response) == "hello <e>"


def test_turns_beyond_the_context_are_left_out() -> None:
    prompt = parse_record({"messages": CHAT}, "f", 1)
    assert [t.id for t in recorded_traces([prompt], make_tokenizer(CHATML), max_context=12)] == ["f/1#turn0"]


def test_open_prompts_give_nothing() -> None:
    prompt = parse_record({"messages": CHAT[:1]}, "f", 1)
    assert list(recorded_traces([prompt], make_tokenizer(CHATML))) == []


def test_what_the_template_refuses_is_named() -> None:
    lines: list[str] = []

    prompts = [parse_record({"messages": CHAT}, "f", i) for i in range(2)]
    made = [t.id for t in recorded_traces(prompts, make_tokenizer(SHORT_ONLY), warn=lines.append)]
    assert made == ["f/0#turn0", "f/1#turn0"]
    assert len(lines) == 2
    assert lines[0].startswith("f/0: the chat template refuses")
