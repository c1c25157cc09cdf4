"""Benchmark sets by name: local files, and the paper's sixteen from files shaped as the hub has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd.bench.hub import Hub, UnreachableError
from hvd.bench.paper_sets import LONGEST, PAPER_SETS
from hvd.bench.sets import PAPER_LIMIT, describe, local_sets, paper_sets
from hvd.errors import ConfigError

PASSAGES = {"title": ["Ohio", "Erie"], "sentences": [["Ohio is a state.", " It is wide."], ["Erie is a lake."]]}
RUN = [
    {"role": "system", "content": "You fix bugs.", "tool_calls": None},
    {"role": "user", "content": "Fix it.", "tool_calls": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}],
    },
    {"role": "tool", "content": "a.py", "tool_calls": None},
    {"role": "assistant", "content": "Done.", "tool_calls": None},
]

ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    "delegate52": (
        "delegate52.jsonl",
        {
            "sample_id": "recipe1",
            "sample_type": "recipe",
            "sample_name": "Bread",
            "metadata": {"start_state": "basic_state"},
            "states": [
                {"state_id": "basic_state", "prompts": [{"target_state": "metric", "prompt": "Use grams."}]},
                {"state_id": "metric", "prompts": [{"target_state": "basic_state", "prompt": "Use cups."}]},
            ],
            "files": {"basic_state/bread.md": "2 cups flour", "distractor_context/x.md": "no"},
        },
        "2 cups flour",
    ),
    "fineedit": (
        "data/test-00000-of-00001.parquet",
        {"context": "a cat", "edit_request": "say dog", "edit_content": "a dog", "diff": "-", "g_score": 9.0},
        "say dog",
    ),
    "repobench": (
        "data/cross_file_first-00000-of-00001.parquet",
        {
            "repo_name": "o/r",
            "file_path": "m.py",
            "context": [{"identifier": "f", "path": "u.py", "snippet": "def f(): ..."}],
            "import_statement": "from u import f",
            "cropped_code": "x = 1",
            "all_code": "x = 1\nf()",
            "next_line": "f()",
        },
        "def f(): ...",
    ),
    "swe_bench_openhands": (
        "trajectories.parquet",
        {"trajectory_id": "t", "instance_id": "i", "repo": "o/r", "trajectory": RUN, "resolved": 1},
        "Fix it.",
    ),
    "magicoder": (
        "data-oss_instruct-decontaminated.jsonl",
        {"lang": "python", "raw_index": 1, "index": 1, "seed": "x", "problem": "Write a stack.", "solution": "..."},
        "Write a stack.",
    ),
    "mbpp": (
        "full/test-00000-of-00001.parquet",
        {"task_id": 11, "text": "Add two numbers.", "code": "...", "test_list": ["assert add(1, 2) == 3"]},
        "assert add(1, 2) == 3",
    ),
    "bfcl": (
        "BFCL_v3_live_multiple.json",
        {
            "id": "live_multiple_0-0-0",
            "question": [
                [{"role": "user", "content": "Weather in Rome?"}],
                [{"role": "user", "content": "And in Oslo?"}],
            ],
            "function": [{"name": "get_weather", "description": "d", "parameters": {"type": "dict"}}],
        },
        "Weather in Rome?",
    ),
    "spider": (
        "spider/validation-00000-of-00001.parquet",
        {"db_id": "concert", "query": "SELECT 1", "question": "How many singers?", "query_toks": ["SELECT"]},
        "How many singers?",
    ),
    "hotpotqa": (
        "distractor/validation-00000-of-00001.parquet",
        {"id": "5a", "question": "Which lake?", "answer": "Erie", "type": "bridge", "context": PASSAGES},
        "Ohio: Ohio is a state. It is wide.",
    ),
    "musique": (
        "musique_ans_v1.0_dev.jsonl",
        {
            "id": "2hop",
            "paragraphs": [{"idx": 0, "title": "Erie", "paragraph_text": "A lake.", "is_supporting": True}],
            "question": "Which lake?",
            "answer": "Erie",
            "answerable": True,
        },
        "Erie: A lake.",
    ),
    "2wiki": (
        "dev.parquet",
        {
            "_id": "d0",
            "type": "c",
            "question": "Who?",
            "context": json.dumps([["Ann", ["She ", "sang."]]]),
            "answer": "Ann",
        },
        "Ann: She sang.",
    ),
    "infinitebench": (
        "longbook_sum_eng.jsonl",
        {"id": 0, "context": "Once upon a time", "input": "", "answer": ["..."], "options": []},
        "Once upon a time",
    ),
    "cnn_dailymail": (
        "3.0.0/test-00000-of-00001.parquet",
        {"article": "It rained.", "highlights": "Rain.", "id": "a"},
        "It rained.",
    ),
    "gov_report": ("plain_text/test/0000.parquet", {"id": "g", "document": "Findings.", "summary": "S"}, "Findings."),
    "alpaca": (
        "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        {"instruction": "Name a colour.", "input": "", "output": "Red", "text": "..."},
        "Name a colour.",
    ),
    "mt_bench": (
        "raw/question.jsonl",
        {"category": "writing", "prompt": ["Write a poem.", "Now shorter."], "prompt_id": 81, "reference": []},
        "Write a poem.",
    ),
}
"""File as the hub names it, one row in its columns, and what its first prompt must hold."""


class FakeHub(Hub):
    """The hub as files of a directory: DIR/OWNER/NAME/REVISION/FILE. Others are not to be had."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.asked: list[str] = []
        self.streamed: list[str] = []

    def names(self, repo: str, revision: str) -> list[str]:
        self.asked.append(repo)
        folder = self.root / repo / revision
        if not (self.root / repo).exists():
            raise OSError("Name or service not known")
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]

    def download(self, repo: str, revision: str, name: str) -> Path:
        return self.root / repo / revision / name

    def open(self, repo: str, revision: str, name: str) -> Any:
        self.streamed.append(name)
        return (self.root / repo / revision / name).open("rb")


