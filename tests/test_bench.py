"""`hvd bench` over a fake target: records, identity, rotation, resuming, and the arithmetic of the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd.bench import ratios, report
from hvd.bench.environment import environment
from hvd.bench.file import BenchFile
from hvd.bench.record import first_difference
from hvd.bench.runner import Outcome, Runner
from hvd.cli.common import ModelOptions
from hvd.cli.main import main
from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.errors import ConfigError
from hvd.models.target import Span, SpanOutput
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.traces.conversation import Conversation, turn_ids
from hvd.traces.prompts import Prompt, Turn
from support import make_llm

V = 512
GREEDY = SamplingParams(max_tokens=90)
FIELDS = {
    "id", "dataset", "category", "policy", "prompt_tokens", "tokens", "decode_seconds", "prefill_seconds", "cycles",
    "arms", "identical", "loop_onset",
}  # fmt: skip


class ForgetfulTarget(FakeTarget):
    """Breaks its promise: the logits of wide passes are others than those of narrow ones."""

    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        outputs = super().forward(spans)
        return [SpanOutput(o.logits[:, ::-1] if len(o.logits) > 1 else o.logits, o.hidden) for o in outputs]


@pytest.fixture
def tokenizer(tiny_model: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_directory(tiny_model("llama", vocab=V))


@pytest.fixture
def base(tokenizer: Tokenizer) -> LLM:
    return make_llm(FakeTarget(V, context_limit=512, order=1, seed=3), tokenizer)


def runner(base: LLM, *policies: str, **options: Any) -> Runner:
    return Runner(base, policies, GREEDY, **options)


def talk(name: str = "d/1", turns: int = 1, recorded: str | None = None, size: int = 1) -> Prompt:
    said = tuple(Turn(({"role": "user", "content": f"{name} {i} " * size},), recorded) for i in range(turns))
    return Prompt(name, name.split("/")[0], "editing", "test", said)


# -- running ----------------------------------------------------------------------------------------------------------


def test_every_policy_has_a_record_and_the_same_output(base: LLM) -> None:
    outcome = runner(base, "cache", "hvd", repeat=True).run(talk())
    assert [record.policy for record in outcome.records] == ["plain", "cache", "hvd", "plain-again"]
    assert all(record.identical and record.differs_at is None for record in outcome.records)
    assert len({record.output for record in outcome.records}) == 1
    for record in outcome.records:
        assert record.tokens == 90 == record.cycles + record.accepted
        assert record.positions == record.cycles + record.drafted
        assert sum(arm["cycles"] for arm in record.arms.values()) == record.cycles
        assert sum(record.phases.values()) == pytest.approx(record.decode_seconds)
        assert record.wall_seconds >= record.decode_seconds > 0.0
        assert record.as_json().keys() >= FIELDS
    plain, cache = outcome.records[:2]
    assert plain.cycles == 90 > cache.cycles
    assert plain.loop_onset == cache.loop_onset


def test_plain_is_measured_once_and_first_in_the_tables(base: LLM) -> None:
    assert runner(base, "hvd", "plain", "hvd").policies == ["plain", "hvd"]


def test_the_order_rotates_from_prompt_to_prompt(base: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    generate = LLM.generate

    def noted(self: LLM, *arguments: Any, **options: Any) -> Any:
        order.append(self.config.policy)
        return generate(self, *arguments, **options)

    monkeypatch.setattr(LLM, "generate", noted)
    measuring = runner(base, "cache", "hvd")
    for i in range(3):
        measuring.run(talk(f"d/{i}"))
    names = ["plain", "cache", "hvd"]
    assert order == [*names, *names[1:], *names[:1], *names[2:], *names[:2]]


def test_policies_do_not_share_their_caches(base: LLM) -> None:
    """With a shared scope a second run of a prompt is drafted from the first answer, but from one's own alone."""
    alone = runner(base, "cache", scope="dataset")
    cold, warm = (alone.run(talk()).records[1] for _ in range(2))
    assert warm.cycles < cold.cycles
    without = runner(base, "cache")
    assert [without.run(talk()).records[1].cycles for _ in range(2)] == [cold.cycles] * 2
    both = runner(base, "any-match", "cache", scope="dataset")
    assert both.run(talk()).records[2].cycles == cold.cycles


def test_open_turns_go_on_from_the_answer_and_recorded_ones_from_the_record(base: LLM, tokenizer: Tokenizer) -> None:
    measuring = runner(base, "cache")
    open_ = measuring.run(talk("o/1", turns=3)).records
    assert [record.id for record in open_ if record.policy == "plain"] == ["o/1#turn0", "o/1#turn1", "o/1#turn2"]
    assert all(record.identical for record in open_)
    conversation = Conversation(talk("o/1", turns=2, recorded="what was said"))
    seen = []
    for _, messages in conversation:
        seen.append(messages)
        conversation.answered("something else")
    assert [message["content"] for message in seen[1]] == ["o/1 0 ", "what was said", "o/1 1 "]
    assert turn_ids(talk("s/1")) == ["s/1"]


