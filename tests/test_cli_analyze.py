"""`hvd analyze` as people meet it: one screen, no text of theirs, one clear line for what can't be done."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvd.analysis.learn import Training, Verdict
from hvd.cli.main import main

SOURCE = Path(__file__).parents[1] / "src"
Run = Callable[..., tuple[int, str, str]]
SECRET = "xylophone quartz jukebox"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["analyze", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def source(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model("llama", vocab=300, eos=257))


def log(path: Path, count: int = 4) -> str:
    records = [
        {
            "messages": [
                {"role": "user", "content": f"{SECRET} {i}"},
                {"role": "assistant", "content": f"{SECRET} {i} {SECRET}"},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return str(path)


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err


def test_one_screen_says_it_all_and_shows_no_text(run: Run, source: str, tmp_path: Path) -> None:
    code, out, err = run(log(tmp_path / "l.jsonl"), "--tokenizer", source, "--eagle3-acceptance", "0.7")
    assert code == 0, err
    assert len(out.splitlines()) <= 50
    for words in (
        "l.jsonl: chat, 4 answers in 4 lines", "cache draft would have given", "ASSUMED", "a chain of 4", "oracle",
        "match-len:4", "score:3", "hvd-paper", "eagle3", "Copied from: ", "user messages", "48 or more",
        "l.jsonl:1#turn0", "Loops: no answer", "too little data", "only 4 conversations",
    ):  # fmt: skip
        assert words in out, words
    for word in SECRET.split():
        assert word not in out + err


def test_nothing_is_wider_than_a_terminal(
    run: Run, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ("a-long-name-of-a-directory-" * 4) / "l.jsonl"
    path.parent.mkdir()
    monkeypatch.setenv("COLUMNS", "80")
    wanted = (log(path), "-t", source, "--no-train", "--eagle3-acceptance", "0.7")
    piped = run(*wanted)[1].splitlines()
    begin = next(i for i, line in enumerate(piped) if "tok/cycle" in line)
    table = piped[begin : begin + 12]
    assert max(map(len, table)) <= 80
    assert "regret" in table[0]
    assert "\u2026" not in "".join(table)
    assert any(line.startswith("  l.jsonl:1#turn0: ") for line in piped)
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = re.sub(r"\x1b\[[\d;]*m", "", run(*wanted)[1]).splitlines()
    assert max(map(len, shown[1:])) <= 80
    assert len(shown) > len(piped)


def test_figures_are_there_before_training_begins(run: Run, source: str, tmp_path: Path) -> None:
    def seen(*arguments: object) -> Training:
        sys.stderr.write("training\n")
        return Training(Verdict.NO, 0.023, -0.001, 0.047, 12, 1000, "not shown: the interval includes zero")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvd.analysis.analyze._training", seen)
        patch.setattr("hvd.cli.analyze._print", lambda found, show: sys.stderr.write("figures\n"))
        code, out, err = run(log(tmp_path / "l.jsonl"), "-t", source)
        assert (code, err) == (0, "figures\ntraining\n")
        assert out == (
            "Training a predictor on these logs: +2.3% tokens/s (-0.1% to +4.7%); "
            "not shown: the interval includes zero\n"
        )
        found = run(log(tmp_path / "l.jsonl"), "-t", source, "--json")
        assert json.loads(found[1])["training"]["gain"] == 0.023
        assert found[2] == "training\n"


def test_stages_are_counted(run: Run, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def bar() -> Iterator[Callable[[str, int, int], None]]:
        yield lambda what, done, total: told.append(what)

    monkeypatch.setattr("hvd.cli.analyze.progress_bar", bar)
    assert run(log(tmp_path / "l.jsonl"), "-t", source, "--no-train")[0] == 0
    assert set(told) == {"2 of 3: tokenize", "3 of 3: replay"}


def test_text_is_shown_when_asked_for(run: Run, source: str, tmp_path: Path) -> None:
    _, out, _ = run(log(tmp_path / "l.jsonl"), "-t", source, "--no-train", "--show-text")
    assert "xylophone" in out


def test_json_has_everything(run: Run, source: str, tmp_path: Path) -> None:
    code, out, _ = run(log(tmp_path / "l.jsonl"), "-t", source, "--no-train", "--json", "--cost", "cpu-small")
    assert code == 0
    assert len(out.splitlines()) == 1
    found: dict[str, Any] = json.loads(out)
    assert set(found) == {
        "tokenizer", "cost", "eagle3", "answers", "answers_found", "groups", "share", "tokens", "prompt_tokens",
        "looped", "cache_share", "sources", "notes", "seconds", "files", "payoffs", "policies", "gains", "loops",
        "training",
    }  # fmt: skip
    assert found["files"][0]["format"] == "chat"
    assert found["policies"]["hvd"]["speedup_micro"] > 1.0
    assert "cpu-small" in found["cost"]
    assert "xylophone" not in out


def test_a_gzipped_request_log_and_stdin(
    run: Run, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"request": {"messages": [{"role": "user", "content": SECRET}]}, "response": SECRET})
    packed = gzip.compress((line + "\n").encode())
    (tmp_path / "r.jsonl.gz").write_bytes(packed)
    _, out, _ = run(str(tmp_path / "r.jsonl.gz"), "-t", source, "--no-train")
    assert "r.jsonl.gz: requests, 1 answer in 1 line" in out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(packed))))
    code, out, err = run("-", "-t", source, "--no-train")
    assert code == 0, err
    assert "stdin: requests, 1 answer in 1 line" in out


def test_broken_lines_are_named_on_stderr(run: Run, source: str, tmp_path: Path) -> None:
    path = Path(log(tmp_path / "l.jsonl"))
    path.write_text('{"half": \n' * 8 + path.read_text() + '{"messages": [{"ro')
    code, out, err = run(str(path), "-t", source, "--no-train")
    assert code == 0
    assert "9 broken lines left out" in out
    assert f"{path}:1: not JSON" in err
    assert f"{path}: 9 broken lines in all" in err
    assert len(err.splitlines()) == 6


def test_what_cannot_be_done_is_one_clear_line(run: Run, source: str, tmp_path: Path) -> None:
    good = log(tmp_path / "good.jsonl")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "words.txt").write_text("no log at all\n")
    (tmp_path / "open.jsonl").write_text('{"messages": [{"role": "user", "content": "why?"}]}\n')
    (tmp_path / "v.log").write_text(
        "INFO 04-10 18:13:14 [logger.py:39] Received request c-1: prompt: 'why?', params: S(), x: None.\n"
    )
    refused(run(good), "--tokenizer")
    refused(run(good, "-t", str(tmp_path / "none.gguf")), "no tokenizer at")
    refused(run(str(tmp_path / "none.jsonl"), "-t", source), "no logs at")
    refused(run(str(tmp_path / "empty.jsonl"), "-t", source), "is empty")
    refused(run(str(tmp_path / "words.txt"), "-t", source), "format is not known", "--format")
    refused(run(str(tmp_path / "open.jsonl"), "-t", source), "no recorded answers")
    refused(run(str(tmp_path / "v.log"), "-t", source), "--enable-log-outputs", "nothing can be replayed")
    refused(run(good, "-t", source, "--format", "xml"), "unknown format 'xml'")
    refused(run(good, "-t", source, "--cost", "tpu"), "no cost profile 'tpu'", "gpu-8b")
    refused(run(good, "-t", source, "--eagle3-acceptance", "2"), "must be in [0, 1]")
    refused(run(good, "-t", source, "--train", "x.npz", "--no-train"), "exclude each other")
    refused(run(good, "-t", source, "--predictor", str(tmp_path / "none.npz")), "none.npz")
    refused(run("", "-t", source), "an empty text names no logs")
    refused(run(good, "-t", ""), "tokenizer's name is empty")
    for seed in ("-5", str(2**31)):
        refused(run(good, "-t", source, "--seed", seed), "--seed", "range")
    refused(run(), "LOGS")


def test_a_forced_format_that_is_wrong_says_so(run: Run, source: str, tmp_path: Path) -> None:
    code, out, err = run(log(tmp_path / "l.jsonl"), "-t", source, "--format", "completions")
    assert (code, out) == (2, "")
    assert "no recorded answers" in err or "is --format completions right?" in err


def test_nothing_is_written_when_it_does_not_help(run: Run, source: str, tmp_path: Path) -> None:
    out = tmp_path / "p.npz"
    _, shown, _ = run(log(tmp_path / "l.jsonl"), "-t", source, "--train", str(out))
    assert "was not written" in shown
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["l.jsonl"]


def test_neither_torch_nor_a_backend_is_imported(source: str, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom hvd.cli.main import main\n"
        f"assert main(['analyze', {log(tmp_path / 'l.jsonl')!r}, '-t', {source!r}, '--no-train']) == 0\n"
        "assert not {'torch', 'transformers', 'onnxruntime'} & set(sys.modules), 'imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(SOURCE)}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
