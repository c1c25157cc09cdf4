"""What a benchmark's analysis counts: by replay of known answers, and in sums that come out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd.bench import ratios
from hvd.bench.analysis import analyse
from hvd.bench.buckets import by_position, by_prompt_length
from hvd.bench.file import outline, read_bench
from hvd.bench.findings import OFFLINE
from hvd.bench.matrix import matrix
from hvd.bench.record import stretches
from hvd.bench.report import summarize
from hvd.bench.runner import Outcome, Runner
from hvd.bench.sources import name_source, source_of, token_roles
from hvd.bench.tallies import CurveTally, PayoffTally, add, bin_of, total
from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.errors import ConfigError
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.traces.prompts import Prompt, Turn
from hvd.types import Arm, CycleTimes, Draft, StepRecord
from support import OracleDrafter, make_llm

V = 512
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PARAMS = SamplingParams(max_tokens=90)


@pytest.fixture
def tokenizer(tiny_model: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_directory(tiny_model("llama", vocab=V))


@pytest.fixture
def base(tokenizer: Tokenizer) -> LLM:
    return make_llm(FakeTarget(V, context_limit=512, order=1, seed=3), tokenizer)


def prompt(name: str, text: str = "hello", category: str = "chat") -> Prompt:
    return Prompt(name, name.split("/")[0], category, "test", (Turn(({"role": "user", "content": text},)),))


def run(base: LLM, *policies: str, **options: Any) -> tuple[Outcome, dict[str, Any]]:
    """Two prompts of one set, and the findings' group "all"."""
    runner = Runner(base, policies, PARAMS, **options)
    runner.warm_up()
    both = Outcome()
    for name in ("d/1", "d/2"):
        outcome = runner.run(prompt(name, f"{name} says hello"))
        both.records += outcome.records
        both.findings += outcome.findings
    records = [record.as_json() for record in both.records]
    return both, analyse({"name": "m"}, records, both.findings)


def whole(analysis: dict[str, Any]) -> dict[str, Any]:
    [group] = [g for g in analysis["groups"] if g["loops"] and g["level"] == "all"]
    return dict(group)


# -- replay against what really happened ------------------------------------------------------------------------------


def test_replayed_states_are_those_that_the_engines_met(base: LLM) -> None:
    outcome, analysis = run(base, "cache", "hvd")
    group = whole(analysis)
    for policy in ("cache", "hvd"):
        payoff, cycles = group["payoff"][policy], sum(r.cycles for r in outcome.records if r.policy == policy)
        assert payoff["states"] + payoff["bare"] + payoff["censored"] == cycles
        assert sum(payoff["histogram"]) == payoff["states"] > 0
        assert payoff["unlike"] == 0
    offline = group["payoff"][OFFLINE]
    assert offline["states"] + offline["bare"] + offline["censored"] == group["tokens"] == 180
    live = [r for r in outcome.records if r.policy == "cache"]
    guesses = group["wrong_guesses"]["cache"]
    assert guesses["drafted"] * 0.18 == pytest.approx(sum(r.drafted for r in live))
    assert guesses["rejected"] * 0.18 == pytest.approx(sum(r.drafted - r.accepted for r in live))
    assert guesses["cycles"] * 0.18 == pytest.approx(sum(r.cycles for r in live))
    assert guesses["seconds_lost"] > 0
    for policy in ("cache", "hvd"):
        sources = group["sources"][policy]
        accepted = [r.arms["cache"]["accepted"] for r in outcome.records if r.policy == policy and "cache" in r.arms]
        assert sources["tokens"] == sum(accepted) > 0
        assert sum(sources["share"].values()) == pytest.approx(1.0)
    json.dumps(analysis, allow_nan=False)


def test_regret_is_none_for_the_oracle_and_never_below_it(base: LLM) -> None:
    _, analysis = run(base, "cache", "match-len:4", "hvd", "cache@arctic")
    regret = whole(analysis)["regret"]
    assert set(regret) == {"plain", "cache", "match-len:4", "hvd", "oracle"}
    assert regret["oracle"]["regret"] == 0.0
    assert all(entry["regret"] >= 0.0 for entry in regret.values())
    assert regret["plain"]["speedup"] == 1.0


def test_plain_decoding_forgoes_what_the_cache_has_right_and_whole_drafts_nothing_but_alternatives(base: LLM) -> None:
    _, analysis = run(base, "cache")
    guesses = whole(analysis)["wrong_guesses"]
    assert guesses["plain"]["rejected"] == 0.0
    assert guesses["plain"]["forgone"] > guesses["cache"]["forgone"] >= 0.0


