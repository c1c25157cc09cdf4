"""Peers in a benchmark: found or named as missing, measured beside ours, their text reported and not judged."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hvd.bench import peers_vllm
from hvd.bench.peers import (
    PeerAnswer,
    PeerMethod,
    PeerSetup,
    check_peers,
    cut_at_stop,
    open_peers,
    peer_names,
)
from hvd.bench.report import summarize
from hvd.bench.runner import Runner
from hvd.cli.common import ModelOptions
from hvd.cli.main import main
from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.errors import ConfigError
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.traces.prompts import Prompt, Turn
from support import make_llm

V = 512
PROMPT = Prompt("d/1", "d", "chat", "test", (Turn(({"role": "user", "content": "hello there"},)),))


class Echo(PeerMethod):
    """Says what it is told to, or fails."""

    peer = "echo"
    how = "by nothing"

    def __init__(self, name: str, tokens: Sequence[int] | None) -> None:
        self.name = name
        self.tokens = tokens
        self.asked: list[tuple[list[int], int]] = []

    def decode(self, prompt: Sequence[int], max_tokens: int) -> PeerAnswer:
        self.asked.append((list(prompt), max_tokens))
        if self.tokens is None:
            raise RuntimeError("out of\nmemory")
        tokens = list(self.tokens[:max_tokens])
        return PeerAnswer(tokens, len(tokens) - 1, 0.5, 0.25, 0.75, "length")


@pytest.fixture
def base(tiny_model: Callable[..., Path]) -> LLM:
    target = FakeTarget(V, context_limit=512, order=1, seed=3)
    return make_llm(target, Tokenizer.from_directory(tiny_model("llama", vocab=V)))


def test_a_peer_gets_the_same_ids_and_its_text_is_reported_not_judged(base: LLM) -> None:
    params = SamplingParams(max_tokens=24)
    ids = base.chat_prompt(PROMPT.turns[0].messages)
    [plain] = base.generate([ids], params, policy="plain")
    same, other = Echo("echo", plain.token_ids), Echo("echo-other", [*plain.token_ids[:5], 0, 1, 2])
    outcome = Runner(base, ["cache"], params, peers=[same, other]).run(PROMPT)
    assert same.asked == [(ids, 24)]
    by_name = {record.policy: record for record in outcome.records}
    assert list(by_name) == ["plain", "cache", "echo", "echo-other"]
    assert by_name["echo"].identical
    assert by_name["echo"].peer == "echo"
    assert by_name["cache"].peer is None
    assert (by_name["echo"].tokens, by_name["echo"].decoded, by_name["echo"].decode_seconds) == (24, 23, 0.5)
    assert by_name["echo-other"].differs_at == 5
    summary = summarize([record.as_json() for record in outcome.records])
    assert summary["identical"] is True
    assert summary["agreement"]["echo"] == {"prompts": 1, "identical": 1, "tokens_before_difference": 1.0}
    assert summary["agreement"]["echo-other"]["tokens_before_difference"] == pytest.approx(5 / 24)
    [row] = [r for r in summary["rows"] if r["policy"] == "echo" and r["level"] == "all" and r["loops"]]
    assert row["tokens_per_second"] == pytest.approx(23 / 0.5)
    assert row["tokens_per_cycle"] is None


def test_a_peer_that_fails_is_noted_and_the_run_goes_on(base: LLM) -> None:
    outcome = Runner(base, ["cache"], SamplingParams(max_tokens=24), peers=[Echo("echo", None)]).run(PROMPT)
    assert outcome.failed == [("d/1", "echo", "out of memory")]
    assert [record.policy for record in outcome.records] == ["plain", "cache"]


def test_peers_take_their_turns_in_the_rotation_and_decode_greedily(base: LLM) -> None:
    peer = Echo("echo", [1, 2, 3])
    runner = Runner(base, ["cache"], SamplingParams(max_tokens=4), peers=[peer])
    runner.warm_up()
    assert peer.asked[0][1] == 16
    for _ in range(3):
        runner.run(PROMPT)
    assert len(peer.asked) == 4
    with pytest.raises(ConfigError, match="greedily"):
        Runner(base, ["cache"], SamplingParams(temperature=1.0, seed=1), peers=[peer])


def test_names_are_of_peers_or_their_methods() -> None:
    assert peer_names() == ["transformers", "llama.cpp", "vllm"]
    check_peers(["vllm-ngram", "llama.cpp", "transformers-lookup"])
    with pytest.raises(ConfigError, match=r"unknown peer 'sglang'.*llama.cpp"):
        check_peers(["sglang"])


def test_what_is_not_there_is_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = PeerSetup("model.gguf", 1, (0,), 512)
    for module in ("vllm", "llama_cpp", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    methods, missing = open_peers(peer_names(), setup)
    assert not methods
    assert list(missing) == peer_names()
    assert all("can't be imported" in why for why in missing.values())


def test_llama_cpp_reads_gguf_files_alone(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    methods, missing = open_peers(["llama.cpp"], PeerSetup(str(tmp_path), 1, (0,), 512))
    assert not methods
    assert "GGUF" in missing["llama.cpp"]


def test_an_answer_ends_behind_its_first_stop_id() -> None:
    assert cut_at_stop([5, 2, 7, 2], (2, 9)) == ([5, 2], "stop")
    assert cut_at_stop([5, 7], (2,)) == ([5, 7], "length")


def test_transformers_decodes_the_same_text_both_ways_as_our_engine(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama", vocab=V)
    llm = LLM(path, weights="fp32", predictor="none", threads=1)
    ids = llm.chat_prompt([{"role": "user", "content": "one two one two one two"}])
    [ours] = llm.generate([ids], SamplingParams(max_tokens=24), policy="plain")
    stop = tuple(llm.tokenizer.eos_token_ids) if llm.tokenizer is not None else ()
    methods, missing = open_peers(["transformers"], PeerSetup(str(path), 1, stop, llm.target.spec.context_limit))
    assert not missing
    assert [method.name for method in methods] == ["transformers", "transformers-lookup"]
    for method in methods:
        answer = method.decode(ids, 24)
        assert answer.tokens == ours.token_ids
        assert answer.finish_reason == ours.finish_reason.value
        assert 0 < answer.decoded < len(answer.tokens)
        assert 0 < answer.decode_seconds < answer.wall_seconds
        assert answer.prefill_seconds > 0
    greedy, lookup = (method.decode(ids, 24).decoded for method in methods)
    assert greedy == len(ours.token_ids) - 1
    assert lookup <= greedy


class FakeVllm(ModuleType):
    """The parts of vLLM that the adapter uses."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.engines: list[dict[str, Any]] = []
        self.SamplingParams = SimpleNamespace
        self.platforms = ModuleType("vllm.platforms")
        self.platforms.current_platform = SimpleNamespace(is_cpu=lambda: True)  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In vLLM's place, with all that its methods need."""
        monkeypatch.setitem(sys.modules, "vllm", self)
        monkeypatch.setitem(sys.modules, "vllm.platforms", self.platforms)
        monkeypatch.setattr(peers_vllm, "find_spec", lambda name: name)

    def LLM(self, **options: Any) -> Any:
        self.engines.append(options)

        def generate(prompt: dict[str, Any], params: Any, use_tqdm: bool) -> list[Any]:
            tokens = [*range(10, 10 + params.max_tokens - 1), 2]
            metrics = SimpleNamespace(scheduled_ts=1.0, first_token_ts=1.5, last_token_ts=3.5)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="stop")], metrics=metrics)]

        return SimpleNamespace(generate=generate)


