"""Readers of logs: each format gives the same answers; broken lines cost themselves; samples are conversations."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.errors import ConfigError
from hvd.traces.logs import LogReader
from hvd.traces.logs_chat import Conversations, form_of
from hvd.traces.logs_record import Recorded, group_of_prompt, plain_message
from hvd.traces.logs_sample import Reservoir
from hvd.traces.logs_vllm import VLLMLog
from hvd.traces.schema import Trace
from hvd.traces.writer import TraceWriter

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "two plus two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "content": "seven"},
]
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2,  "b": 2}'}}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 2}}\n</tool_call>'


def write(path: Path, records: Iterable[Any]) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return str(path)


def read(*paths: str, form: str | None = None) -> tuple[list[Recorded], LogReader]:
    reader = LogReader(paths, form)
    return [answer for answer in reader if isinstance(answer, Recorded)], reader


def said(answers: Sequence[Recorded]) -> list[tuple[int, str | None]]:
    """Messages before each answer, and the answer."""
    return [(len(answer.messages or ()), answer.answer) for answer in answers]


# -- conversations --------------------------------------------------------------------------------------------------


def test_each_assistant_message_is_an_answer(tmp_path: Path) -> None:
    answers, reader = read(write(tmp_path / "chat.jsonl", [{"messages": CHAT}]))
    assert said(answers) == [(2, "four"), (4, "seven")]
    assert [a.source.removeprefix(str(tmp_path)) for a in answers] == ["/chat.jsonl:1#turn0", "/chat.jsonl:1#turn1"]
    assert len({a.group for a in answers}) == 1
    assert (reader.tallies[0].format, reader.tallies[0].answers, reader.tallies[0].lines) == ("chat", 2, 1)


def test_a_growing_conversation_counts_each_answer_once(tmp_path: Path) -> None:
    later = [{"role": "system", "content": "Be brief. It is 12:01."}, *CHAT[1:]]
    answers, reader = read(
        write(tmp_path / "l.jsonl", [{"messages": CHAT[:3]}, {"messages": CHAT}, {"messages": later}])
    )
    assert said(answers) == [(2, "four"), (4, "seven")]
    assert reader.tallies[0].repeats == 3


def test_the_same_words_behind_other_words_are_another_answer(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "one plus three?"}, {"role": "assistant", "content": "four"}]
    answers, reader = read(write(tmp_path / "l.jsonl", [{"messages": CHAT[:3]}, {"messages": other}]))
    assert [a.answer for a in answers] == ["four", "four"]
    assert reader.tallies[0].repeats == 0


def test_tool_calls_parts_and_reasoning_become_text(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "plus two?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": {"sum": 4}},
        {"role": "assistant", "content": "four", "reasoning_content": "easy"},
    ]
    answers, _ = read(write(tmp_path / "l.jsonl", [{"messages": messages}]))
    assert [a.answer for a in answers] == [CALL_TEXT, "<think>\neasy\n</think>\n\nfour"]
    assert answers[1].messages is not None
    assert [m["content"] for m in answers[1].messages] == ["two plus two?", CALL_TEXT, '{"sum": 4}']


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": "I add.", "tool_calls": [CALL]}, "I add.\n" + CALL_TEXT),
        ({"role": "assistant", "content": None, "function_call": CALL["function"]}, CALL_TEXT),
        ({"type": "function_call", "name": "add", "arguments": '{"a": 2,  "b": 2}'}, CALL_TEXT),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"x": 1}}]},
         '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'),
        ({"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "what?"}]}, "what?"),
        ({"from": "gpt", "value": "hello"}, "hello"),
        ({"role": "user", "content": "lone \ud83d surrogate"}, "lone ? surrogate"),
    ],
)  # fmt: skip
def test_one_message(message: dict[str, Any], content: str) -> None:
    assert plain_message(message)["content"] == content


def test_sharegpt_and_parquet_give_the_same(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    pq.write_table(pa.Table.from_pylist([{"messages": CHAT, "extra": 1}]), tmp_path / "d.parquet")
    expected = [(2, "four"), (4, "seven")]
    assert said(read(write(tmp_path / "s.jsonl", [{"conversations": turns}]))[0]) == expected
    answers, reader = read(str(tmp_path / "d.parquet"))
    assert said(answers) == expected
    assert reader.tallies[0].format == "chat"


# -- requests -------------------------------------------------------------------------------------------------------

CHOICES = {"choices": [{"message": {"role": "assistant", "content": "four"}, "finish_reason": "length"}]}


@pytest.mark.parametrize(
    "record",
    [
        {"request": {"messages": CHAT[:2]}, "response": CHOICES},
        {"request": {"body": {"messages": CHAT[:2]}}, "response": {"status_code": 200, "body": CHOICES}},
        {"request": json.dumps({"messages": CHAT[:2]}), "response": json.dumps(CHOICES)},
        {"messages": CHAT[:2], **CHOICES},
        {"messages": CHAT[:2], "response": "four"},
        {"input": CHAT[:2], "output": {"role": "assistant", "content": "four"}},
        {"input": {"messages": CHAT[:2]}, "output": "four"},
        {"input": CHAT[:2], "output": [{"type": "reasoning"}, {"type": "message", "role": "assistant",
                                                              "content": [{"type": "output_text", "text": "four"}]}]},
    ],
)  # fmt: skip
def test_a_response_is_one_answer_wherever_it_stands(tmp_path: Path, record: dict[str, Any]) -> None:
    answers, reader = read(write(tmp_path / "l.jsonl", [record]))
    assert said(answers) == [(2, "four")]
    assert reader.tallies[0].format == "requests"


def test_requests_with_whole_histories_are_not_counted_double(tmp_path: Path) -> None:
    records = [
        {"request": {"messages": CHAT[:2]}, "response": "four"},
        {"request": {"messages": CHAT[:4]}, "response": "seven"},
        {"request": {"messages": CHAT[:2]}, "response": "four"},  # asked again: a real request
    ]
    answers, _ = read(write(tmp_path / "l.jsonl", records))
    assert said(answers) == [(2, "four"), (4, "seven"), (2, "four")]
    assert len({a.group for a in answers}) == 1


def test_text_that_looks_like_json_stays_an_answer(tmp_path: Path) -> None:
    answers, _ = read(write(tmp_path / "l.jsonl", [{"messages": CHAT[:2], "response": '{"sum": 4}'}]))
    assert answers[0].answer == '{"sum": 4}'


def test_several_choices_and_a_cut_one(tmp_path: Path) -> None:
    choices = [{"text": "four", "finish_reason": "length"}, {"text": "4", "finish_reason": "stop"}]
    answers, _ = read(write(tmp_path / "l.jsonl", [{"prompt": "2 + 2 =", "choices": choices}]))
    assert [(a.prompt, a.answer, a.cut, a.source[-8:]) for a in answers] == [
        ("2 + 2 =", "four", True, "#choice0"),
        ("2 + 2 =", "4", False, "#choice1"),
    ]


def test_an_instruction_data_set(tmp_path: Path) -> None:
    answers, _ = read(write(tmp_path / "l.jsonl", [{"instruction": "Add.", "input": "2 2", "output": "4"}]))
    assert (answers[0].prompt, answers[0].answer) == ("Add.\n\n2 2", "4")


def test_a_request_without_a_response_is_counted(tmp_path: Path) -> None:
    records = [
        {"request": {"messages": CHAT[:2]}, "response": "four"},
        {"request": {"messages": CHAT[:2]}, "response": None},
    ]
    answers, reader = read(write(tmp_path / "l.jsonl", records))
    assert (len(answers), reader.tallies[0].unanswered, reader.tallies[0].broken) == (1, 1, 0)


# -- vLLM -----------------------------------------------------------------------------------------------------------

PROMPT = '<|im_start|>user\nit\'s "two"\nplus two?<|im_end|>\n<|im_start|>assistant\n'
PARAMS = "SamplingParams(n=1, stop=['a', \"prompt_token_ids: [9]\"], max_tokens=99)"
OLD = f"INFO 04-10 18:13:14 [logger.py:39] Received request chatcmpl-1: prompt: {PROMPT!r}, params: {PARAMS}, prompt_token_ids: None, lora_request: None."  # noqa: E501
NEW = [
    f"(APIServer pid=1) INFO 08-24 10:23 [logger.py:63] Received request chatcmpl-1: params: {PARAMS}, "
    "lora_request: None.",
    f"(APIServer pid=1) DEBUG 08-24 10:23:45 [logger.py:53] Request chatcmpl-1 details: prompt: {PROMPT!r}, "
    "prompt_token_ids: [1, 2, 3], prompt_embeds shape: None.",
]
DONE = "INFO 04-10 18:13:15 [logger.py:71] Generated response chatcmpl-1: output: 'fo\\nur', output_token_ids: [4, 5], finish_reason: "  # noqa: E501


@pytest.mark.parametrize(("lines", "ids"), [([OLD], None), (NEW, [1, 2, 3])])
def test_a_vllm_log(tmp_path: Path, lines: list[str], ids: list[int] | None) -> None:
    other = ["INFO 04-10 [launcher.py] Route: /v1/models", "", 'INFO: 127.0.0.1 - "POST /v1/chat/completions" 200 OK']
    answers, reader = read(write(tmp_path / "v.log", [*other, *lines, *other, DONE + "length"]))
    assert [(a.prompt, a.answer, a.cut) for a in answers] == [(PROMPT, "fo\nur", True)]
    assert answers[0].answer_ids is not None
    assert answers[0].answer_ids.tolist() == [4, 5]
    found = answers[0].prompt_ids
    assert (None if found is None else found.tolist()) == ids
    assert (reader.tallies[0].format, reader.tallies[0].unanswered) == ("vllm", 0)


def test_a_streamed_response_is_put_together_from_its_deltas(tmp_path: Path) -> None:
    head = "INFO [logger.py:71] Generated response chatcmpl-1"
    lines = [
        OLD,
        f"{head} (streaming delta): output: 'fo', output_token_ids: [4], finish_reason: None",
        f"{head} (streaming delta): output: 'ur', output_token_ids: [5], finish_reason: stop",
        f"{head} (streaming complete): output: 'four', output_token_ids: None, finish_reason: streaming_complete",
    ]
    answers, _ = read(write(tmp_path / "v.log", lines))
    assert [a.answer for a in answers] == ["four"]
    assert answers[0].answer_ids is not None
    assert answers[0].answer_ids.tolist() == [4, 5]


def test_vllm_entries_out_of_order_without_prompt_and_in_a_container(tmp_path: Path) -> None:
    second = OLD.replace("chatcmpl-1", "cmpl-2-0").replace("two", "three")
    lines = [
        OLD,
        second,
        DONE.replace("chatcmpl-1", "cmpl-2") + "stop",
        DONE + "stop",
        DONE.replace("-1", "-7") + "stop",
    ]
    wrapped = [json.dumps({"log": line + "\n", "stream": "stderr"}) for line in lines]
    for form in (lines, wrapped):
        answers, reader = read(write(tmp_path / "v.log", form))
        assert [a.prompt for a in answers] == [PROMPT.replace("two", "three"), PROMPT]
        assert reader.tallies[0].unanswered == 1


def test_a_torn_vllm_entry_costs_itself(tmp_path: Path) -> None:
    answers, reader = read(write(tmp_path / "v.log", [OLD, DONE + "stop", OLD[:90]]))
    assert len(answers) == 1
    assert reader.tallies[0].broken == 1
    assert reader.tallies[0].faults[0].startswith(f"{tmp_path / 'v.log'}:3: ")


def test_a_deeply_nested_line_costs_itself(tmp_path: Path) -> None:
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    answers, _ = read(write(tmp_path / "v.log", [OLD, deep, DONE + "stop"]))
    assert len(answers) == 1


@pytest.mark.parametrize("number", [2**31, 2**31 + 5, 2**63, 10**400])
def test_a_token_id_that_is_too_large_is_a_broken_line(tmp_path: Path, number: int) -> None:
    line = f"{DONE}stop".replace("output_token_ids: [", f"output_token_ids: [{number}, ")
    assert str(number) in line
    answers, reader = read(write(tmp_path / "v.log", [OLD, line]))
    assert (answers, reader.tallies[0].broken) == ([], 1)


def test_open_requests_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd.traces.logs_vllm._PENDING_CHARS", 3 * len(PROMPT))
    log = VLLMLog("d")
    for number in range(100):
        log.line(OLD.replace("chatcmpl-1", f"chatcmpl-{number}"), "s")
    assert log.line(DONE.replace("chatcmpl-1", "chatcmpl-5") + "stop", "s") is None
    assert log.line(DONE.replace("chatcmpl-1", "chatcmpl-98") + "stop", "s") is not None


def test_the_conversation_of_a_finished_prompt_is_its_first_user_part() -> None:
    system, rest = (
        "<|im_start|>system\nIt is {}.<|im_end|>\n",
        PROMPT + "four<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n",
    )
    assert group_of_prompt(system.format(1) + PROMPT) == group_of_prompt(system.format(2) + rest)
    assert group_of_prompt(PROMPT) != group_of_prompt(PROMPT.replace("two", "three"))
    assert group_of_prompt("no marks here") != group_of_prompt("none here either")


# -- faults ---------------------------------------------------------------------------------------------------------


def test_broken_lines_are_named_and_cost_themselves(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    good = json.dumps({"messages": CHAT})
    lines = [
        "{nonsense",
        good,
        "[1, 2]",
        '{"messages": [{"role": "alien", "content": "x"}]}',
        good.replace("two", "six"),
    ]
    path.write_bytes("\n".join(lines).encode() + b'\n\xff\xfe\n{"messages": [{"role": "user", "con')
    answers, reader = read(str(path))
    tally = reader.tallies[0]
    assert len(answers) == 4
    assert (tally.broken, tally.lines) == (5, 7)
    assert [fault.split(":")[1] for fault in tally.faults] == ["1", "3", "4", "6", "7"]
    assert not any("alien" in fault or "con" in fault.split(": ", 1)[1].split("(")[0] for fault in tally.faults)


KEYS = [
    "messages", "conversations", "role", "from", "content", "value", "request", "response", "choices", "message",
    "prompt", "completion", "input", "output", "body", "tool_calls", "function", "name", "arguments", "type", "text",
    "id", "instruction", "finish_reason", "dataset", "reasoning_content",
]  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.floats(allow_nan=False)
    | st.sampled_from(
        [
            "",
            "user",
            "assistant",
            "tool",
            "text",
            "function_call",
            "tool_use",
            "hello",
            '{"messages": []}',
            "[{}]",
            "\ud83d",
        ]
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5))
def test_whatever_a_record_holds_it_is_answers_or_a_fault(record: dict[str, Any]) -> None:
    form_of(record)
    for form in ("chat", "requests", "completions"):
        try:
            for answer in Conversations().answers(record, "f:1", "d", form):
                assert answer.answer
                assert answer.messages or answer.prompt
                answer.answer.encode()  # no lone surrogates
        except ValueError:
            pass


def test_only_the_first_faults_are_named(tmp_path: Path) -> None:
    _, reader = read(write(tmp_path / "l.jsonl", [{"messages": CHAT}, *["{"] * 50]))
    assert (reader.tallies[0].broken, len(reader.tallies[0].faults)) == (50, 5)


def test_gzip_whole_and_torn(tmp_path: Path) -> None:
    plain = "".join(
        json.dumps({"messages": [*CHAT[:3], {"role": "user", "content": str(i)}]}) + "\n" for i in range(4000)
    )
    packed = gzip.compress(plain.replace("two", "six", 1).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    (tmp_path / "b.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    whole, _ = read(str(tmp_path / "a.jsonl.gz"))
    assert [a.answer for a in whole] == ["four", "four"]
    torn, reader = read(str(tmp_path / "b.jsonl.gz"))
    assert len(torn) == 2
    assert "torn" in reader.tallies[0].faults[-1]


def test_a_line_beyond_the_limit_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd.traces.logs.LINE_LIMIT", 1000)
    long = {"messages": [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y"}]}
    answers, reader = read(write(tmp_path / "l.jsonl", [{"messages": CHAT}, long, {"messages": CHAT[1:3][::-1]}]))
    assert len(answers) == 2
    assert (reader.tallies[0].broken, reader.tallies[0].unanswered, reader.tallies[0].lines) == (1, 1, 3)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", b"", "empty"),
        ("a.jsonl", b"\n \n", "empty"),
        ("a.jsonl", b'[{"messages": []}]', "JSON array"),
        ("a.jsonl", b'{"rows": 1}\n', "format is not known"),
        ("a.txt", b"just words\nand more\n", "format is not known"),
        ("a.gz", b"\x1f\x8bnot really", "compressed file is torn"),
        ("a.parquet", b"PAR1 no parquet", "can't be read"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=why) as caught:
        read(str(tmp_path / name))
    assert len(str(caught.value).splitlines()) == 1


def test_unknown_paths_and_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no logs at"):
        read(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match="unknown format"):
        read(write(tmp_path / "l.jsonl", [{"messages": CHAT}]), form="xml")


def test_a_directory_stands_for_its_files(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [{"messages": CHAT}])
    write(tmp_path / "a.jsonl", [{"prompt": "2 + 2 =", "completion": "4"}])
    write(tmp_path / "readme.md", ["no log"])
    answers, reader = read(str(tmp_path))
    assert [tally.format for tally in reader.tallies] == ["completions", "chat"]
    assert len(answers) == 3


def test_of_several_files_those_that_hold_no_log_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    write(tmp_path / "b.txt", ["words"])
    (tmp_path / "c.jsonl").touch()
    (tmp_path / "d.parquet").write_bytes(b"PAR1 torn")
    answers, reader = read(str(tmp_path))
    assert len(answers) == 2
    assert [line.split(":")[0].split(" ")[0].split("/")[-1] for line in reader.skipped] == [
        "b.txt",
        "c.jsonl",
        "d.parquet",
    ]


def test_our_traces_are_read_and_not_taken_for_a_data_set(tmp_path: Path) -> None:
    classes = np.zeros(8, np.uint8)
    trace = Trace("a#1", np.array([1, 2], np.int32), np.array([3, 4], np.int32), classes)
    with TraceWriter(tmp_path / "t", classes) as writer:
        writer.add(trace)
    reader = LogReader([str(tmp_path / "t")])
    found = list(reader)
    assert isinstance(found[0], Trace)
    assert reader.tallies[0].format == "traces"
    with pytest.raises(ConfigError, match="holds traces"):
        read(str(tmp_path / "t"), form="chat")


@pytest.mark.parametrize("sampling", ["{", "[]", "", '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_an_odd_trace_costs_itself(tmp_path: Path, sampling: str) -> None:
    classes = np.zeros(8, np.uint8)
    ids = np.array([3, 4], np.int32)
    with TraceWriter(tmp_path / "t", classes) as writer:
        for name, said in (("good", "{}"), ("odd", sampling)):
            writer.add(Trace(name, ids, ids, classes, sampling=said))
    reader = LogReader([str(tmp_path / "t")])
    assert [trace.id for trace in reader if isinstance(trace, Trace)] == ["good"]
    assert (reader.tallies[0].broken, reader.tallies[0].answers) == (1, 1)
    assert "trace odd: its sampling parameters" in reader.tallies[0].faults[0]


# -- sampling -------------------------------------------------------------------------------------------------------


def some(groups: int, each: int, chars: int = 100) -> list[Recorded]:
    """Answers of conversations in turn, one character of prompt each."""
    return [
        Recorded(f"f:{t * groups + g}", "d", f"g{g}", prompt="p", answer="x" * chars)
        for t in range(each)
        for g in range(groups)
    ]


def sample(answers: Sequence[Recorded], most: int, seed: int = 0) -> Reservoir:
    made = Reservoir(most, 10**9, seed)
    for answer in answers:
        made.add(answer)
    return made


def test_a_sample_holds_whole_conversations_in_order_within_the_bound() -> None:
    answers = some(200, 5)
    made = sample(answers, 20_000)
    kept = [answer for answer in made if isinstance(answer, Recorded)]
    groups = {answer.group for answer in kept}
    assert [a.source for a in kept] == [a.source for a in answers if a.group in groups]
    assert 15_000 <= made.kept_chars <= 20_000
    assert made.kept_chars == 100 * len(kept)
    assert (made.answers, made.answer_chars, made.groups) == (1000, 100_000, len(groups))


def test_a_sample_depends_on_the_seed_and_not_on_the_order() -> None:
    answers = some(200, 2)
    kept = [{a.source for a in sample(each, 5000)} for each in (answers, answers[::-1])]  # type: ignore[union-attr]
    assert kept[0] == kept[1]
    assert {a.source for a in sample(answers, 5000, seed=1)} != kept[0]  # type: ignore[union-attr]


def test_every_conversation_has_the_same_chance() -> None:
    answers = some(40, 1)
    counts = dict.fromkeys((a.group for a in answers), 0)
    for seed in range(400):
        for answer in sample(answers, 1000, seed):
            counts[answer.group] += 1
    assert sum(counts.values()) == 400 * 10
    assert 60 <= min(counts.values()) <= max(counts.values()) <= 145  # 100 expected, standard deviation 8.7


def test_everything_is_kept_when_there_is_room_and_one_conversation_may_fill_it() -> None:
    assert len(sample(some(10, 3), 10**6)) == 30
    alone = sample(some(1, 50), 1000)
    assert [a.source for a in alone] == [f"f:{i}" for i in range(11)]  # type: ignore[union-attr]
