"""The paper's sixteen data sets: where they lie on the Hugging Face hub, and how a row of each becomes a conversation.

The wording around a row's content is ours. Licences are the data sets' own; nothing of them is kept by this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hvd.bench.hub import Hub, Row, UnreachableError
from hvd.traces.prompts import Prompt, parse_record

LONGEST = 60_000
"""Characters of a recorded conversation that are used: some go on for hundreds of thousands."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PaperSet:
    """One of the sixteen.

    sources     (hub id, file patterns), the next ones where the first can't be had
    stand_ins   local sets of the same kind, for when there is no network
    convert     a row -> a record of `hvd.traces.prompts`; KeyError, TypeError or ValueError for a row of another shape
    stream      the file is gigabytes: read what is needed of it, over the network
    """

    name: str
    category: str
    sources: tuple[tuple[str, tuple[str, ...]], ...]
    stand_ins: tuple[str, ...]
    convert: Callable[[Row], Record]
    stream: bool = False

    def prompts(self, hub: Hub, warn: Callable[[str], None]) -> Iterator[Prompt]:
        """Its conversations. A row of another shape is named and passed over. Raises UnreachableError."""
        for number, row in enumerate(self._rows(hub)):
            try:
                yield parse_record(self.convert(row) | {"category": self.category}, self.name, number)
            except (KeyError, TypeError, ValueError) as error:
                warn(f"{self.name}, row {number}: not as expected ({type(error).__name__}: {error}); passed over")

    def _rows(self, hub: Hub) -> Iterator[Row]:
        failure: UnreachableError | None = None
        for repo, patterns in self.sources:
            try:
                rows = hub.rows(repo, patterns, stream=self.stream)
                first = next(rows, None)
            except UnreachableError as error:
                failure = failure or error
                continue
            if first is not None:
                yield first
                yield from rows
                return
        raise failure or UnreachableError(f"{self.sources[0][0]} is empty")


def _user(*parts: str) -> Record:
    return {"messages": [{"role": "user", "content": "\n\n".join(part for part in parts if part)}], "gen": "open"}


# -- editing ----------------------------------------------------------------------------------------------------------


def _delegate(row: Row) -> Record:
    """Edit the documents, then undo it. (sample_id, metadata, states with prompts, files by "STATE/NAME")"""
    states = {state["state_id"]: state for state in row["states"]}
    start = states[row["metadata"]["start_state"]]
    files = {p.partition("/")[2]: t for p, t in row["files"].items() if p.partition("/")[0] == start["state_id"]}
    forward = start["prompts"][0]
    back = next(p for p in states[forward["target_state"]]["prompts"] if p["target_state"] == start["state_id"])
    documents = "\n\n".join(f"```{name}\n{text}\n```" for name, text in sorted(files.items()))
    task = "Carry out the task on these documents. Answer with the changed documents, whole, in the same form."
    record = _user(task, documents, f"Task: {forward['prompt']}")
    record["messages"].append({"role": "user", "content": f"Now this task, on your documents: {back['prompt']}"})
    return record | {"id": f"delegate52/{row['sample_id']}"}


def _fineedit(row: Row) -> Record:
    request = "Edit this text. Answer with the whole text, changed only where asked."
    return _user(request, f"Edit: {row['edit_request']}", f"Text:\n{row['context']}")


# -- coding -----------------------------------------------------------------------------------------------------------


def _repobench(row: Row) -> Record:
    """Definitions from other files, then the file up to a line. (context: identifier, path, snippet)"""
    others = "\n\n".join(f"# Path: {part['path']}\n{part['snippet']}" for part in row["context"])
    here = f"# Path: {row['file_path']}\n{row['import_statement']}\n{row['cropped_code']}"
    return _user("Continue the last file by about twenty lines. Answer with code only.", others, here)


def _magicoder(row: Row) -> Record:
    return _user(row["problem"])


def _mbpp(row: Row) -> Record:
    return _user(row["text"], "Your code must pass these tests:\n" + "\n".join(row["test_list"]))


# -- agentic and structured -------------------------------------------------------------------------------------------


def _openhands(row: Row) -> Record:
    """A recorded run; each answer is generated anew. (trajectory or messages: role, content, tool_calls)"""
    messages: list[dict[str, str]] = []
    length = 0
    for message in row["trajectory"] if "trajectory" in row else row["messages"]:
        text = _text(message.get("content")) + "".join(map(_tool_call, message.get("tool_calls") or ()))
        length += len(text)
        if length > LONGEST:
            break
        messages.append({"role": message["role"], "content": text})
    return {"messages": messages, "gen": "replay"}