def put(root: Path, repo: str, name: str, rows: Sequence[dict[str, Any]]) -> None:
    path = root / repo / ("refs/convert/parquet" if name.startswith("plain_text/") else "main") / name
    path.parent.mkdir(parents=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.fixture(autouse=True)
def no_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    for name, (file, row, _) in ROWS.items():
        put(tmp_path / "hub", PAPER_SETS[name].sources[0][0], file, [row])
    return FakeHub(tmp_path / "hub")


def test_there_are_sixteen_with_stand_ins_and_a_row_of_each_is_tried_here() -> None:
    assert len(PAPER_SETS) == 16
    assert set(ROWS) == set(PAPER_SETS)
    assert all(paper.stand_ins for paper in PAPER_SETS.values())


@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_of_the_hub_becomes_a_conversation(hub: FakeHub, name: str) -> None:
    warnings: list[str] = []
    [prompt] = PAPER_SETS[name].prompts(hub, warnings.append)
    assert not warnings
    assert (prompt.dataset, prompt.category) == (name, PAPER_SETS[name].category)
    assert ROWS[name][2] in "\n".join(message["content"] for message in prompt.turns[0].messages)
    assert prompt.split in ("train", "dev", "test")


def test_turns_are_as_the_sets_have_them(hub: FakeHub) -> None:
    def turns(name: str) -> Any:
        [prompt] = PAPER_SETS[name].prompts(hub, pytest.fail)
        return prompt.turns

    assert [len(turns(name)) for name in ("delegate52", "mt_bench", "bfcl", "alpaca")] == [2, 2, 2, 1]
    assert "Use cups." in turns("delegate52")[1].messages[0]["content"]
    assert "no" not in turns("delegate52")[0].messages[0]["content"].split("```")[1].split()
    assert "get_weather" in turns("bfcl")[0].messages[0]["content"]
    first, second = turns("swe_bench_openhands")
    assert first.recorded == '\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert (second.messages[0]["content"], second.recorded) == ("a.py", "Done.")


def test_a_large_file_is_read_over_the_network_and_a_long_run_is_cut(hub: FakeHub, tmp_path: Path) -> None:
    long = [*RUN, {"role": "user", "content": "x" * LONGEST, "tool_calls": None}, RUN[-1]]
    path = tmp_path / "hub" / "nebius/SWE-rebench-openhands-trajectories/main/trajectories.parquet"
    pq.write_table(pa.Table.from_pylist([{"trajectory": long}]), path)
    [prompt] = PAPER_SETS["swe_bench_openhands"].prompts(hub, pytest.fail)
    assert len(prompt.turns) == 2
    assert hub.streamed == ["trajectories.parquet"]


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "Fix "}, {"type": "image", "text": None}, {"type": "text", "text": "it."}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Done."}]
    record = PAPER_SETS["swe_bench_openhands"].convert({"messages": messages})
    assert record["messages"][0]["content"] == "Fix it."