def test_vllm_is_started_once_a_method_and_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVllm()
    fake.install(monkeypatch)
    setup = PeerSetup("model", None, (2,), 512, eagle3="head")
    methods, missing = open_peers(["vllm"], setup)
    assert not missing
    assert [method.name for method in methods] == list(peers_vllm.METHODS)
    kinds = [(options["speculative_config"] or {}).get("method") for options in fake.engines]
    assert kinds == [None, "ngram", "suffix", "eagle3"]
    assert fake.engines[3]["speculative_config"]["model"] == "head"
    assert sum(options["gpu_memory_utilization"] for options in fake.engines) == pytest.approx(peers_vllm.MEMORY)
    assert not any(options["disable_log_stats"] or options["enable_prefix_caching"] for options in fake.engines)
    answer = methods[0].decode([1, 2, 3], 8)
    assert (len(answer.tokens), answer.decoded, answer.decode_seconds, answer.prefill_seconds) == (8, 7, 2.0, 0.5)
    assert answer.finish_reason == "stop"
    methods, missing = open_peers(["vllm"], PeerSetup("model", None, (2,), 512))
    assert [method.name for method in methods] == list(peers_vllm.METHODS[:3])
    assert "--eagle3" in missing["vllm-eagle3"]


def test_a_method_that_cant_start_is_missing_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeVllm()
    fake.install(monkeypatch)
    start = fake.LLM

    def failing(**options: Any) -> Any:
        match (options["speculative_config"] or {}).get("method"):
            case "ngram":
                raise RuntimeError("no GPU\nmore")
            case "eagle3":
                raise ValueError("1 validation error for SpeculativeConfig\n  Value error, no head [type=..]")
        return start(**options)

    fake.LLM = failing  # type: ignore[method-assign]
    monkeypatch.setattr(peers_vllm, "find_spec", lambda name: None)
    methods, missing = open_peers(["vllm"], PeerSetup("model", None, (2,), 512, eagle3="head"))
    assert [method.name for method in methods] == ["vllm"]
    assert missing["vllm-ngram"] == "vLLM can't start (no GPU)"
    assert missing["vllm-eagle3"] == "vLLM can't start (Value error, no head [type=..])"
    assert "arctic-inference" in missing["vllm-suffix"]
    (tmp_path / "model.gguf").touch()
    methods, missing = open_peers(["vllm"], PeerSetup(str(tmp_path / "model.gguf"), None, (2,), 512))
    assert not methods
    assert list(missing) == ["vllm"]
    assert "GGUF" in missing["vllm"]


