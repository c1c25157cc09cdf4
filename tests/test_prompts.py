"""Prompt files: both formats, splits, and lines that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd.errors import ConfigError
from hvd.traces.prompts import Prompt, parse_record, read_prompts, split_of

SYSTEM = {"role": "system", "content": "s"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def follow(prompt: Prompt) -> list[list[str]]:
    """The conversations a model would be asked to answer; its answers are "<n>"."""
    history: list[dict[str, str]] = []
    asked = []
    for turn in prompt.turns:
        history += turn.messages
        asked.append([message["content"] for message in history])
        history.append(answer(f"<{len(asked)}>" if turn.recorded is None else turn.recorded))
    return asked


def parse(**record: Any) -> Prompt:
    return parse_record(record, "file", 3)


def test_open_turns_feed_the_answers_back() -> None:
    prompt = parse(messages=[SYSTEM, user("a"), user("b")], gen="open")
    assert follow(prompt) == [["s", "a"], ["s", "a", "<1>", "b"]]


def test_replay_turns_keep_the_recorded_prefix() -> None:
    messages = [
        SYSTEM,
        user("a"),
        answer("A"),
        {"role": "tool", "content": "t", "name": "f"},
        answer("B"),
        user("z"),
    ]
    prompt = parse(messages=messages, gen="replay")
    assert follow(prompt) == [["s", "a"], ["s", "a", "A", "t"]]
    assert [turn.recorded for turn in prompt.turns] == ["A", "B"]
    assert prompt.turns[1].messages[0]["name"] == "f"


def test_plain_chat() -> None:
    assert follow(parse(prompt="hi")) == [["hi"]]
    assert follow(parse(messages=[user("a"), answer("A"), user("b")])) == [["a", "A", "b"]]
    assert follow(parse(messages=[user("a"), answer("A"), user("b"), answer("B")])) == [
        ["a"],
        ["a", "A", "b"],
    ]
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert follow(parse(messages=[{"role": "user", "content": parts}])) == [["xy"]]


def test_names_are_made_up_when_missing() -> None:
    prompt = parse(prompt="hi")
    assert (prompt.id, prompt.dataset, prompt.category) == ("file/3", "file", "other")
    assert prompt.split == split_of("file/3")


def test_the_split_is_that_of_the_group() -> None:
    assert split_of("d/1#a") == split_of("d/1#b") == split_of("d/1")
    share = [split_of(f"d/{i}") for i in range(2000)]
    assert abs(share.count("train") - 1200) < 100
    assert abs(share.count("dev") - 400) < 80


BAD = [
    "{not json",
    "[]",
    '"text"',
    "{}",
    '{"prompt": ""}',
    '{"prompt": 3}',
    '{"messages": []}',
    '{"messages": [{"role": "king", "content": "x"}]}',
    '{"messages": [{"role": "user"}]}',
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    '{"messages": [{"role": "user", "content": "x"}], "gen": "shut"}',
    '{"messages": [{"role": "assistant", "content": "x"}]}',
    '{"messages": [{"role": "system", "content": "x"}], "gen": "open"}',
    '{"prompt": "x", "id": ["y"]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("line", BAD)
def test_a_broken_line_costs_that_line_only(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "one"}}\n{line}\n\n{{"prompt": "two"}}\n')
    warnings: list[str] = []
    prompts = list(read_prompts(path, warn=warnings.append))
    assert [follow(p) for p in prompts] == [[["one"]], [["two"]]]
    assert warnings[0].startswith(f"{path}:2: ")
    assert warnings[1] == f"{path}: 1 broken line skipped"
    assert all("\n" not in warning for warning in warnings)


def test_a_broken_line_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n\nnot json\n{"prompt": "\xff"}\n' + b"[" * 100_000 + b"\n")
    warnings: list[str] = []
    assert len(list(read_prompts(path, warn=warnings.append))) == 1
    assert warnings[:3] == [
        f"{path}:3: not JSON (column 1); line skipped",
        f"{path}:4: not UTF-8 text; line skipped",
        f"{path}:5: nested too deeply; line skipped",
    ]


def test_a_line_that_is_not_utf8_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n{"prompt": "two"}\n')
    warnings: list[str] = []
    assert [p.id for p in read_prompts(path, warn=warnings.append)] == ["p/2"]
    assert warnings[0].startswith(f"{path}:1: ")


def test_split_and_limit_hold_for_each_file(tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        records = [{"prompt": "x", "id": f"{name}{i}", "split": ["train", "test"][i % 2]} for i in range(10)]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
    assert [p.id for p in read_prompts(paths, split="test", limit=2)] == ["a1", "a3", "b1", "b3"]
    assert len(list(read_prompts(paths))) == 20


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the prompt file .*none.jsonl: No such file"):
        list(read_prompts(tmp_path / "none.jsonl"))