def test_the_next_source_is_tried_and_the_hubs_own_conversion(hub: FakeHub, tmp_path: Path) -> None:
    [prompt] = PAPER_SETS["gov_report"].prompts(hub, pytest.fail)  # lies on the conversion's branch
    assert "Findings." in prompt.turns[0].messages[0]["content"]
    alone = FakeHub(tmp_path / "other")
    put(alone.root, "launch/gov_report", "README.md", [{}])
    put(
        alone.root,
        "ccdv/govreport-summarization",
        "document/test-00000-of-00001.parquet",
        [{"report": "R", "summary": "S"}],
    )
    [prompt] = PAPER_SETS["gov_report"].prompts(alone, pytest.fail)
    assert prompt.turns[0].messages[0]["content"].endswith("R")


def test_rows_of_another_shape_are_named_and_passed_over(hub: FakeHub, tmp_path: Path) -> None:
    path = tmp_path / "hub/ise-uiuc/Magicoder-OSS-Instruct-75K/main/data-oss_instruct-decontaminated.jsonl"
    path.write_text('{"task": "x"}\n{"problem": "Good."}\n', "utf-8")
    warnings: list[str] = []
    [prompt] = PAPER_SETS["magicoder"].prompts(hub, warnings.append)
    assert prompt.turns[0].messages[0]["content"] == "Good."
    assert warnings == ["magicoder, row 0: not as expected (KeyError: 'problem'); passed over"]


def test_torn_files_are_one_clear_error(hub: FakeHub, tmp_path: Path) -> None:
    for name, repo in (("alpaca", "tatsu-lab/alpaca"), ("musique", "dgslibisey/MuSiQue")):
        [path] = (tmp_path / "hub" / repo).rglob("*.*")
        path.write_bytes(b"torn")
        with pytest.raises(UnreachableError, match="can't be read as"):
            list(PAPER_SETS[name].prompts(hub, pytest.fail))


def test_the_suite_takes_all_or_those_named(hub: FakeHub) -> None:
    found = paper_sets(hub, [], None, None, pytest.fail)
    assert found.sets == list(PAPER_SETS)
    assert len(found.prompts) == 16
    assert not found.missing
    assert paper_sets(hub, ["mbpp", "spider"], None, 1, pytest.fail).sets == ["mbpp", "spider"]
    with pytest.raises(ConfigError, match=r"no set 'mbppp'.*mt_bench"):
        paper_sets(hub, ["mbppp"], None, None, pytest.fail)


def test_some_of_a_large_set_are_enough(tmp_path: Path) -> None:
    put(
        tmp_path,
        "tatsu-lab/alpaca",
        "data/train-0.parquet",
        [{"instruction": f"Say {i}", "input": ""} for i in range(200)],
    )
    assert len(paper_sets(FakeHub(tmp_path), ["alpaca"], None, None, pytest.fail).prompts) == PAPER_LIMIT
    dev = paper_sets(FakeHub(tmp_path), ["alpaca"], "dev", 5, pytest.fail).prompts
    assert [prompt.split for prompt in dev] == ["dev"] * 5