def test_the_command_names_a_missing_peer_and_goes_on(
    base: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelOptions, "open", lambda options, config=None: base)
    monkeypatch.setitem(sys.modules, "vllm", None)
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi"}\n', "utf-8")
    out = tmp_path / "out.json"
    given = ["bench", "--model", "fake", "--data", str(tmp_path / "a.jsonl"), "--max-tokens", "8", "--json", str(out)]
    assert main([*given, "--peers", "vllm"]) == 0
    assert "MISSING PEER: vllm" in capsys.readouterr().err
    written = json.loads(out.read_text("utf-8"))
    assert "can't be imported" in written["peers"]["missing"]["vllm"]
    assert written["records"]
    assert main([*given, "--overwrite", "--peers", "sglang"]) == 2


@pytest.mark.model
def test_llama_cpp_decodes_a_real_model_both_ways(smollm2: Path) -> None:
    pytest.importorskip("llama_cpp")
    llm = LLM(smollm2, threads=1, predictor="none", eagle3=None)
    ids = llm.chat_prompt([{"role": "user", "content": "Say: one two three one two three"}])
    stop = tuple(llm.tokenizer.eos_token_ids) if llm.tokenizer is not None else ()
    methods, missing = open_peers(["llama.cpp"], PeerSetup(str(smollm2), 1, stop, llm.target.spec.context_limit))
    assert not missing
    for method in methods:
        answer = method.decode(ids, 12)
        assert 1 < len(answer.tokens) <= 12
        assert answer.decoded == len(answer.tokens) - 1
        assert 0 < answer.decode_seconds < answer.wall_seconds
        assert (answer.finish_reason == "stop") is (answer.tokens[-1] in stop)