def test_a_turn_that_does_not_fit_is_left_out_and_named(base: LLM) -> None:
    outcome = runner(base, "cache").run(talk("long/1", size=200))
    assert not outcome.records
    [(id_, why)] = outcome.skipped
    assert id_ == "long/1"
    assert "512" in why


def test_a_difference_is_found_and_located(tokenizer: Tokenizer) -> None:
    base = make_llm(ForgetfulTarget(V, context_limit=512, order=1, seed=3), tokenizer)
    plain, cache = runner(base, "any-match").run(talk()).records
    assert plain.identical
    assert not cache.identical
    assert cache.differs_at is not None
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 5, 3], [1, 2, 3]) == 1


def test_sampling_needs_a_seed_and_keeps_the_outputs_equal(base: LLM) -> None:
    with pytest.raises(ConfigError, match="seed"):
        Runner(base, ["cache"], SamplingParams(temperature=1.0))
    with pytest.raises(ConfigError, match="scope"):
        Runner(base, ["cache"], GREEDY, scope="mine")
    seeded = Runner(base, ["cache", "hvd"], SamplingParams(max_tokens=40, temperature=1.5, seed=1))
    assert all(record.identical for record in seeded.run(talk()).records)


# -- adding up --------------------------------------------------------------------------------------------------------


