"""`hvd bench` from the outside: what is measured, what goes together, tables for any width."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvd.bench.file import BenchFile, read_bench
from hvd.bench.runner import Outcome, Runner
from hvd.cli.bench import EVERY_POLICY
from hvd.cli.bench_tables import by_group, overview
from hvd.cli.common import ModelOptions
from hvd.cli.main import main
from hvd.engine.llm import LLM
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.types import Arm
from support import OracleDrafter, make_llm

V = 512
Bench = Callable[..., tuple[int, str]]


@pytest.fixture
def base(tiny_model: Callable[..., Path]) -> LLM:
    tokenizer = Tokenizer.from_directory(tiny_model("llama", vocab=V))
    return make_llm(FakeTarget(V, context_limit=512, order=1, seed=3), tokenizer)


@pytest.fixture
def bench(base: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    monkeypatch.setattr(ModelOptions, "open", lambda options, config=None: base)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    for name in ("chat", "edits", "mbpp"):
        lines = [json.dumps({"prompt": f"{name} {i}", "category": name, "split": "test"}) + "\n" for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), "utf-8")

    def call(*arguments: str) -> tuple[int, str]:
        code = main(["bench", "--model", "fake", "--max-tokens", "16", *arguments])
        return code, "".join(capsys.readouterr())

    return call


def test_sets_of_a_directory_by_name(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = ("--suite", "local", "--data-dir", str(tmp_path), "--limit", "2", "--json", str(out), "--policies", "cache")
    assert bench(*given, "--sets", "edits,chat")[0] == 0
    written = read_bench(out)
    assert written["data"]["sets"] == ["edits", "chat"]
    assert [record["dataset"] for record in written["records"][::4]] == ["edits", "chat"]
    code, said = bench(*given, "--sets", "edit", "--overwrite")
    assert code == 2
    assert "chat, edits, mbpp" in said


def test_every_policy_by_one_word(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, said = bench("--data", str(tmp_path / "chat.jsonl"), "--limit", "1", "--policies", "all", "--json", str(out))
    assert code == 0, said
    written = read_bench(out)
    assert [record["policy"] for record in written["records"]] == list(EVERY_POLICY)
    assert written["model"]["eagle3"] is None


def test_with_a_head_the_head_alone_is_one_of_all(bench: Bench, base: LLM, tmp_path: Path) -> None:
    base.drafters[Arm.EAGLE3] = OracleDrafter({}, V)
    out = tmp_path / "out.json"
    code, said = bench("--data", str(tmp_path / "chat.jsonl"), "--limit", "1", "--policies", "all", "--json", str(out))
    assert code == 0, said
    written = read_bench(out)
    assert [record["policy"] for record in written["records"]] == [*EVERY_POLICY, "eagle3"]
    assert written["model"]["eagle3"] == "auto"


def test_without_a_network_the_papers_sets_have_stand_ins_in_one_line(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(hub: Any, repo: str, revision: str) -> list[str]:
        raise OSError("no network")

    monkeypatch.setattr("hvd.bench.hub.Hub.names", silent)
    out = tmp_path / "out.json"
    given = ("--suite", "paper", "--sets", "mbpp,spider", "--policies", "cache", "--limit", "1", "--json", str(out))
    code, said = bench(*given)
    assert code == 2
    assert "spider_sql" in said
    assert said.count("\n") == 1
    code, said = bench(*given, "--data-dir", str(tmp_path))
    assert code == 0, said
    [line] = [line for line in said.splitlines() if "could not be had" in line]
    assert "mbpp (in its place: mbpp), spider (stands in for it: spider_sql, intercode_sql)" in line
    missing = read_bench(out)["data"]["missing"]
    assert [(entry["name"], entry["read"]) for entry in missing] == [("mbpp", True), ("spider", False)]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "give prompt files"),
        (("--suite", "local"), "--data-dir"),
        (("--data", "x", "--sets", "a"), "--sets chooses from a suite"),
        (("--data", "x", "--resume"), "name it with --json"),
        (("--data", "x", "--policies", ","), "names no policy"),
        (("--data", "x", "--peers", "sglang"), "unknown peer"),
    ],
)
def test_options_that_dont_go_together_are_told_in_one_line(bench: Bench, given: tuple[str, ...], says: str) -> None:
    code, said = bench(*given)
    assert code == 2
    assert says in said
    assert said.count("\n") == 1


def test_a_resumed_run_is_analysed_as_a_whole(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    given = ("--data", str(tmp_path / "chat.jsonl"), "--policies", "hvd", "--json", str(out))
    assert bench(*given, "--limit", "1")[0] == 0
    assert bench(*given, "--limit", "3", "--resume")[0] == 0
    [whole] = [g for g in read_bench(out)["analysis"]["groups"] if g["loops"] and g["level"] == "all"]
    assert whole["prompts"] == 3
    assert whole["tokens"] == 48
    assert bench(*given, "--no-analysis", "--overwrite")[0] == 0
    assert read_bench(out)["analysis"]["groups"] == []


def test_an_old_file_is_not_gone_on_with(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    old = Path(__file__).parents[1] / "benchmarks" / "results" / "bench-smollm2.json"
    out.write_bytes(old.read_bytes())
    code, said = bench("--data", str(tmp_path / "chat.jsonl"), "--json", str(out), "--resume")
    assert code == 2
    assert "format 1, now 2" in said


def test_adding_up_takes_a_small_part_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    writes: list[float] = []
    monkeypatch.setattr("hvd.bench.file.time.monotonic", lambda: now[0])

    def slow(file: BenchFile) -> dict[str, Any]:
        writes.append(now[0])
        now[0] += 10.0  # a write takes ten seconds
        return {}

    monkeypatch.setattr(BenchFile, "content", slow)
    file = BenchFile(tmp_path / "x.json", {}, {}, {}, every=1)
    for _ in range(100):
        file.add(Outcome())
        now[0] += 5.0
    assert writes == [0.0, 210.0, 420.0]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_an_end_from_outside_leaves_the_file_and_says_how_to_go_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / "out.json"
    given = ("--data", str(tmp_path / "chat.jsonl"), "--policies", "cache", "--no-analysis", "--json", str(out))
    run, done = Runner.run, list[int]()
    number = getattr(signal, name)
    before = signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)

    def stopped(runner: Runner, *arguments: Any) -> Outcome:
        if done:
            os.kill(os.getpid(), number)
        done.append(1)
        return run(runner, *arguments)

    monkeypatch.setattr(Runner, "run", stopped)
    usual = signal.getsignal(number)
    code, said = bench(*given)
    left = signal.signal(number, before)
    assert code == 130
    assert f"PARTIAL: 1 of 3 conversations were measured; the same command with --resume goes on with {out}" in said
    assert len({record["id"] for record in read_bench(out)["records"]}) == 1
    assert left == usual
    monkeypatch.setattr(Runner, "run", run)
    code, said = bench(*given, "--resume")
    assert code == 0
    assert "PARTIAL" not in said
    assert "only 3 prompts: too few to conclude anything from" in said


# -- tables -----------------------------------------------------------------------------------------------------------


def summary(sets: int) -> dict[str, Any]:
    rows = []
    groups = [("dataset", f"infinitebench_style_{i}") for i in range(sets)] + [("category", "agentic"), ("all", "all")]
    for loops in (True, False):
        for level, group in groups:
            for policy in (*EVERY_POLICY, "plain-again", "transformers-lookup"):
                peer = "transformers" if policy == "transformers-lookup" else None
                rows.append(
                    {
                        "loops": loops, "level": level, "group": group, "policy": policy, "peer": peer, "prompts": 120,
                        "speedup_micro": 12.34, "speedup_macro": 12.34, "macro_low": 11.11, "macro_high": 13.33,
                        "tokens_per_cycle": None if peer else 10.01,
                    }
                )  # fmt: skip
    return {"rows": rows, "looped": 3}


@pytest.mark.parametrize("width", [50, 80, 120, 160])
def test_tables_read_well_at_any_width(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    found = summary(3)
    console.print(overview(found, {"hvd": 3}, width))
    for table in by_group([row for row in found["rows"] if row["loops"]], "by set", width):
        console.print(table)
    lines = console.export_text().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    assert not any("\u2026" in line for line in lines)
    text = "\n".join(lines)
    for policy in (*EVERY_POLICY, "transformers-lookup"):
        assert policy in text
    assert ("(10.01)" in text) is (width >= 80)
    assert ("11.11 - 13.33" in text) is (width >= 80)
    shown = [line for line in lines if line.strip().startswith("infinitebench_style_0")]
    assert len(shown) == {50: 10, 80: 4, 120: 3, 160: 2}[width]


def test_the_overview_leaves_out_what_there_is_not() -> None:
    found = summary(1) | {"looped": 0}
    table = overview(found, {}, 120)
    assert [column.header for column in table.columns] == ["method", "speed", "95 %", "tok/pass", "first in"]
    assert table.row_count == len(EVERY_POLICY) + 2
