"""`hvd explain`: live and replayed, on the terminal, as JSON and as a page; what can't be done is said in one line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hvd.cli.common import ModelOptions
from hvd.cli.main import main
from hvd.config import EngineConfig
from hvd.engine.llm import LLM
from hvd.report.explain import ExplainedRequest
from hvd.report.explain_text import ExplainView
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.traces.schema import Trace
from hvd.traces.writer import TraceWriter
from hvd.types import FinishReason
from support import flat_cost, make_llm

V = 512
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", vocab=V)


@pytest.fixture
def run(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command; every model that it opens is a fake target with a byte-level tokenizer."""
    target, tokenizer = FakeTarget(V, context_limit=512, order=1, seed=3), Tokenizer.from_directory(model)

    def open_fake(options: ModelOptions, config: EngineConfig | None = None) -> LLM:
        return make_llm(target, tokenizer, policy=(config or EngineConfig()).policy)

    monkeypatch.setattr(ModelOptions, "open", open_fake)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["explain", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def traced(run: Run, model: Path, tmp_path: Path) -> tuple[str, ...]:
    """Arguments that replay two recorded requests, "set/a" and "set/b"."""
    tokenizer = Tokenizer.from_directory(model)
    answer = json.loads(run("abc abc", "--model", "fake", "--max-tokens", "90", "--json")[1])
    with TraceWriter(tmp_path / "traces", tokenizer.token_classes()) as writer:
        for name in ("a", "b"):
            writer.add(
                Trace(
                    f"set/{name}",
                    np.asarray(answer["prompt_token_ids"], np.int32),
                    np.asarray(answer["token_ids"], np.int32),
                    tokenizer.token_classes(),
                    FinishReason.LENGTH,
                    model="fake",
                    tokenizer_fingerprint=tokenizer.fingerprint,
                    dataset="set",
                )
            )
    flat_cost().save(tmp_path / "cost.json")
    return "--trace", str(tmp_path / "traces"), "--cost", str(tmp_path / "cost.json")


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err


def test_the_overview_marks_drafted_text_and_lists_cycles(run: Run) -> None:
    code, out, err = run("abc abc", "--model", "fake", "--max-tokens", "90", "--policy", "cache")
    assert (code, err) == (0, "")
    assert "\u00abdrafted by the cache\u00bb" in out
    assert "90 tokens in" in out
    assert "a cycle (cache " in out
    rows = [line.split() for line in out.splitlines() if "cache" in line.split()[2:3]]
    assert sum(int(row[6]) for row in rows) > 40  # accepted


@pytest.mark.parametrize("columns", [None, "80", "60"])
def test_nothing_but_the_text_is_wider_than_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    wanted = ("abc abc", "--model", "fake", "--max-tokens", "90")
    overview = run(*wanted, "--policy", "hvd")[1]
    table = overview[overview.index("a cycle (") :]
    most = int(columns or 80)
    assert max(map(len, table.splitlines())) <= most
    if most == 80:
        assert table.splitlines()[2].split() == [
            "cycle", "token", "arm", "offered", "match", "drafted", "accepted", "expected",
        ]  # fmt: skip
    cycle = run(*wanted, "--policy", "hvd", "--cycle", "5")[1]
    assert "P(accepted >= k)" in cycle or most < 80
    assert max(map(len, cycle[cycle.index("verify") :].splitlines())) <= most


def test_a_cycle_says_its_choice_once(run: Run) -> None:
    for policy in ("plain", "cache", "hvd"):
        out = run("abc abc", "--model", "fake", "--max-tokens", "30", "--policy", policy, "--cycle", "2")[1]
        [line] = [line for line in out.splitlines() if line.startswith("choice: ")]
        assert "reason" not in line
        assert line.count("plain") + line.count("cache") == 1


def test_one_cycle_in_full(run: Run) -> None:
    value = json.loads(run("abc abc", "--model", "fake", "--max-tokens", "90", "--json")[1])
    number = next(i for i, each in enumerate(value["decisions"], start=1) if each["accepted"] > 2)
    decision = value["decisions"][number - 1]
    code, out, err = run("abc abc", "--model", "fake", "--max-tokens", "90", "--cycle", str(number))
    assert (code, err) == (0, "")
    assert f"cycle {number} of {value['cycles']}" in out
    assert f"accepted: {decision['accepted']} of {decision['drafted']}" in out
    assert f"match: {decision['cache']['match_len']} tokens" in out
    assert f"cache {decision['drafted']} <" in out
    assert "hits_8" in out
    assert "of the answer on" in out


def test_json_and_page_together(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    code, out, err = run("abc </script> abc", "--model", "fake", "--max-tokens", "60", "--json", "--html", str(page))
    assert (code, err) == (0, f"wrote {page}\n")
    assert len(out.splitlines()) == 1
    assert json.loads(out)["tokens"] == 60
    text = page.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert "abc &lt;/script&gt; abc</h1>" in text
    refused(run("abc", "--model", "fake", "--html", str(page)), "exists already", "--overwrite")
    assert run("abc", "--model", "fake", "--max-tokens", "5", "--html", str(page), "--overwrite")[0] == 0


def test_a_trace_is_replayed_with_its_text_and_without_a_model(run: Run, traced: tuple[str, ...], model: Path) -> None:
    code, out, err = run(*traced, "--policy", "match-len:1", "--model", str(model), "--json")
    assert (code, err) == (0, "")
    first = json.loads(out)
    assert (first["id"], first["replayed"], first["tokens"]) == ("set/a", True, 90)
    assert first["decisions"][3]["seconds"] is None
    live = json.loads(run("abc abc", "--model", "fake", "--max-tokens", "90", "--policy", "match-len:1", "--json")[1])
    assert first["pieces"] == live["pieces"]
    assert [d["accepted"] for d in first["decisions"]][:-1] == [d["accepted"] for d in live["decisions"]][:-1]
    code, out, err = run(*traced, "--id", "set/b")
    assert (code, err) == (0, "no --model: tokens are shown as ids\n")
    assert "\u27e8" in out


def test_an_earlier_answer_of_the_session_serves_the_replayed_request(run: Run, traced: tuple[str, ...]) -> None:
    alone = json.loads(run(*traced, "--id", "set/b", "--policy", "cache", "--json")[1])
    served = json.loads(run(*traced, "--id", "set/b", "--policy", "cache", "--shared", "--json")[1])
    assert served["cycles"] < alone["cycles"]
    assert any(decision["cache"] and not decision["cache"]["local"] for decision in served["decisions"])


def test_a_simulated_head(run: Run, traced: tuple[str, ...]) -> None:
    value = json.loads(run(*traced, "--policy", "eagle3", "--head", "1.0,4", "--json")[1])
    assert value["tokens_by_arm"]["eagle3"] == 72
    assert value["cycles"] == 18


def test_what_can_not_be_done_is_said_in_one_line(run: Run, traced: tuple[str, ...], tmp_path: Path) -> None:
    refused(run(), "prompt")
    refused(run("hello"), "--model")
    refused(run("hello", *traced), "not both")
    refused(run("hello", "--model", "fake", "--id", "x"), "--trace")
    refused(run("hello", "--model", "fake", "--policy", "best"), "unknown policy")
    refused(run("hello", "--model", "fake", "--max-tokens", "5", "--cycle", "9"), "--cycle 9", "5 cycles")
    refused(run("hello", "--model", "fake", "--cycle", "0"), "--cycle")
    refused(run(*traced[:2]), "--cost", "cpu-small")
    refused(run("--trace", str(tmp_path / "nothing")), "no trace files")
    refused(run(*traced[:2], "--cost", "gpu"), "gpu-8b", "hvd profile")
    assert run(*traced[:2], "--cost", "cpu-small", "--json")[0] == 0
    refused(run(*traced, "--id", "set/none", "--model", "fake"), "set/none")
    refused(run("--trace", str(tmp_path / "nothing"), *traced[2:]), "no trace files")
    refused(run(*traced, "--head", "much"), "--head")
    (tmp_path / "file").write_text("x")
    refused(
        run("a", "--model", "fake", "--max-tokens", "5", "--html", str(tmp_path / "file" / "x.html")), "can't write"
    )


def test_another_tokenizer_is_refused(run: Run, traced: tuple[str, ...], tiny_model: Callable[..., Path]) -> None:
    refused(run(*traced, "--model", str(tiny_model("llama", vocab=300))), "another tokenizer")


def test_a_terminal_shows_arms_in_colour(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, color_system="truecolor", width=120, record=True, file=io.StringIO())
    value: list[ExplainedRequest] = []
    monkeypatch.setattr(ExplainView, "overview", lambda self, request: value.append(request))
    run("abc abc", "--model", "fake", "--max-tokens", "90", "--policy", "cache")
    monkeypatch.undo()
    view = ExplainView(console)
    view.overview(value[0])
    number = next(i for i, cycle in enumerate(value[0].cycles, start=1) if cycle.record.drafted > cycle.record.accepted)
    view.cycle(value[0], number)
    text = console.export_text(styles=True)
    assert "\x1b[30;48;2;232;176;75m" in text
    assert "\x1b[9;31m" in text  # refused: struck out
