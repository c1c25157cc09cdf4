"""The command line over a fake target: results on stdout, one clear line for what can't be done, exit codes."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvd.cli.common import ModelOptions
from hvd.cli.demo.command import scenes
from hvd.cli.demo.show import Stage
from hvd.cli.main import hvd, main
from hvd.config import EngineConfig
from hvd.engine.llm import LLM
from hvd.engine.text import Piece
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.types import Arm
from support import make_llm

V = 512
SOURCE = Path(__file__).parents[1] / "src"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fake(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> FakeTarget:
    """Every model that a command opens is this target, with a byte-level tokenizer."""
    target = FakeTarget(V, context_limit=512, order=1, seed=3)
    tokenizer = Tokenizer.from_directory(tiny_model("llama", vocab=V))

    def open_fake(options: ModelOptions, config: EngineConfig | None = None) -> LLM:
        return make_llm(target, tokenizer, policy=(config or EngineConfig()).policy)

    monkeypatch.setattr(ModelOptions, "open", open_fake)
    return target


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def refused(result: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that says what is wrong."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err


def generate_json(run: Run, *arguments: str) -> dict[str, Any]:
    code, out, err = run("generate", "--model", "fake", "--json", *arguments)
    assert code == 0, err
    assert len(out.splitlines()) == 1
    result: dict[str, Any] = json.loads(out)
    return result


# -- generate ---------------------------------------------------------------------------------------------------------


def test_json_has_exactly_the_documented_keys(fake: FakeTarget, run: Run) -> None:
    result = generate_json(run, "abc abc", "--max-tokens", "60")
    assert list(result) == [
        "model", "policy", "prompt_tokens", "token_ids", "text", "finish_reason", "seconds", "cycles",
        "tokens_per_cycle", "verify_width_mean", "arms",
    ]  # fmt: skip
    assert (result["model"], result["policy"], result["finish_reason"]) == ("fake", "hvd", "length")
    assert set(result["seconds"]) == {"prefill", "decode"}
    arms = result["arms"].values()
    assert all(set(arm) == {"cycles", "drafted", "accepted"} for arm in arms)
    assert len(result["token_ids"]) == 60 == result["cycles"] + sum(arm["accepted"] for arm in arms)
    assert result["cycles"] == sum(arm["cycles"] for arm in arms)
    assert result["tokens_per_cycle"] == pytest.approx(60 / result["cycles"])
    width = 1 + sum(arm["drafted"] for arm in arms) / result["cycles"]
    assert result["verify_width_mean"] == pytest.approx(width)


def test_policies_give_the_same_tokens_and_drafts_save_cycles(fake: FakeTarget, run: Run) -> None:
    plain = generate_json(run, "abc abc", "--max-tokens", "100", "--policy", "plain")
    cache = generate_json(run, "abc abc", "--max-tokens", "100", "--policy", "cache")
    assert cache["token_ids"] == plain["token_ids"]
    assert plain["cycles"] == 100 > cache["cycles"]
    assert plain["arms"] == {"plain": {"cycles": 100, "drafted": 0, "accepted": 0}}


def test_a_seed_gives_the_same_text_under_every_policy(fake: FakeTarget, run: Run) -> None:
    sampled = ["abc", "--temperature", "2.5", "--top-p", "0.9", "--max-tokens", "40"]
    first = generate_json(run, *sampled, "--seed", "7", "--policy", "plain")
    assert generate_json(run, *sampled, "--seed", "7")["token_ids"] == first["token_ids"]
    assert generate_json(run, *sampled, "--seed", "8")["token_ids"] != first["token_ids"]


def test_text_is_all_that_stdout_gets(fake: FakeTarget, run: Run) -> None:
    text = generate_json(run, "abc")["text"]
    for how in ((), ("--stream",), ("--no-stream", "--stats")):
        code, out, err = run("generate", "abc", "--model", "fake", *how)
        assert (code, out) == (0, text + "\n")
        assert ("accepted" in err) == ("--stats" in how)
        assert err == "" or "--stats" in how


def test_chat_wraps_the_prompt_as_one_user_message_and_raw_does_not(fake: FakeTarget, run: Run) -> None:
    wrapped = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    by_default = generate_json(run, "abc")
    assert by_default["token_ids"] == generate_json(run, "abc", "--chat")["token_ids"]
    assert by_default["token_ids"] == generate_json(run, wrapped, "--raw")["token_ids"]
    assert generate_json(run, "abc", "--raw")["prompt_tokens"] < by_default["prompt_tokens"]


def test_the_prompt_may_come_from_a_file_or_from_stdin(
    fake: FakeTarget, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("wie geht's, Älter?\n", "utf-8")
    expected = generate_json(run, "wie geht's, Älter?\n")["token_ids"]
    assert generate_json(run, "--file", str(file))["token_ids"] == expected
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert generate_json(run, "--file", "-")["token_ids"] == expected
        stdin.seek(0)
        assert generate_json(run)["token_ids"] == expected


def test_stops_end_the_answer(fake: FakeTarget, run: Run) -> None:
    result = generate_json(run, "abc", "--max-tokens", "50")
    stop = result["token_ids"][9]
    ended = generate_json(run, "abc", "--max-tokens", "50", "--stop-token-ids", str(stop))
    assert ended["finish_reason"] == "stop"
    assert ended["token_ids"] == result["token_ids"][: result["token_ids"].index(stop) + 1]
    piece = result["text"][5:8]
    assert generate_json(run, "abc", "--stop", piece)["text"] == result["text"][: result["text"].index(piece)]


# -- what can't be done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["no prompt", "--file", "pipe"]),
        (("abc", "--file", "x"), ["give a prompt or --file FILE, not both"]),
        (("",), ["prompt is empty"]),
        (("  \n",), ["prompt is empty"]),
        (("abc", "--policy", "fastest"), ["unknown policy 'fastest'", "match-len"]),
        (("abc", "--policy", "match-len:x"), ["match-len"]),
        (("abc", "--policy", "hvd-paper", "--predictor", "none"), ["hvd-paper", "predictor"]),
        (("abc", "--temperature", "nan"), ["temperature", "nan"]),
        (("abc", "--temperature", "-0.1"), ["temperature", "-0.1"]),
        (("abc", "--temperature", "inf"), ["temperature", "inf"]),
        (("abc", "--temperature", "warm"), ["--temperature", "warm"]),
        (("abc", "--top-p", "0"), ["top_p"]),
        (("abc", "--top-p", "nan"), ["top_p", "nan"]),
        (("abc", "--min-p", "1.5"), ["min_p"]),
        (("abc", "--top-k", "-2"), ["top_k"]),
        (("abc", "--max-tokens", "0"), ["max_tokens"]),
        (("abc", "--max-tokens", "1.5"), ["--max-tokens"]),
        (("abc", "--repetition-penalty", "0"), ["repetition_penalty"]),
        (("abc", "--repetition-penalty", "nan"), ["repetition_penalty", "nan"]),
        (("abc", "--seed", "1e9"), ["--seed"]),
        (("abc", "--stop", ""), ["stop"]),
        (("abc", "--threads", "0"), ["--threads"]),
        (("abc", "--predictor", "/no/such.npz"), ["/no/such.npz"]),
        (("abc", "--frobnicate"), ["--frobnicate"]),
        (("--file", "/no/such/prompt.txt"), ["/no/such/prompt.txt"]),
        (("--file", "."), ["can't read"]),
        (("x " * 600,), ["512"]),
    ],
)  # fmt: skip
def test_what_cant_be_served_gets_one_line_and_exit_code_2(
    arguments: tuple[str, ...], words: list[str], fake: FakeTarget, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    refused(run("generate", "--model", "fake", "--json", *arguments), *words)


def test_a_prompt_file_that_is_not_text_is_refused(fake: FakeTarget, run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"abc\xff\xfe")
    refused(run("generate", "--model", "fake", "--file", str(tmp_path / "x.bin")), "not UTF-8")


def test_a_missing_option_or_command_is_refused(run: Run) -> None:
    refused(run("generate", "abc"), "--model")
    refused(run("frobnicate"), "frobnicate")


@pytest.mark.parametrize("command", [("generate", "abc"), ("convert",), ("profile",)])
def test_models_that_are_no_models_are_refused(command: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(b"GGUF\x03\x00\x00")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "missing.gguf", torn, empty):
        refused(run(*command, "--model", str(path)), path.name)


def test_an_interruption_is_one_line_and_exit_code_130(
    fake: FakeTarget, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "forward", interrupted)
    assert run("generate", "abc", "--model", "fake") == (130, "", "hvd: interrupted\n")


def test_a_fault_is_one_line_and_its_traceback_is_for_the_asking(
    fake: FakeTarget, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("on\npurpose")

    monkeypatch.setattr(fake, "forward", broken)
    monkeypatch.delenv("HVD_DEBUG", raising=False)
    code, out, err = run("generate", "abc", "--model", "fake")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "ZeroDivisionError: on purpose" in err
    assert "HVD_DEBUG=1" in err
    monkeypatch.setenv("HVD_DEBUG", "1")
    code, out, err = run("generate", "abc", "--model", "fake")
    assert (code, out) == (1, "")
    assert "Traceback" in err


# -- the program ------------------------------------------------------------------------------------------------------


def program(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_help_and_version_import_nothing_heavy() -> None:
    heavy = ["numpy", "numba", "onnx", "onnxruntime", "torch", "transformers", "tokenizers", "pyarrow", "rich"]
    check = f"print('heavy', sorted(set({heavy!r}) & set(sys.modules)))"
    for arguments in (["--help"], ["--version"], ["generate", "--help"], ["bench", "--help"]):
        done = program(f"import sys; from hvd.cli.main import main; assert main({arguments!r}) == 0; {check}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "heavy []"
        assert done.stderr == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    leave = "r, w = os.pipe(); os.dup2(w, 1); os.close(r); os.close(w)"
    done = program(f"import os, sys; from hvd.cli.main import run; sys.argv = ['hvd', '--help']; {leave}; run()")
    assert done.stderr == ""
    assert done.returncode == 1


def test_a_letter_that_the_terminal_lacks_is_a_question_mark() -> None:
    echo = "import click, hvd.cli.main as m; m.main = lambda _: click.echo('a \\u4f60') or 0; m.run()"
    done = program(echo, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a ?\n", "")


def test_help_lists_every_command(run: Run) -> None:
    listed = [line.split()[0] for line in run("--help")[1].split("Commands:")[1].splitlines() if line.strip()]
    assert set(hvd.commands) <= set(listed)


def test_every_command_has_help_with_an_example(run: Run) -> None:
    for command in ("generate", "convert", "profile", "trace collect", "trace import", "trace show", "train predictor",
                    "replay", "bench", "demo"):  # fmt: skip
        code, out, err = run(*command.split(), "--help")
        assert (code, err) == (0, "")
        assert f"  hvd {command}" in out.split("Examples:")[1]


# -- a real, tiny model through all layers --------------------------------------------------------------------------


@pytest.fixture
def tiny(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model on the onnx backend, with a cache directory of its own."""
    monkeypatch.setenv("HVD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(tiny_model("llama", vocab=V, hidden=64, intermediate=128))


def test_a_first_start_says_that_it_converts(tiny: str, run: Run) -> None:
    wanted = ("generate", "abc", "--model", tiny, "--weights", "fp32", "--max-tokens", "2")
    code, _, err = run(*wanted)
    assert (code, err) == (0, "converting the model, once; later starts find it converted\n")
    assert run(*wanted)[2] == ""
    shutil.rmtree(Path(os.environ["HVD_CACHE"]) / "cost")
    assert run(*wanted)[2] == "measuring what the model's passes cost here, once; later starts find the costs\n"


def test_a_model_is_converted_once(tiny: str, run: Run) -> None:
    code, out, err = run("convert", "--model", tiny, "--weights", "fp32", "--json")
    assert code == 0, err
    first = json.loads(out)
    files = {path.name: path.stat().st_mtime_ns for path in Path(first["directory"]).iterdir()}
    assert first["bytes"] == sum(path.stat().st_size for path in Path(first["directory"]).iterdir())
    assert first["weights"] == "fp32"
    code, out, err = run("convert", "--model", tiny, "--weights", "fp32")
    assert (code, out) == (0, first["directory"] + "\n")
    assert {path.name: path.stat().st_mtime_ns for path in Path(first["directory"]).iterdir()} == files
    refused(run("convert", "--model", tiny, "--weights", "int3"), "int3", "int4")


def test_a_real_backend_gives_the_same_tokens_under_every_policy(tiny: str, run: Run) -> None:
    def tokens(policy: str, *more: str) -> list[int]:
        args = ("generate", "ab ab ab ab", "--model", tiny, "--max-tokens", "40", "--json", "--policy", policy, *more)
        code, out, err = run(*args)
        assert code == 0, err
        return list(json.loads(out)["token_ids"])

    assert tokens("hvd") == tokens("plain") == tokens("any-match")
    refused(run("generate", "x", "--model", tiny, "--weights", "int3"), "int3")
    refused(run("generate", "x", "--model", tiny, "--backend", "tpu"), "tpu")
    refused(run("generate", "x", "--model", tiny, "--eagle3", "/no/such/head"), "/no/such/head")
    refused(run("generate", "x", "--model", tiny, "--cost", "/no/such/cost"), "/no/such/cost")


# -- traces, training, replay -----------------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    ask = [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]
    answered = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a recorded answer"}]
    records: list[dict[str, Any]] = [{"id": "open/1", "gen": "open", "messages": ask, "split": "train"}]
    records += [{"id": "replay/1", "gen": "replay", "messages": answered * 2, "split": "train"}]
    records += [{"id": f"single/{i}", "prompt": f"number {i}", "split": "test"} for i in range(8)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def shown(run: Run, *arguments: str) -> list[dict[str, Any]]:
    code, out, err = run("trace", "show", "--json", *arguments)
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_collected_traces_hold_every_turn_and_are_not_collected_twice(
    fake: FakeTarget, run: Run, prompts: Path, tmp_path: Path
) -> None:
    from hvd.traces.reader import read_traces

    out = tmp_path / "traces"
    collect = ("trace", "collect", str(prompts), "--out", str(out), "--model", "fake", "--max-tokens", "48")
    code, stdout, err = run(*collect)
    assert (code, stdout) == (0, ""), err
    found = {trace.id: trace for trace in read_traces(out)}
    assert set(found) == {
        "open/1#turn0",
        "open/1#turn1",
        "replay/1#turn0",
        "replay/1#turn1",
        *(f"single/{i}" for i in range(8)),
    }
    for trace in found.values():
        assert sum(step.committed for step in trace.steps) == len(trace.response) == 48
    tokenizer = make_tokenizer(fake)
    assert "a recorded answer" in tokenizer(found["replay/1#turn1"].prompt)
    generated = tokenizer(found["open/1#turn0"].response)
    assert generated in tokenizer(found["open/1#turn1"].prompt)
    passes = len(fake.passes)
    assert "0 traces written" in run(*collect)[2]
    assert len(fake.passes) == passes
    [row] = shown(run, str(out))
    assert (row["traces"], row["response_tokens"]) == (12, 12 * 48)
    cycles = shown(run, str(out), "--id", "single/3")
    assert sum(cycle["committed"] for cycle in cycles) == 48
    refused(run("trace", "show", str(out), "--id", "nobody"), "nobody")


def make_tokenizer(fake: FakeTarget) -> Callable[[Any], str]:
    tokenizer = ModelOptions.open(None).tokenizer  # type: ignore[arg-type]
    assert tokenizer is not None
    return lambda ids: tokenizer.decode(ids.tolist())


def test_a_broken_off_conversation_is_completed(fake: FakeTarget, run: Run, prompts: Path, tmp_path: Path) -> None:
    from hvd.traces.reader import read_traces

    out = tmp_path / "traces"
    collect = ("trace", "collect", str(prompts), "--out", str(out), "--model", "fake", "--max-tokens", "20")
    assert run(*collect, "--turns", "1")[0] == 0
    assert run(*collect)[0] == 0
    ids = [trace.id for trace in read_traces(out)]
    assert len(ids) == len(set(ids))
    assert {"open/1#turn0", "open/1#turn1"} <= set(ids)


def test_recorded_turns_train_a_predictor_and_replay_policies(
    fake: FakeTarget, run: Run, prompts: Path, tmp_path: Path
) -> None:
    traces, cost, predictor = tmp_path / "traces", tmp_path / "cost.json", tmp_path / "predictor.npz"
    args = ("--out", str(traces), "--model", "fake", "--max-tokens", "200")
    assert run("trace", "collect", str(prompts), *args)[0] == 0
    code, out, err = run("profile", "--model", "fake", "--quick", "--out", str(cost), "--json")
    assert code == 0, err
    assert json.loads(out)["file"] == str(cost)
    assert cost.exists()

    code, out, err = run(
        "train", "predictor", str(traces), "--out", str(predictor), "--keep-loops", "--max-states", "200", "--json"
    )
    assert code == 0, err
    report = json.loads(out)
    assert [entry["kind"] for entry in report["judged"]] == ["every position", "cycle boundaries"]
    assert predictor.exists()

    names = "plain,match-len:3,hvd,oracle"
    code, out, err = run(
        "replay", str(traces), "--cost", str(cost), "--policies", names, "--predictor", str(predictor), "--json"
    )
    assert code == 0, err
    played = json.loads(out)["policies"]
    assert set(played) == set(names.split(","))
    assert played["plain"]["speedup_micro"] == 1.0
    assert min(entry["regret_micro"] for entry in played.values()) == 0.0 == played["oracle"]["regret_micro"]
    code, out, err = run("replay", str(traces), "--cost", str(cost))
    assert (code, err.count("\n")) == (0, 1)
    assert "oracle" in out


def test_a_predictor_of_very_little_comes_with_a_warning(
    fake: FakeTarget, run: Run, prompts: Path, tmp_path: Path
) -> None:
    traces = tmp_path / "traces"
    given = ("--model", "fake", "--max-tokens", "60")
    assert run("trace", "collect", str(prompts), "--out", str(traces), *given)[0] == 0
    code, out, err = run("train", "predictor", str(traces), "--out", str(tmp_path / "p.npz"), "--keep-loops")
    assert code == 0, err
    assert "WARNING: only" in err
    assert "nan" not in out


def test_a_quick_profile_says_what_it_did_not_measure(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(FakeTarget(V, context_limit=4096))
    monkeypatch.setattr(ModelOptions, "open", lambda options, config=None: llm)
    code, out, err = run("profile", "--model", "fake", "--quick", "--out", str(tmp_path / "c.json"))
    assert code == 0, err
    assert "512*" in err
    assert "* extrapolated: measured up to a context of 256" in err
    code, out, _ = run("profile", "--model", "fake", "--quick", "--out", str(tmp_path / "c.json"), "--json")
    assert json.loads(out)["extrapolated"] == ["512", "2048"]


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "hvd", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "hvd")


def test_imported_conversations_are_traces(
    run: Run, prompts: Path, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    out = tmp_path / "traces"
    code, stdout, err = run(
        "trace", "import", str(prompts), "--out", str(out), "--model", str(tiny_model("llama", vocab=V))
    )
    assert (code, stdout) == (0, ""), err
    [row] = shown(run, str(out))
    assert (row["model"], row["traces"]) == ("recorded", 2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("trace", "collect", "/no/such.jsonl", "--out", "x", "--model", "fake"), "/no/such.jsonl"),
        (("trace", "show", "/no/such"), "/no/such"),
        (("train", "predictor", "/no/such", "--out", "x.npz"), "/no/such"),
        (("replay", "/no/such", "--cost", "/no/cost.json"), "/no/cost.json"),
        (("replay", ".", "--cost", "c", "--head", "often"), "--head"),
        (("bench", "--model", "fake", "--data", "/no/such.jsonl"), "/no/such.jsonl"),
    ],
)
def test_files_that_cant_be_read_are_named(arguments: tuple[str, ...], word: str, fake: FakeTarget, run: Run) -> None:
    refused(run(*arguments), word)


def test_a_directory_that_cant_be_made_is_refused(fake: FakeTarget, run: Run, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(
        run("trace", "collect", str(prompts), "--out", str(tmp_path / "file" / "traces"), "--model", "fake"), "file"
    )


# -- the demo ---------------------------------------------------------------------------------------------------------


def test_the_demo_shows_both_texts_and_that_they_are_equal(
    tiny_model: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FakeTarget(V, context_limit=8192, order=1, seed=3)
    tokenizer = Tokenizer.from_directory(tiny_model("llama", vocab=V))
    monkeypatch.setattr(ModelOptions, "open", lambda options, config=None: make_llm(target, tokenizer))
    code, out, err = run("demo", "--model", "fake")
    assert code == 0, err
    assert "output identical: yes" in out
    assert all(out.count(f" {scene.title} ") == 3 for scene in scenes())  # a heading, and two rows of the table
    assert out.count("\n[plain]") == out.count("\n[hvd]") == 3
    plain, ours = (part.split("\n", 1)[1] for part in out.split("\n[plain]")[1].split("\n[hvd]"))
    drafted = ours.split("\n\n\u2500")[0]
    assert "\u00ab" in drafted
    assert drafted.replace("\u00ab", "").replace("\u00bb", "").rstrip() == plain.rstrip()


def test_tokens_are_coloured_by_arm_on_a_terminal_and_marked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [Piece(1, "own ", Arm.PLAIN), Piece(2, "copied ", Arm.CACHE), Piece(3, "text ", Arm.CACHE)]
    pieces += [Piece(4, "guessed", Arm.EAGLE3)]

    def shown(**options: Any) -> str:
        file = io.StringIO()
        Stage(Console(file=file, highlight=False, **options)).stream("hvd", pieces)
        return file.getvalue()

    marked = "own \u00abcopied text \u00bb\u2039guessed\u203a"
    assert marked in shown()
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = shown(force_terminal=True, color_system="standard")
    assert "\x1b[30;42mcopied " in coloured
    assert "\x1b[30;46mguessed" in coloured
    assert "\u00ab" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert marked in shown(force_terminal=True)


def test_the_demo_without_its_model_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd.cli.demo.command.PACKAGE", "no-such-package")
    refused(run("demo"), "scripts/demo")
