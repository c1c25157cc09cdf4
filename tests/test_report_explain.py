"""What `hvd explain` says of a request: that it is what was decided, live and in replay, and that watching is free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from hvd.config import SamplingParams, SuffixConfig
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine import engine
from hvd.engine.llm import LLM
from hvd.errors import ConfigError
from hvd.payoff.cost import CostModel, Surface
from hvd.payoff.explanation import Explanation, Prospect
from hvd.payoff.features import STATE_NAMES
from hvd.payoff.hybrid import Hybrid
from hvd.payoff.policy import Choice, make_policy
from hvd.report.explain import (
    ExplainedCycle,
    ExplainedRequest,
    accepted_nodes,
    explain_live,
    explain_walk,
    lengths_shown,
    request_json,
    token_texts,
)
from hvd.report.explain_page import explain_page
from hvd.report.page import page, visible, write_page
from hvd.report.source import Source, find_source
from hvd.testing import FakeTarget
from hvd.tokenizer import Tokenizer
from hvd.traces.schema import Trace
from hvd.training.replay import SimulatedHead, walks
from hvd.types import Arm, Draft, FinishReason, StepRecord
from support import OracleDrafter, flat_cost, make_llm, plain

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 9]
PARAMS = SamplingParams(max_tokens=120)


def repetitive() -> FakeTarget:
    return FakeTarget(64, context_limit=512, order=1, seed=3)


class StillCost(CostModel):
    """Costs that no measurement changes: decisions are the same on a busy machine."""

    def observe_verify(self, widths: Sequence[int], contexts: Sequence[int], seconds: float) -> None:
        pass

    def observe_eagle3(self, length: int, backlog: int, context: int, seconds: float) -> None:
        pass

    def observe_overhead(self, seconds: float) -> None:
        pass


def still_cost() -> StillCost:
    sizes = (1, 8, 64)
    drafting = Surface(sizes, (0,), np.asarray([[1e-3 * n for n in sizes]]))
    return StillCost(Surface(sizes, (0,), np.asarray([[1e-2, 1.2e-2, 3e-2]])), eagle3=drafting)


def with_head(*, tree: bool = False) -> LLM:
    target = repetitive()
    answer = plain(target, PROMPT, PARAMS).token_ids
    head = OracleDrafter({tuple(PROMPT): answer}, 64, wrong_every=5, tree=tree)
    return make_llm(target, eagle3=head, policy="eagle3" if tree else "hvd", cost=still_cost())


# -- the hook ---------------------------------------------------------------------------------------------------------


def test_a_watched_request_decodes_as_an_unwatched_one() -> None:
    watched = explain_live(make_llm(repetitive()), PROMPT, PARAMS, "match-len")
    free = make_llm(repetitive()).generate([PROMPT], PARAMS, policy="match-len")[0]
    assert watched.output.tolist() == free.token_ids
    told = [(c.record.arm, c.record.drafted, c.record.accepted, c.record.reason) for c in watched.cycles]
    assert told == [(r.arm, r.drafted, r.accepted, r.reason) for r in free.records]
    assert watched.tokens_per_cycle == free.stats.tokens_per_cycle
    assert sum(watched.tokens_by_arm().values()) == 120
    assert watched.tokens_by_arm()[Arm.CACHE] == free.stats.arms[Arm.CACHE].accepted > 60


def test_nothing_is_explained_unless_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Explanation:
        raise AssertionError("explained without being asked")

    monkeypatch.setattr(engine, "explain", refuse)
    llm = make_llm(repetitive())
    assert len(llm.generate([PROMPT], PARAMS)[0].token_ids) == 120
    with pytest.raises(AssertionError, match="without being asked"):
        explain_live(llm, PROMPT, PARAMS, "hvd")


def test_a_policy_that_can_not_be_explained_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[Arm, np.ndarray]:
        raise RuntimeError("no idea")

    monkeypatch.setattr(Hybrid, "foretold", fail)
    llm = make_llm(repetitive())
    other = llm.stream(PROMPT, PARAMS)
    with pytest.raises(RuntimeError, match="no idea"):
        explain_live(llm, PROMPT, PARAMS, "hvd")
    assert len(other.completion().token_ids) == 120
    assert llm.engine.live == 0


@pytest.mark.parametrize("head", [False, True])
def test_the_choice_is_the_best_of_what_is_shown(head: bool) -> None:
    request = explain_live(with_head() if head else make_llm(repetitive(), cost=still_cost()), PROMPT, PARAMS, "hvd")
    seen, taken = set(), set()
    for cycle in request.cycles:
        why = cycle.explanation
        seen |= {prospect.arm for prospect in why.prospects}
        taken.add(why.choice.arm)
        if why.backlog > 2:
            continue  # the policy charges less than the whole catching up
        rates = {(Arm.PLAIN, 0): 1.0 / why.plain_seconds}
        for prospect in why.prospects:
            assert prospect.rates is not None
            assert len(prospect.rates) == len(prospect.seconds)
            assert (np.diff(prospect.survival) <= 1e-6).all()
            rates |= {(prospect.arm, k): float(rate) for k, rate in enumerate(prospect.rates, start=1)}
        assert rates[why.choice.arm, why.choice.length] >= max(rates.values()) * 0.995
    assert seen == ({Arm.CACHE, Arm.EAGLE3} if head else {Arm.CACHE})
    assert taken >= seen


def test_expected_tokens_are_the_area_under_the_curve() -> None:
    for cycle in explain_live(with_head(), PROMPT, PARAMS, "hvd").cycles:
        for prospect in cycle.explanation.prospects:
            if prospect.arm is cycle.explanation.choice.arm:
                assert prospect.survival is not None
                gain = prospect.survival[: cycle.explanation.choice.length].sum()
                assert gain == pytest.approx(cycle.record.expected, abs=1e-5)


def test_a_rule_has_costs_and_foretells_nothing() -> None:
    request = explain_live(make_llm(repetitive()), PROMPT, PARAMS, "cache")
    offered = [c for c in request.cycles if c.explanation.cache is not None]
    assert offered
    for cycle in offered:
        [prospect] = cycle.explanation.prospects
        assert prospect.survival is prospect.rates is None
        assert (prospect.seconds > 0).all()
        assert cycle.explanation.features["score"] == pytest.approx(cycle.record.score, rel=1e-5)


# -- replay -----------------------------------------------------------------------------------------------------------


def as_trace(request: ExplainedRequest) -> Trace:
    return Trace(
        "set/1", request.prompt, request.output, np.zeros(0, np.uint8), FinishReason.LENGTH,
        sampling=json.dumps({"max_tokens": len(request.output)}),
    )  # fmt: skip


def test_replay_sees_what_the_engine_saw() -> None:
    live = explain_live(make_llm(repetitive()), PROMPT, PARAMS, "match-len:2")
    [walk] = walks([as_trace(live)], shared=False)
    again = explain_walk(walk, make_policy("match-len:2"), flat_cost(), name="match-len:2")
    assert again.replayed
    assert again.policy == live.policy
    assert len(again.cycles) == len(live.cycles) > 5
    for ours, theirs in zip(again.cycles, live.cycles, strict=True):
        a, b = ours.record, theirs.record
        assert (a.position, a.context, a.arm, a.drafted, a.accepted, a.offered, a.match_len, a.score, a.reason) == (
            b.position, b.context, b.arm, b.drafted, b.accepted, b.offered, b.match_len, b.score, b.reason
        )  # fmt: skip
        assert ours.explanation.features == theirs.explanation.features
        assert ours.source == theirs.source


def test_a_simulated_head_has_lengths_and_no_tokens() -> None:
    live = explain_live(make_llm(repetitive()), PROMPT, PARAMS, "plain")
    [walk] = walks([as_trace(live)], shared=False)
    request = explain_walk(walk, make_policy("eagle3"), flat_cost(), SimulatedHead(0.8))
    drafted = [cycle for cycle in request.cycles if cycle.record.arm is Arm.EAGLE3]
    assert sum(cycle.record.accepted for cycle in drafted) > 60
    assert all(cycle.draft is None for cycle in drafted)
    assert sum(cycle.record.committed for cycle in request.cycles) == 120


# -- where a draft came from ------------------------------------------------------------------------------------------


def chain(tokens: list[int], match: int, *, local: bool = True) -> Draft:
    return Draft.chain(np.asarray(tokens, np.int32), Arm.CACHE, match_len=match, local=local)


@pytest.mark.parametrize(
    ("text", "tokens", "match", "source"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5], 2, Source(2, 3)),
        ([7, 2, 3, 9, 1, 2, 3, 8, 1, 2], [3, 8], 2, Source(6, 2)),  # the match tells the two places apart
        ([1, 2, 3, 1, 2, 3, 1, 2], [3, 1], 2, Source(5, 2)),  # the last of several
        ([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], [3, 4], 2, Source(2, 2)),  # the one that agrees longest
        ([1, 2, 3, 9, 1, 2], [3, 4], 2, Source(2, 1)),  # a mixture of places
        ([5, 5, 5], [5, 5, 5, 5], 2, Source(2, 1)),
        ([1, 2, 3], [9], 2, None),
        ([], [9], 0, None),
    ],
)
def test_the_source_is_the_place_that_agrees_longest(
    text: list[int], tokens: list[int], match: int, source: Source | None
) -> None:
    assert find_source(np.asarray(text, np.int32), chain(tokens, match)) == source


def test_an_earlier_answer_is_no_place_of_this_text() -> None:
    assert find_source(np.asarray([1, 2, 3, 1, 2], np.int32), chain([3], 2, local=False)) is None


def test_every_local_draft_of_the_real_cache_is_found_whole_or_in_part() -> None:
    rng = np.random.default_rng(5)
    drafter = SuffixDrafter(SuffixConfig(), 32, "none")
    text = rng.integers(0, 4, 300).astype(np.int32)
    drafter.open(0)
    found = 0
    for end in range(1, 300):
        drafter.observe(0, text[end - 1 : end], None, prompt=True)
        draft = drafter.propose(0, 20)
        if draft is not None:
            source = find_source(text[:end], draft)
            assert source is not None
            start, match = source.start, draft.match_len
            assert text[start - match : start].tolist() == text[end - match : end].tolist()
            assert text[start : start + source.length].tolist() == draft.tokens[: source.length].tolist()
            found += 1
    assert found > 200


def test_the_accepted_path_of_a_tree() -> None:
    tree = Draft(
        np.asarray([5, 6, 7, 8], np.int32), np.asarray([-1, -1, 1, 1], np.int32), np.ones(4, np.float32),
        Arm.EAGLE3, 0.0, 0, np.zeros(4, np.int32), np.zeros(4, np.int32),
    )  # fmt: skip
    assert accepted_nodes(tree, np.asarray([6, 8], np.int32)) == [1, 3]
    assert accepted_nodes(tree, np.asarray([], np.int32)) == []
    assert lengths_shown(20, 5) == [1, 2, 4, 5, 8, 16, 20]
    assert lengths_shown(1, 0) == [1]


# -- texts ------------------------------------------------------------------------------------------------------------


def test_tokens_that_are_parts_of_a_character(tiny_model: Callable[..., Path]) -> None:
    tokenizer = Tokenizer.from_directory(tiny_model("llama", vocab=512))
    ids = np.asarray(tokenizer.encode("a\U0001f980b", add_special_tokens=False), np.int32)
    assert token_texts(tokenizer, ids, ids[:0]) == ["a", "", "", "", "\U0001f980", "b"]
    assert token_texts(tokenizer, ids[3:], ids[:3]) == ["", "\U0001f980", "b"]  # a draft may begin inside a character
    assert token_texts(tokenizer, ids[:3], ids[:0]) == ["a", "", "\ufffd"]


def test_unseen_characters_are_made_visible() -> None:
    assert visible("a\x00\x1b[31m\u202eb\u2066\x7f\n\t\u0627\u200d") == (
        "a\u2400\u241b[31m\u2039U+202E\u203ab\u2039U+2066\u203a\u2421\n\t\u0627\u200d"
    )


# -- JSON and page ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True])
def test_json_has_every_cycle(tree: bool) -> None:
    llm = with_head(tree=tree)
    request = explain_live(llm, PROMPT, PARAMS, llm.config.policy)
    value = json.loads(json.dumps(request_json(request), allow_nan=False))
    assert len(value["decisions"]) == value["cycles"] == len(request.cycles)
    assert sum(decision["committed"] for decision in value["decisions"]) == value["tokens"] == len(value["pieces"])
    heads = [decision for decision in value["decisions"] if decision["arm"] == "eagle3"]
    assert heads
    assert all((decision["draft"]["parents"] is not None) == tree for decision in heads)


def test_a_page_lets_no_text_become_markup() -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028\ud800"'
    text = page(evil, "<p>body</p>", assets=("base.css", "base.js"), data={"text": evil})
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "\u2028" not in text
    text.encode()  # lone surrogates are gone
    data = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["text"] == evil.replace("\ud800", "\ufffd")
    assert "default-src 'none'" in text
    assert "unsafe" not in text


def worst_case(cycles: int = 4000) -> ExplainedRequest:
    """A long answer whose every cycle had the longest draft on offer, half of it verified in vain."""
    rng = np.random.default_rng(0)

    def words(count: int) -> np.ndarray:
        return (rng.zipf(1.3, count) % 50_000).astype(np.int32)

    request = ExplainedRequest(words(8000), words(cycles), [], "hvd")
    for position in range(cycles):
        tokens = words(64)
        draft = Draft.chain(tokens, Arm.CACHE, match_len=7, score=12.345678)
        survival = np.sort(rng.random(64))[::-1]
        seconds = np.sort(rng.random(64)) / 10 + 0.01
        explanation = Explanation(
            Choice(Arm.CACHE, 33),
            draft,
            dict(zip(STATE_NAMES, rng.random(len(STATE_NAMES)).tolist(), strict=True)),
            0.01234,
            (Prospect(Arm.CACHE, survival, seconds),),
        )
        record = StepRecord(
            position, 8000, Arm.CACHE, 33, 0, 1, 34, 64, 7, 12.3, 4.5, f"cache 33 of 64: {position / 99:.1f}"
        )
        request.cycles.append(ExplainedCycle(record, explanation, draft.first(33), draft, None))
    return request


def test_a_long_answer_stays_below_three_megabytes() -> None:
    assert len(explain_page(worst_case(), "long").encode()) < 3_000_000


def test_the_legend_has_every_ground() -> None:
    legend = explain_page(worst_case(1)).split('class="legend"')[1].split("</ul>")[0]
    assert [f'swatch {kind}"' in legend for kind in ("plain", "cache", "from")] == [True] * 3


def test_the_page_counts_lengths_as_python_does() -> None:
    survival = np.asarray([1.0, 0.5, 0.25, 0.0])
    request = worst_case(1)
    why = request.cycles[0].explanation
    request.cycles[0] = dataclasses.replace(
        request.cycles[0],
        explanation=dataclasses.replace(why, prospects=(Prospect(Arm.CACHE, survival, np.full(4, 0.01)),)),
    )
    data = json.loads(explain_page(request).split('id="data">')[1].split("</script>")[0])
    [prospect] = data["cycles"][0]["w"]
    assert prospect == {"a": 0, "z": 4, "ms": [10, 10, 10], "v": "__gAQAAA"}
    assert len(data["cycles"][0]["c"]["t"]) == 33 + 16


def test_a_page_is_written_whole_or_refused_in_one_line(tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    write_page(target, "\u00e4")
    assert target.read_text("utf-8") == "\u00e4"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="can't write"):
        write_page(tmp_path / "file" / "page.html", "x")


def test_a_request_without_output_has_a_page() -> None:
    empty = ExplainedRequest(np.asarray([1], np.int32), np.zeros(0, np.int32), [], "hvd")
    assert empty.tokens_per_cycle == 0.0
    assert "tokens per cycle" in explain_page(empty)