def test_without_a_network_one_line_names_what_is_missing_and_what_stands_in(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    for name in ("alpaca_seed", "mbpp"):
        (tmp_path / "local" / f"{name}.jsonl").write_text('{"prompt": "hi"}\n', "utf-8")
    hub = FakeHub(tmp_path / "empty")
    found = paper_sets(hub, ["alpaca", "mbpp", "spider"], None, None, pytest.fail, tmp_path / "local")
    assert found.sets == ["alpaca_seed", "mbpp"]
    assert [prompt.dataset for prompt in found.prompts] == ["alpaca_seed", "mbpp"]
    assert hub.asked == ["tatsu-lab/alpaca"]  # no answer once is no answer for all
    line = describe(found.missing)
    assert "alpaca (in its place: alpaca_seed)" in line
    assert "spider (stands in for it: spider_sql, intercode_sql)" in line
    assert "Name or service not known" in line
    assert "\n" not in line
    with pytest.raises(ConfigError, match=r"none of the sets.*--data-dir"):
        paper_sets(FakeHub(tmp_path / "empty"), ["spider"], None, None, pytest.fail)


def test_what_was_downloaded_before_serves_without_a_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub-cache" / "datasets--tatsu-lab--alpaca" / "snapshots" / "0123" / "data"
    snapshot.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{"instruction": "Say hi", "input": ""}]), snapshot / "train-0.parquet")
    found = paper_sets(FakeHub(tmp_path / "empty"), ["alpaca"], None, None, pytest.fail)
    assert found.sets == ["alpaca"]
    assert len(found.prompts) == 1


def test_local_sets_go_by_their_files_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "hi"}\n' * 3, "utf-8")
    assert local_sets(tmp_path, [], None, 2, pytest.fail).sets == ["a", "b"]
    found = local_sets(tmp_path, ["b"], None, 2, pytest.fail)
    assert [prompt.dataset for prompt in found.prompts] == ["b", "b"]
    with pytest.raises(ConfigError, match=r"no set 'c'.*a, b"):
        local_sets(tmp_path, ["c"], None, None, pytest.fail)
    with pytest.raises(ConfigError, match="no prompt files"):
        local_sets(tmp_path / "nowhere", [], None, None, pytest.fail)


# -- the hub's own client ---------------------------------------------------------------------------------------------


def test_files_come_by_the_hubs_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    path = tmp_path / "train-0.parquet"
    pq.write_table(pa.Table.from_pylist([{"instruction": "Say hi", "input": ""}]), path)

    class Api:
        def dataset_info(self, repo: str, revision: str, timeout: float) -> Any:
            name = "README.md" if revision == "main" else "default/train/0000.parquet"
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name)])

    def download(repo: str, name: str, *, repo_type: str, revision: str) -> str:
        asked.append((repo, name, repo_type, revision))
        return str(path)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    [prompt] = PAPER_SETS["alpaca"].prompts(Hub(), pytest.fail)
    assert prompt.turns[0].messages[0]["content"] == "Say hi"
    assert asked == [("tatsu-lab/alpaca", "default/train/0000.parquet", "dataset", "refs/convert/parquet")]


def test_an_answer_that_says_no_is_not_a_missing_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    class GoneError(HfHubHTTPError):
        def __init__(self) -> None:
            Exception.__init__(self, "404 Client Error\nmore")

    errors: list[BaseException] = [GoneError(), GoneError(), HfHubHTTPError.__bases__[0]("no route")]

    class Api:
        def dataset_info(self, repo: str, revision: str, timeout: float) -> Any:
            raise errors.pop(0)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    hub = Hub()
    for says in ("404 Client Error", "404 Client Error", "no route", "no route"):
        with pytest.raises(UnreachableError, match=says):
            next(hub.rows("tatsu-lab/alpaca", ["*.parquet"]))
    assert not errors
