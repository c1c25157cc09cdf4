"""`hvd report`: a page of benchmark files; what can't be done is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd.bench.file import read_bench
from hvd.cli.common import ModelOptions
from hvd.cli.main import main
from hvd.report.html import ticks_to
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from support import make_llm

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["report", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Five requests of a committed file."""
    content = json.loads((RESULTS / "bench-qwen-coder.json").read_text("utf-8"))
    ids = list(dict.fromkeys(record["id"] for record in content["records"]))[:5]
    content["records"] = [record for record in content["records"] if record["id"] in ids]
    (tmp_path / "small.json").write_text(json.dumps(content))
    return tmp_path / "small.json"


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err


def test_a_page_beside_the_file_or_where_it_is_wanted(run: Run, small: Path, tmp_path: Path) -> None:
    page = tmp_path / "small.html"
    assert run(small) == (0, "", f"wrote {page}\n")
    assert page.read_text("utf-8").startswith("<!doctype html>")
    refused(run(small), "exists already", "--overwrite", "--html")
    assert run(small, "--overwrite", "--title", "Ours <3")[0] == 0
    assert "<h1>Ours &lt;3</h1>" in page.read_text("utf-8")
    both = tmp_path / "new" / "both.html"
    assert run(small, small, "--html", both)[0] == 0
    assert both.read_text("utf-8").count("<article") == 2


def test_what_is_no_benchmark_is_refused(run: Run, small: Path, tmp_path: Path) -> None:
    refused(run(), "BENCH.json")
    refused(run(tmp_path / "none.json"), "can't read", "none.json")
    for name, text in {"torn": '{"format": 2', "list": "[]", "other": '{"format": 1}', "new": '{"format": 99}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
        refused(run(tmp_path / f"{name}.json"), f"{name}.json")
    content = json.loads(small.read_text("utf-8"))
    (tmp_path / "empty.json").write_text(json.dumps({**content, "records": []}))
    refused(run(tmp_path / "empty.json"), "empty.json", "records")
    (tmp_path / "part.json").write_text(json.dumps({**content, "environment": {}}))
    refused(run(tmp_path / "part.json"), "part.json", "no complete file")
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    "text", ["Infinity", "NaN", "1e999", "9" * 400, "9" * 5000, "-Infinity", "[" * 100_000 + "]" * 100_000]
)
def test_a_hostile_number_is_one_clear_line(run: Run, small: Path, tmp_path: Path, text: str) -> None:
    content = json.loads(small.read_text("utf-8"))
    content["summary"]["rows"][0]["speedup_micro"] = "HERE"
    (tmp_path / "odd.json").write_text(json.dumps(content).replace('"HERE"', text))
    refused(run(tmp_path / "odd.json"), "odd.json", "no complete file")


@pytest.mark.parametrize("name", ["records", "failed", "findings", "skipped"])
@pytest.mark.parametrize("value", [None, 3, {}, "missing"])
def test_a_list_that_is_missing_is_one_clear_line(
    run: Run, small: Path, tmp_path: Path, name: str, value: object
) -> None:
    content = read_bench(small) | {name: value}
    if value == "missing":
        del content[name]
    (tmp_path / "odd.json").write_text(json.dumps(content))
    refused(run(tmp_path / "odd.json"), "odd.json", name)


def test_an_axis_has_few_ticks_however_long_it_is() -> None:
    assert all(3 <= len(ticks_to(most)) <= 9 for most in (0.5, 1.0, 3.0, 340.0, 1e6, 1e300))


def test_a_benchmark_ends_with_its_page(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = make_llm(
        FakeTarget(512, context_limit=512, order=1, seed=3), Tokenizer.from_directory(tiny_model("llama", vocab=512))
    )
    monkeypatch.setattr(ModelOptions, "open", lambda options, config=None: llm)
    data, page = tmp_path / "data.jsonl", tmp_path / "page.html"
    data.write_text(json.dumps({"id": "a/1", "dataset": "a", "category": "chat", "split": "test", "prompt": "abc"}))
    wanted = ["bench", "--model", "fake", "--data", str(data), "--max-tokens", "24", "--html", str(page)]
    assert main(wanted) == 0
    assert "<h3>Over all sets</h3>" in page.read_text("utf-8")
    assert "Only 1 prompt: too few to conclude anything from." in page.read_text("utf-8")
    assert "over 1 set<" in page.read_text("utf-8") or "over 1 set," in page.read_text("utf-8")
    capsys.readouterr()
    assert main(wanted) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*wanted, "--overwrite", "--no-analysis"]) == 0