def test_gates_are_asked_offline_and_at_the_states_of_hvd(base: LLM) -> None:
    _, analysis = run(base, "cache", "hvd")
    group = whole(analysis)
    assert set(group["gates"]) == {OFFLINE, "hvd"}
    always = group["gates"][OFFLINE]["any-match"]
    assert always["states"] == group["payoff"][OFFLINE]["states"]
    assert always["recall"] == 1.0
    assert always["precision"] == pytest.approx(group["payoff"][OFFLINE]["paying"])
    assert "online" in group["gates"]["hvd"]
    curve = group["calibration"]["hvd"]["online"]["1"]
    assert curve["states"] == group["payoff"]["hvd"]["states"]
    for row in curve["bins"]:
        assert 0.0 <= row["predicted"] <= 1.0
        assert 0.0 <= row["observed"] <= 1.0


def test_with_a_shared_scope_the_replay_knows_the_earlier_answers_too(base: LLM) -> None:
    runner = Runner(base, ["cache"], PARAMS, scope="dataset")
    for _ in range(2):
        outcome = runner.run(prompt("d/1"))
    [finding] = outcome.findings
    assert finding["counts"]["sources"]["cache"]["tokens"].get("shared", 0) > 0
    cycles = [record.cycles for record in outcome.records if record.policy == "cache"]
    payoff = finding["counts"]["payoff"]["cache"]
    assert payoff["states"] + payoff["bare"] + payoff["censored"] == cycles[0]


def test_the_head_is_counted_by_context(tokenizer: Tokenizer) -> None:
    target = FakeTarget(V, context_limit=512, order=1, seed=3)
    alone = make_llm(target, tokenizer)
    prompts = [alone.chat_prompt(prompt(name, f"{name} says hello").turns[0].messages) for name in ("d/1", "d/2")]
    answers = {tuple(ids): alone.generate([ids], PARAMS, policy="plain")[0].token_ids for ids in prompts}
    base = make_llm(target, tokenizer, eagle3=OracleDrafter(answers, V, wrong_every=5))
    warm = base.chat_prompt([{"role": "user", "content": "List: one two three one two three one two three"}])
    assert tuple(warm) not in answers
    outcome, analysis = run(base, "eagle3")
    group = whole(analysis)
    [row] = group["eagle3_by_context"]["eagle3"]
    live = [r for r in outcome.records if r.policy == "eagle3"]
    assert (row["from"], row["to"]) == (0, 256)
    assert row["cycles"] == sum(r.arms["eagle3"]["cycles"] for r in live)
    assert row["accepted"] == pytest.approx(sum(r.accepted for r in live) / row["cycles"])
    assert group["regret"]["eagle3"]["speedup"] > 1.0


def test_no_analysis_on_request(base: LLM) -> None:
    runner = Runner(base, ["cache"], PARAMS, analyse=False)
    assert not runner.run(prompt("d/1")).findings


# -- where a draft came from ------------------------------------------------------------------------------------------


def test_tokens_of_a_prompt_know_whose_they_are(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " be brief and kind "}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    roles = token_roles(tokenizer, ids, messages)
    assert len(roles) == len(ids)
    assert set(roles) == {"system", "user", "template"}
    assert roles.index("system") < roles.index("user")
    said = tokenizer.decode([i for i, role in zip(ids, roles, strict=True) if role == "system"])
    assert said == "be brief"
    assert token_roles(tokenizer, ids, [{"role": "user", "content": "never said"}]) == ["template"] * len(ids)


def test_the_last_place_of_a_match_is_the_source() -> None:
    text = np.array([7, 1, 2, 3, 9, 1, 2, 3, 8, 1, 2], np.int32)
    assert source_of(text, 2, 3) == 7
    assert source_of(text, 2, 5) is None
    assert source_of(text, 2, 8) == 8  # behind 3, not behind 1 2: the best there is
    assert source_of(text, 1, 3) == 7
    assert [name_source(place, ["user"] * 8) for place in (7, 8, None)] == ["user", "answer", "unknown"]


# -- sums -------------------------------------------------------------------------------------------------------------


def test_trees_of_counts_add_up() -> None:
    assert add({"a": 1, "b": [1, 2]}, {"b": [3, 4], "c": {"d": 5}}) == {"a": 1, "b": [4, 6], "c": {"d": 5}}
    assert total([]) == {}
    assert [bin_of(value, (0, 4, 8)) for value in (-1, 0, 3, 4, 99)] == [0, 0, 0, 1, 2]