def _text(content: Any) -> str:
    """Content given as text, in parts, or not at all."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("text"))
    return content or ""


def _tool_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    given = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"\n<tool_call>\n{given}\n</tool_call>"


def _bfcl(row: Row) -> Record:
    """Function documents and a conversation; turn by turn. (question: a list of messages a turn)"""
    tools = "\n".join(json.dumps(function, ensure_ascii=False) for function in row["function"])
    system = f'Call functions to answer, as JSON objects with "name" and "arguments". The functions:\n{tools}'
    turns = [message for turn in row["question"] for message in turn]
    return {"messages": [{"role": "system", "content": system}, *turns], "gen": "open"}


def _spider(row: Row) -> Record:
    return _user(f"Write one SQL query for the database {row['db_id']}. Answer with the query only.", row["question"])


# -- reading ----------------------------------------------------------------------------------------------------------


def _with_passages(question: str, passages: Iterable[tuple[str, str]]) -> Record:
    ask = "Answer from the passages. Quote the sentences that you use, then give the answer."
    return _user(ask, *(f"{title}: {text}" for title, text in passages), f"Question: {question}")


def _multihop(row: Row) -> Record:
    """HotpotQA's `context` of `title` and `sentences`, or 2Wiki's JSON text of [title, sentences] pairs."""
    context = json.loads(row["context"]) if isinstance(row["context"], str) else row["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    return _with_passages(row["question"], ((title, "".join(sentences)) for title, sentences in pairs))


def _musique(row: Row) -> Record:
    return _with_passages(row["question"], ((p["title"], p["paragraph_text"]) for p in row["paragraphs"]))


def _infinite(row: Row) -> Record:
    return _user("Summarize this book.", row["context"])


def _cnn(row: Row) -> Record:
    return _user("Summarize this article in three sentences.", row["article"])


def _gov(row: Row) -> Record:
    return _user("Summarize this report in one page.", row["document"] if "document" in row else row["report"])


# -- chat -------------------------------------------------------------------------------------------------------------


def _alpaca(row: Row) -> Record:
    return _user(row["instruction"], row["input"])


def _mt_bench(row: Row) -> Record:
    return {"messages": [{"role": "user", "content": turn} for turn in row["prompt"]], "gen": "open"}


PAPER_SETS: dict[str, PaperSet] = {
    paper.name: paper
    for paper in (
        PaperSet(
            "delegate52", "editing", (("microsoft/delegate52", ("delegate52.jsonl",)),), ("delegate52",), _delegate
        ),
        PaperSet(
            "fineedit",
            "editing",
            (("YimingZeng/FineEdit_bench", ("*test*.parquet", "*test*.jsonl", "*.parquet", "*.jsonl", "*.json")),),
            ("fineedit_text", "workflow_edit", "commit_edit", "editeval"),
            _fineedit,
        ),
        PaperSet(
            "repobench",
            "coding",
            (
                (
                    "tianyang/repobench_python_v1.1",
                    ("data/cross_file_first*.parquet", "default/cross_file_first/*.parquet"),
                ),
            ),
            ("repobench_style",),
            _repobench,
        ),
        PaperSet(
            "swe_bench_openhands",
            "agentic",
            (
                ("nebius/SWE-rebench-openhands-trajectories", ("trajectories.parquet", "default/train/*.parquet")),
                ("SWE-Gym/OpenHands-Sampled-Trajectories", ("data/train.raw*.parquet",)),
            ),
            ("openhands_swe", "swe_mini"),
            _openhands,
            stream=True,
        ),
        PaperSet(
            "magicoder",
            "coding",
            (("ise-uiuc/Magicoder-OSS-Instruct-75K", ("data-oss_instruct*.jsonl", "default/train/*.parquet")),),
            ("oss_instruct",),
            _magicoder,
        ),
        PaperSet(
            "mbpp",
            "coding",
            (("google-research-datasets/mbpp", ("full/test*.parquet", "full/test/*.parquet")),),
            ("mbpp",),
            _mbpp,
        ),
        PaperSet(
            "bfcl",
            "structured",
            (("gorilla-llm/Berkeley-Function-Calling-Leaderboard", ("BFCL_v*_live_multiple.json",)),),
            ("bfcl_live", "bfcl_multi_turn"),
            _bfcl,
        ),
        PaperSet(
            "spider",
            "structured",
            (("xlangai/spider", ("spider/validation*.parquet", "spider/validation/*.parquet")),),
            ("spider_sql", "intercode_sql"),
            _spider,
        ),
        PaperSet(
            "hotpotqa",
            "rag",
            (("hotpotqa/hotpot_qa", ("distractor/validation*.parquet", "distractor/validation/*.parquet")),),
            ("hotpotqa_docs", "react_hotpotqa"),
            _multihop,
        ),
        PaperSet(
            "musique",
            "rag",
            (("dgslibisey/MuSiQue", ("musique_ans_v1.0_dev.jsonl", "default/validation/*.parquet")),),
            ("musique_docs",),
            _musique,
        ),
        PaperSet(
            "2wiki",
            "rag",
            (("xanhho/2WikiMultihopQA", ("dev.parquet", "default/validation/*.parquet", "default/dev/*.parquet")),),
            ("twowiki_docs",),
            _multihop,
        ),
        PaperSet(
            "infinitebench",
            "long_context",
            (("xinrongzhang2022/InfiniteBench", ("longbook_sum_eng.jsonl",)),),
            ("infinitebench_style",),
            _infinite,
        ),
        PaperSet(
            "cnn_dailymail",
            "summarization",
            (("abisee/cnn_dailymail", ("3.0.0/test*.parquet", "3.0.0/test/*.parquet")),),
            ("cnn_dm",),
            _cnn,
        ),
        PaperSet(
            "gov_report",
            "summarization",
            (
                ("launch/gov_report", ("plain_text/test/*.parquet",)),
                ("ccdv/govreport-summarization", ("document/test*.parquet", "document/test/*.parquet")),
            ),
            ("gov_report",),
            _gov,
        ),
        PaperSet(
            "alpaca",
            "chat",
            (("tatsu-lab/alpaca", ("data/train*.parquet", "default/train/*.parquet")),),
            ("alpaca_seed", "self_instruct"),
            _alpaca,
        ),
        PaperSet(
            "mt_bench",
            "chat",
            (("HuggingFaceH4/mt_bench_prompts", ("data/train*.parquet", "default/train/*.parquet", "*.jsonl")),),
            ("mt_bench",),
            _mt_bench,
        ),
    )
}
"""By the names that `--sets` takes."""