def record(id_: str, policy: str, tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    values = {
        "id": id_, "dataset": id_.split("/")[0], "category": "editing", "policy": policy, "tokens": tokens,
        "decode_seconds": seconds, "cycles": tokens // 2, "drafted": 10, "accepted": 5, "positions": 2 * tokens,
        "arms": {"cache": {"cycles": 3, "drafted": 10, "accepted": 5}, "plain": {"cycles": 1, "drafted": 0}},
        "phases": {"forward": seconds * 0.75, "walk": seconds * 0.25}, "identical": True, "differs_at": None,
        "loop_onset": None, "peer": None, "decoded": tokens, "prompt_tokens": 100,
        "stretches": [[0, tokens, tokens // 2, seconds]],
    }  # fmt: skip
    return values | more


@pytest.fixture
def records() -> list[dict[str, Any]]:
    """Data set a: 100 + 300 tokens, 2x and 4x; data set b: one prompt, 1x, looping."""
    return [
        record("a/1", "plain", 100, 10.0), record("a/1", "hvd", 100, 5.0),
        record("a/2", "plain", 300, 30.0), record("a/2", "hvd", 300, 7.5),
        record("b/1", "plain", 100, 10.0, loop_onset=50), record("b/1", "hvd", 100, 10.0, loop_onset=50),
    ]  # fmt: skip


def row(summary: dict[str, Any], level: str, group: str, policy: str, loops: bool = True) -> dict[str, Any]:
    [found] = [
        r for r in summary["rows"] if (r["level"], r["group"], r["policy"], r["loops"]) == (level, group, policy, loops)
    ]
    return dict(found)


def test_micro_macro_and_median_are_what_they_say(records: list[dict[str, Any]]) -> None:
    summary = report.summarize(records)
    assert (summary["prompts"], summary["looped"], summary["identical"]) == (3, 1, True)
    a = row(summary, "dataset", "a", "hvd")
    assert a["speedup_micro"] == pytest.approx(40.0 / 12.5)
    assert a["speedup_macro"] == pytest.approx(40.0 / 12.5)
    assert a["speedup_median"] == pytest.approx(3.0)
    assert a["median_low"] >= 2.0
    assert a["median_high"] <= 4.0
    assert a["tokens_per_second"] == pytest.approx(400 / 12.5)
    assert a["tokens_per_cycle"] == pytest.approx(2.0)
    assert a["positions_per_token"] == pytest.approx(2.0)
    assert a["acceptance"] == pytest.approx(0.5)
    assert a["cycle_share"] == pytest.approx({"cache": 0.75, "plain": 0.25})
    assert a["phase_share"] == pytest.approx({"forward": 0.75, "walk": 0.25})
    whole = row(summary, "all", "all", "hvd")
    assert whole["speedup_micro"] == pytest.approx(50.0 / 22.5)
    assert whole["speedup_macro"] == pytest.approx(np.sqrt(3.2 * 1.0))
    assert row(summary, "all", "all", "plain")["speedup_macro"] == 1.0


def test_looping_prompts_are_left_out_of_the_second_half(records: list[dict[str, Any]]) -> None:
    summary = report.summarize(records)
    assert row(summary, "all", "all", "hvd", loops=False)["prompts"] == 2
    assert not [r for r in summary["rows"] if r["group"] == "b" and not r["loops"]]


def test_a_difference_is_reported(records: list[dict[str, Any]]) -> None:
    records[1] |= {"identical": False, "differs_at": 7}
    summary = report.summarize(records)
    assert summary["identical"] is False
    assert summary["different"] == [{"id": "a/1", "policy": "hvd", "differs_at": 7}]


def test_nothing_adds_up_to_nothing() -> None:
    assert report.summarize([])["rows"] == []


def test_the_interval_narrows_with_more_values_and_is_the_same_each_time() -> None:
    rng = np.random.default_rng(1)
    few, many = rng.normal(2.0, 0.5, 10), rng.normal(2.0, 0.5, 1000)
    found, wide = ratios.median(many), ratios.median(few)
    assert found.low <= found.value <= found.high
    assert found.high - found.low < wide.high - wide.low
    assert ratios.median(many) == found


# -- the file and the command -----------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [
        {"id": f"{name}/{i}", "dataset": name, "category": "chat", "split": "test", "prompt": f"{name} {i}"}
        for name in "ab"
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


@pytest.fixture
def bench(
    base: LLM, monkeypatch: pytest.MonkeyPatch, data: Path, tmp_path: Path
) -> Callable[..., tuple[int, dict[str, Any]]]:
    monkeypatch.setattr(ModelOptions, "open", lambda options, config=None: base)
    out = tmp_path / "out.json"

    def call(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(
            ["bench", "--model", "fake", "--data", str(data), "--max-tokens", "24", "--json", str(out), *arguments]
        )
        return code, json.loads(out.read_text("utf-8"))

    return call


def test_the_command_writes_records_summary_and_where_it_was_made(
    bench: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, written = bench("--policies", "match-len:2,hvd", "--limit", "5")
    assert code == 0
    assert len(written["records"]) == 5 * 3
    assert {record["policy"] for record in written["records"]} == {"plain", "match-len:2", "hvd"}
    assert all(record.keys() >= FIELDS for record in written["records"])
    assert written["summary"]["identical"] is True
    assert written["settings"]["policies"] == ["match-len:2", "hvd"]
    assert written["settings"]["sampling"]["max_tokens"] == 24
    assert written["model"]["fingerprint"].startswith("fake")
    assert {"cpu", "cores", "memory_gib", "python", "versions", "commit"} <= set(written["environment"])
    out, err = capsys.readouterr()
    assert "output identical: yes" in out
    assert "\r" not in err + out


def test_resuming_measures_only_what_is_missing(bench: Callable[..., tuple[int, dict[str, Any]]], base: LLM) -> None:
    policies = ("--policies", "cache")
    _, first = bench(*policies, "--limit", "3")
    assert isinstance(base.target, FakeTarget)
    _, second = bench(*policies, "--limit", "6", "--resume")
    assert second["records"][:6] == first["records"]
    assert len(second["records"]) == 12
    passes = len(base.target.passes)
    _, third = bench(*policies, "--limit", "6", "--resume")
    assert third["records"] == second["records"]
    assert len(base.target.passes) == passes
    code, kept = bench(*policies, "--limit", "2")  # measured records are not thrown away unasked
    assert code == 2
    assert kept["records"] == second["records"]
    _, afresh = bench(*policies, "--limit", "2", "--overwrite")
    assert len(afresh["records"]) == 4


def test_other_settings_cant_be_resumed(
    bench: Callable[..., tuple[int, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--policies", "cache", "--limit", "1")
    assert bench("--policies", "cache", "--limit", "1", "--resume", "--temperature", "1")[0] == 2
    assert "can't be resumed" in capsys.readouterr().err
    assert bench("--policies", "hvd", "--limit", "1", "--resume")[0] == 2


def test_an_interruption_keeps_what_was_measured(
    bench: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = Runner.run, [0]

    def interrupted(self: Runner, *arguments: Any) -> Outcome:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(Runner, "run", interrupted)
    code, written = bench("--policies", "cache")
    assert code == 130
    assert len(written["records"]) == 4


def test_a_different_output_is_exit_code_1(
    bench: Callable[..., tuple[int, dict[str, Any]]], base: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    base.target = ForgetfulTarget(V, context_limit=512, order=1, seed=3)
    code, written = bench("--policies", "any-match")
    assert code == 1
    assert written["summary"]["identical"] is False
    out, err = capsys.readouterr()
    assert "output identical: NO" in out
    assert "DIFFERENT OUTPUT" in err


def test_files_that_cant_be_written_or_resumed_are_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for path in (tmp_path, tmp_path / "file" / "out.json"):
        with pytest.raises(ConfigError, match="can't write"):
            BenchFile(path, {}, {}, {})
    with pytest.raises(ConfigError, match="can't be resumed"):
        BenchFile(tmp_path / "file", {}, {}, {}, resume=True)


def test_the_environment_names_machine_and_versions() -> None:
    found = environment()
    assert found["cpu"]
    assert isinstance(found["versions"], dict)
    assert found["versions"]["numpy"] == np.__version__
    json.dumps(found)


def test_a_rule_can_be_measured_with_the_drafts_of_the_other_mode(
    bench: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    code, result = bench("--policies", "cache,cache@arctic", "--limit", "2")
    assert code == 0
    drafted = {
        name: max(r["drafted"] for r in result["records"] if r["policy"] == name) for name in ("cache", "cache@arctic")
    }
    assert drafted["cache"] > drafted["cache@arctic"] > 0
    assert bench("--policies", "cache@nonsense", "--limit", "2", "--overwrite")[0] == 2