def test_a_payoff_lands_in_its_bin_and_a_curve_asks_only_within_the_draft() -> None:
    draft = Draft.chain(np.arange(10, dtype=np.int32), Arm.CACHE)
    tally = PayoffTally()
    for payoff in (0, 6, 7, 10):
        tally.count(draft, payoff)
    assert (tally.states, tally.paid, tally.drafted) == (4, 23, 40)
    assert tally.histogram[:9] == [1, 0, 0, 0, 0, 0, 2, 1, 0]
    curve = CurveTally()
    curve.count(np.array([0.95, 0.5, 0.31, 0.3, 0.2], np.float32), 2)
    assert curve.bins == {"1": {"9": [1, 0.95, 1]}, "2": {"5": [1, 0.5, 1]}, "4": {"3": [1, 0.3, 0]}}


def test_precision_recall_and_calibration_by_hand() -> None:
    counts = {
        "payoff": {},
        "gates": {"offline": {"score 3": [3, 1, 2, 4]}},
        "curves": {"offline": {"survival": {"6": {"2": [4, 1.0, 2], "9": [4, 3.8, 4]}}}},
        "sources": {},
        "guesses": {},
        "head": {},
        "seconds": {"plain": 2.0, "hvd": 1.0, "oracle": 0.8},
    }
    finding = {"id": "d/1", "dataset": "d", "category": "c", "loops": False, "tokens": 10, "counts": counts}
    groups = analyse({"name": "m"}, [], [finding, finding])["groups"]
    assert [(g["loops"], g["level"], g["group"]) for g in groups[:3]] == [
        (True, "dataset", "d"),
        (True, "category", "c"),
        (True, "all", "all"),
    ]
    gate = groups[0]["gates"]["offline"]["score 3"]
    assert gate == {"states": 20, "precision": 0.75, "recall": 0.6, "f1": pytest.approx(2 * 0.45 / 1.35)}
    curve = groups[0]["calibration"]["offline"]["survival"]["6"]
    assert curve["bins"][0] == {"states": 8, "predicted": 0.25, "observed": 0.5}
    assert curve["error"] == pytest.approx((8 * 0.25 + 8 * 0.05) / 16)
    assert groups[0]["regret"]["hvd"] == {"seconds": 2.0, "speedup": 2.0, "regret": pytest.approx(0.25)}


def test_looping_prompts_are_left_out_of_the_second_half_of_the_groups() -> None:
    counts = {name: {} for name in ("payoff", "gates", "curves", "sources", "guesses", "head")}
    counts["seconds"] = {"plain": 1.0, "oracle": 1.0}  # type: ignore[dict-item]
    finding = {"dataset": "d", "category": "c", "tokens": 10, "counts": counts}
    groups = analyse({"name": "m"}, [], [finding | {"loops": True}, finding | {"loops": False}])["groups"]
    assert {g["loops"]: g["prompts"] for g in groups if g["level"] == "all"} == {True: 2, False: 1}


# -- buckets, intervals, matrix ---------------------------------------------------------------------------------------


def record(id_: str, policy: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "id": id_, "dataset": id_.split("/")[0], "category": "c", "policy": policy, "peer": None, "prompt_tokens": 100,
        "tokens": 100, "decoded": 100, "decode_seconds": seconds, "stretches": [[0, 60, 30, seconds / 2]],
        "identical": True, "differs_at": None, "loop_onset": None, "cycles": 50, "drafted": 0, "accepted": 0,
        "positions": 100, "arms": {}, "phases": {"forward": seconds},
    } | more  # fmt: skip


def test_cycles_are_counted_where_they_begin() -> None:
    times = CycleTimes(0.1, 0.1, 0.2, 0.1)
    steps = [StepRecord(p, 0, Arm.PLAIN, 0, c - 1, c, 1, times=times) for p, c in ((0, 1), (31, 8), (39, 1), (64, 1))]
    found = stretches(steps)
    assert [row[:3] for row in found] == [(0, 9, 2), (32, 1, 1), (64, 1, 1)]
    assert found[0][3] == pytest.approx(1.0)


def test_buckets_of_prompts_and_positions_have_their_own_speeds() -> None:
    records = [
        record("a/1", "plain", 10.0), record("a/1", "hvd", 5.0),
        record("a/2", "plain", 10.0, prompt_tokens=3000), record("a/2", "hvd", 2.5, prompt_tokens=3000),
    ]  # fmt: skip
    found = {(b["from"], b["to"]): b["speedup_micro"] for b in by_prompt_length(records, True) if b["policy"] == "hvd"}
    assert found == {(0, 128): pytest.approx(2.0), (2048, 4096): pytest.approx(4.0)}
    [stretch] = [b for b in by_position(records, True) if b["policy"] == "hvd"]
    assert (stretch["from"], stretch["to"], stretch["tokens"]) == (0, 32, 120)
    assert stretch["speedup_micro"] == pytest.approx(10.0 / 3.75)
    assert stretch["tokens_per_cycle"] == 2.0


def test_intervals_hold_the_figure_and_shrink_to_it_where_all_prompts_agree() -> None:
    records = [record(f"a/{i}", p, s) for i in range(8) for p, s in (("plain", 10.0), ("hvd", 4.0 + 0.2 * i))]
    pairs = ratios.pairs(records, "hvd")
    for found in (ratios.micro(pairs), ratios.macro(pairs), ratios.median(pairs.ratios())):
        assert found.low < found.value < found.high
    same = ratios.pairs([record(f"a/{i}", p, s) for i in range(8) for p, s in (("plain", 10.0), ("hvd", 4.0))], "hvd")
    assert ratios.micro(same) == ratios.Interval(2.5, 2.5, 2.5)
    assert np.isnan(ratios.micro(ratios.pairs([], "hvd")).value)


def test_one_prompt_a_set_says_nothing_of_its_spread_so_sets_are_drawn() -> None:
    records = [record(f"{n}/1", p, s) for n in "abc" for p, s in (("plain", 10.0), ("hvd", 2.0 + ord(n) - ord("a")))]
    found = ratios.macro(ratios.pairs(records, "hvd"))
    assert 10.0 / 4 <= found.low < found.value < found.high <= 10.0 / 2


def test_the_matrix_counts_wins_over_each_baseline() -> None:
    def bench(model: str, scale: float) -> dict[str, Any]:
        seconds = {"plain": (10.0, 10.0), "cache": (4.0, 12.0), "hvd": (5.0 * scale, 8.0)}
        sets = [record(f"{name}/1", p, s[i]) for i, name in enumerate("ab") for p, s in seconds.items()]
        return {"model": {"name": model}, "records": [*sets, record("a/1", "llama.cpp", 20.0, peer="llama.cpp")]}

    found = matrix([bench("small", 1.0), bench("large", 0.5)])
    assert [table["baseline"] for table in found["against"]] == ["plain", "cache", "llama.cpp"]
    rows = {(r["model"], r["method"]): r for r in found["against"][1]["rows"]}
    small, large = rows["small", "hvd"], rows["large", "hvd"]
    assert small["sets"] == {"a": pytest.approx(0.8), "b": pytest.approx(1.5)}
    assert (small["wins"], small["losses"]) == (1, 1)
    assert (large["wins"], large["losses"]) == (2, 0)
    assert small["macro"] == pytest.approx(np.sqrt(0.8 * 1.5))
    assert found["fastest"] == {"plain": 0, "cache": 1, "hvd": 3, "llama.cpp": 0}


def test_noise_is_plain_over_plain() -> None:
    records = [record("a/1", "plain", 10.0), record("a/1", "plain-again", 8.0), record("b/1", "plain", 10.0)]
    summary = summarize([*records, record("b/1", "plain-again", 12.5)])
    assert summary["noise"]["lowest_set"] == pytest.approx(0.8)
    assert summary["noise"]["highest_set"] == pytest.approx(1.25)
    assert summarize(records[:1])["noise"] is None


# -- the file ---------------------------------------------------------------------------------------------------------


def test_an_outline_is_the_same_json_in_fewer_lines() -> None:
    value = {"a": [{"b": [1, 2]}, {"b": []}], "c": {}, "d": {"e": {"f": None}}, "g": "\u00e9"}
    text = outline(value, 2)
    assert json.loads(text) == value
    assert '{"b": [1, 2]}' in text.splitlines()[2]


@pytest.mark.parametrize("name", ["bench-smollm2.json", "bench-qwen-coder.json", "bench-smollm2-arctic.json"])
def test_files_of_format_1_are_read(name: str) -> None:
    content = read_bench(RESULTS / name)
    assert content["format"] == 2
    assert content["summary"]["identical"] is True
    assert {"micro_low", "cycle_ms", "peer"} <= set(content["summary"]["rows"][0])
    assert content["summary"]["by_prompt_length"]
    assert content["summary"]["by_position"] == content["findings"] == content["analysis"]["groups"] == []
    assert content["analysis"]["matrix"]["against"][0]["baseline"] == "plain"
    json.dumps(content, allow_nan=False)


def test_what_is_no_benchmark_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match="can't read"):
        read_bench(path)
    for text in ("{", "[]", '{"format": 1}', "3"):
        path.write_text(text, "utf-8")
        with pytest.raises(ConfigError, match="no complete file"):
            read_bench(path)
    path.write_text('{"format": 99}', "utf-8")
    with pytest.raises(ConfigError, match="format 99"):
        read_bench(path)
