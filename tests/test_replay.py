"""Replay: states and cycles are those of serving; the oracle is the least time there is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache as memo
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.config import EngineConfig, SamplingParams, SuffixConfig
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.llm import LLM
from hvd.errors import ConfigError, TraceError
from hvd.payoff.cost import CostModel, Surface
from hvd.payoff.features import state_features, token_features
from hvd.payoff.history import History
from hvd.payoff.policy import Choice, Policy, Situation, make_policy
from hvd.testing import FakeTarget
from hvd.traces.schema import Trace
from hvd.traces.writer import TraceWriter
from hvd.training.replay import SimulatedHead, Walk, common_prefix, cycles, walk, walks
from hvd.training.simulate import ORACLE, Totals, oracle, play, replay_report, simulate
from hvd.types import Arm, Draft, FinishReason, StepRecord
from support import make_llm

CLASSES = (np.arange(64) % 9).astype(np.uint8)


def make_trace(prompt: Sequence[int], response: Sequence[int], **fields: object) -> Trace:
    arrays = (np.array(prompt, np.int32), np.array(response, np.int32))
    return Trace(fields.pop("id", "a"), *arrays, CLASSES, **fields)  # type: ignore[arg-type]


def offers(trace: Trace, drafts: dict[int, list[int]]) -> Walk:
    """A walk with these drafts on offer."""
    n = len(trace.response)
    each = [Draft.chain(np.array(drafts[t], np.int32), Arm.CACHE) if t in drafts else None for t in range(n)]
    payoffs = [
        common_prefix(d.tokens, trace.response[t : t + len(d)]) if d is not None else 0 for t, d in enumerate(each)
    ]
    return Walk(trace, tuple(each), np.array(payoffs, np.int32), np.zeros(n, np.uint8))


def steep_cost() -> CostModel:
    """A pass of width w at context c: 8 + 2w + c/100 seconds, at least width 2; drafting j tokens: 1 + j."""
    sizes, contexts = tuple(range(1, 80)), (0, 1000)
    seconds = np.array([[8.0 + 2 * w + c / 100 for w in sizes] for c in contexts])
    head = Surface((1, 8), (0,), np.array([[2.0, 9.0]]))
    return CostModel(Surface(sizes, contexts, seconds), eagle3=head, backlog_seconds=0.5, min_width=2)


class FrozenCost(CostModel):
    """Does not learn from the clock, so that what it says is the same in both runs."""

    def observe_verify(self, widths: Sequence[int], contexts: Sequence[int], seconds: float) -> None:
        """Nothing."""

    def observe_overhead(self, seconds: float) -> None:
        """Nothing."""


# -- the live engine and replay see the same ------------------------------------------------------------------------


class Spy(Policy):
    """Keeps what another policy looks at and decides."""

    name = "spy"

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.seen: list[tuple[object, ...]] = []

    def choose(self, situations: Sequence[Situation], cost: CostModel) -> list[Choice]:
        choices = self.inner.choose(situations, cost)
        for situation, choice in zip(situations, choices, strict=True):
            facts: list[object] = [situation.room, situation.context, choice.arm, choice.length]
            if situation.cache is not None:
                facts.append(state_features(situation.history, situation.cache).tobytes())
                facts.append(token_features(situation.history, situation.cache).tobytes())
            self.seen.append(tuple(facts))
        return choices

    def observe(self, situation: Situation, choice: Choice, accepted: int) -> None:
        self.seen.append(("observed", choice.arm, choice.length, accepted))
        self.inner.observe(situation, choice, accepted)


@pytest.mark.parametrize("name", ["plain", "cache", "match-len", "hvd"])
@pytest.mark.parametrize("max_tokens", [7, 120])
def test_replay_sees_what_the_engine_saw(name: str, max_tokens: int) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 3
    cost = FrozenCost(Surface((1, 64), (0,), np.array([[1e-2, 2e-2]])))
    llm = make_llm(FakeTarget(seed=3), policy="plain", cost=cost)
    live = Spy(make_policy(name))
    live.uses = frozenset({Arm.CACHE})  # type: ignore[misc]
    llm.engine._policies["spy"] = live
    answer = llm.generate([prompt], SamplingParams(max_tokens=max_tokens), policy="spy")[0]
    trace = Trace(
        "a",
        np.array(answer.prompt_token_ids, np.int32),
        np.array(answer.token_ids, np.int32),
        History.UNKNOWN_CLASSES,
        answer.finish_reason,
        sampling=json.dumps({"max_tokens": max_tokens}),
        steps=tuple(answer.records),
    )
    drafter = SuffixDrafter(SuffixConfig(), llm.target.spec.vocab_size, "")
    replayed = Spy(make_policy(name))
    made = list(cycles(walk(trace, drafter, 0, keep=False), replayed, cost))
    assert replayed.seen == live.seen
    assert [(c.position, c.choice.arm, c.choice.length, c.accepted, c.committed) for c in made] == [
        (r.position, r.arm, r.drafted, r.accepted, r.committed) for r in answer.records
    ]
    assert [len(c.situation.cache) if c.situation.cache else 0 for c in made] == [r.offered for r in answer.records]


@pytest.mark.model
def test_replay_makes_the_cycles_of_a_real_model(smollm2: Path) -> None:
    llm = LLM(smollm2, config=EngineConfig(record=True))
    asked = [[{"role": "user", "content": f"Count from 1 to {n}, one number a line."}] for n in (12, 20)]
    made = []
    for i, messages in enumerate(asked):
        answer = llm.chat(messages, SamplingParams(max_tokens=80), policy="cache", scope="x")[0]
        tokens = np.array(answer.prompt_token_ids, np.int32), np.array(answer.token_ids, np.int32)
        made.append(Trace(str(i), *tokens, CLASSES, answer.finish_reason, dataset="x", sampling='{"max_tokens": 80}'))
        [*_, walked] = walks(made)
        live = [(r.position, r.arm, r.drafted, r.accepted, r.context) for r in answer.records]
        again = cycles(walked, make_policy("cache"), llm.cost)
        assert [(c.position, c.choice.arm, c.choice.length, c.accepted, c.situation.context) for c in again] == live
        assert any(accepted > 0 for _, _, _, accepted, _ in live)


# -- labels ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_the_common_prefix(draft: list[int], text: list[int]) -> None:
    n = 0
    while n < min(len(draft), len(text)) and draft[n] == text[n]:
        n += 1
    assert common_prefix(np.array(draft, np.int32), np.array(text, np.int32)) == n


def test_labels_and_hits_of_a_copy() -> None:
    text = list(range(10, 40))
    trace = make_trace([*text, 1, 2], [*text[:20], 5, *text[20:]])
    [walked] = walks([trace], SuffixConfig(max_draft=8))
    assert walked.payoffs[4] == 8
    assert walked.payoffs[19] == 1, "the draft goes on with text[20], the response with 5"
    assert walked.payoffs[20] == 0
    assert walked.hits[4:20].tolist() == [1] * 16
    assert walked.hits[20] == 0
    assert len(walked) == 31


def test_a_state_is_censored_only_when_a_cut_response_ends_within_its_draft() -> None:
    for finish, expected in ((FinishReason.LENGTH, True), (FinishReason.CANCELLED, True), (FinishReason.STOP, False)):
        walked = offers(make_trace([1], [5, 6, 7], finish_reason=finish), {0: [5, 9], 1: [6, 7, 8], 2: [7]})
        assert [walked.censored(t) for t in range(3)] == [False, expected, False]


def test_responses_are_shared_within_a_data_set_only_when_asked_for() -> None:
    answer = list(range(10, 30))
    traces = [make_trace([1, 2], answer, id=str(i), dataset=d) for i, d in enumerate("xxy")]
    alone = [int(w.payoffs.max()) for w in walks(traces, shared=False)]
    together = [int(w.payoffs.max()) for w in walks(traces)]
    assert alone == [0, 0, 0]
    assert together[0] == together[2] == 0
    assert together[1] > 10


def test_a_trace_without_token_classes_is_replayed_all_the_same() -> None:
    text = np.array([*range(10, 30)] * 2, np.int32)
    [walked] = walks([Trace("a", text[:20], text[20:], History.UNKNOWN_CLASSES)])
    assert walked.payoffs.max() > 10
    assert [c.committed for c in cycles(walked, make_policy("hvd"), steep_cost())] != [1] * 20


def test_traces_of_two_tokenizers_never_serve_each_other() -> None:
    text = [1, 2, 3, 4]
    traces = [make_trace([9], text, id=t, tokenizer_fingerprint=t) for t in "ab"]
    assert all(draft is None for each in walks(traces) for draft in each.drafts)
    same = [make_trace([9], text, id=t, tokenizer_fingerprint="a") for t in "ab"]
    assert any(draft is not None for each in walks(same) for draft in each.drafts)


# -- cycles ---------------------------------------------------------------------------------------------------------


def test_a_policy_commits_the_whole_response_and_one_token_a_cycle_at_least() -> None:
    walked = offers(make_trace([1], [5, 6, 7, 8, 9]), {0: [5, 6, 0], 3: [8, 9]})
    made = list(cycles(walked, make_policy("cache"), steep_cost()))
    assert [(c.position, c.accepted, c.committed) for c in made] == [(0, 2, 3), (3, 1, 2)]
    assert sum(c.committed for c in made) == 5


def test_room_bounds_drafts_by_the_token_limit() -> None:
    trace = make_trace([5, 6, 7, 8, 9, 5], [6, 7, 8], sampling='{"max_tokens": 3}')
    [walked] = walks([trace])
    made = list(cycles(walked, make_policy("cache"), steep_cost()))
    assert [(c.situation.room, c.choice.length, c.committed) for c in made] == [(2, 2, 3)]
    assert walked.drafts[2] is None


def test_a_huge_token_limit_is_no_limit() -> None:
    [walked] = walks([make_trace([5, 6, 5], [6, 5, 6], sampling=json.dumps({"max_tokens": 10**400}))])
    assert len(list(cycles(walked, make_policy("cache"), steep_cost()))) > 0


@pytest.mark.parametrize("sampling", ["[]", "{", "[" * 100_000])
def test_broken_sampling_parameters_are_named(sampling: str) -> None:
    trace = make_trace([1], [5, 6], sampling=sampling)
    with pytest.raises(TraceError, match="trace a: its sampling parameters are not a JSON object"):
        list(cycles(offers(trace, {}), make_policy("plain"), steep_cost()))


# -- the simulated head ---------------------------------------------------------------------------------------------


def test_the_head_is_right_as_often_as_it_says_and_always_alike() -> None:
    trace = make_trace([1], [5] * 40_000)
    payoffs = SimulatedHead(0.75, length=4).payoffs(trace)
    expected = sum(0.75**k for k in range(1, 5))
    assert payoffs.mean() == pytest.approx(expected, abs=0.05)
    assert payoffs.max() == 4
    assert (SimulatedHead(0.75, length=4).payoffs(trace) == payoffs).all()
    assert (SimulatedHead(0.75, length=4, seed=1).payoffs(trace) != payoffs).any()
    assert SimulatedHead(0.0).payoffs(trace).max() == 0
    ahead = SimulatedHead(1.0).payoffs(trace)
    assert ahead[-5:].tolist() == [4, 4, 3, 2, 1]


def test_step_records_overrule_chance() -> None:
    steps = (StepRecord(0, 1, Arm.EAGLE3, 4, 2, 3, 5), StepRecord(3, 4, Arm.PLAIN, 0, 0, 1, 1))
    trace = make_trace([1], [5] * 8, steps=steps)
    assert SimulatedHead(1.0).payoffs(trace).tolist() == [2, 1, 0, 4, 4, 3, 2, 1]
    assert SimulatedHead(0.0).payoffs(trace).tolist() == [2, 1, 0, 0, 0, 0, 0, 0]


def test_the_head_pays_for_catching_up() -> None:
    trace = make_trace([1, 2, 3], [5] * 9)
    made = list(cycles(offers(trace, {2: [5]}), make_policy("any-match"), steep_cost(), SimulatedHead(1.0, length=1)))
    backlogs = [(c.choice.arm, c.situation.backlog) for c in made]
    assert backlogs == [
        (Arm.EAGLE3, 3),
        (Arm.CACHE, 2),
        (Arm.EAGLE3, 4),
        (Arm.EAGLE3, 2),
        (Arm.EAGLE3, 2),
    ]


@pytest.mark.parametrize(("accept", "length"), [(1.5, 4), (float("nan"), 4), (0.5, 0)])
def test_a_head_out_of_range_is_refused(accept: float, length: int) -> None:
    with pytest.raises(ConfigError):
        SimulatedHead(accept, length)


# -- the oracle -----------------------------------------------------------------------------------------------------


def least_time(walked: Walk, cost: CostModel, chained: Sequence[int]) -> float:
    """Over every sequence of choices, wasteful ones included."""
    n, prompt = len(walked), len(walked.trace.prompt)

    @memo
    def rest(t: int) -> float:
        if t == n:
            return 0.0
        context = prompt + t - 1
        draft = walked.drafts[t]
        times = [cost.verify(1, context) + rest(t + 1)]
        for k in range(1, (len(draft) if draft is not None else 0) + 1):
            accepted = min(k, int(walked.payoffs[t]), n - t - 1)
            times.append(cost.verify(k + 1, context) + rest(t + accepted + 1))
        for k in range(1, 4):
            accepted = min(k, chained[t], n - t - 1)
            times.append(cost.verify(k + 1, context) + cost.eagle3(k, 1, context) + rest(t + accepted + 1))
        return min(times)

    return rest(0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_oracle_takes_the_least_time(seed: int, with_head: bool) -> None:
    rng = np.random.default_rng(seed)
    response = rng.integers(0, 2, 14).tolist()
    drafts = {t: rng.integers(0, 2, rng.integers(1, 7)).tolist() for t in range(14) if rng.random() < 0.7}
    walked, cost = offers(make_trace([1], response), drafts), steep_cost()
    head = SimulatedHead(0.7, length=3) if with_head else None
    chained = head.payoffs(walked.trace).tolist() if head else [0] * 14
    best = Totals()
    oracle(walked, cost, head, best)
    if with_head:
        assert best.seconds == pytest.approx(least_time(walked, cost, chained))
    else:
        no_head = CostModel(cost._verify, min_width=2)
        assert best.seconds == pytest.approx(least_time(walked, no_head, chained))
    assert best.tokens == 14
    assert all(arm.accepted == arm.drafted for arm in best.arms.values())
    for name in ("plain", "cache", "any-match", "match-len:2", "hvd"):
        played = Totals()
        play(walked, make_policy(name), cost, head, played)
        assert played.tokens == 14
        assert played.seconds >= best.seconds - 1e-9


# -- the report -----------------------------------------------------------------------------------------------------


def repetitive(rng: np.random.Generator, length: int) -> list[int]:
    """Text out of a few phrases."""
    phrases = [rng.integers(3, 60, 12).tolist() for _ in range(4)]
    return [token for i in rng.integers(0, 4, length // 12 + 1) for token in phrases[i]][:length]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with TraceWriter(tmp_path / "traces", CLASSES) as writer:
        for i in range(6):
            text = repetitive(rng, 150)
            writer.add(make_trace(text[:50], text[50:], id=f"g{i}#x", dataset="xy"[i % 2]))
        writer.add(make_trace([1, 2, 3], [*repetitive(rng, 60), *[7, 8] * 40], id="loop", dataset="y"))
        writer.add(make_trace([1], [], id="empty"))
    return tmp_path / "traces"


def test_the_report_adds_up(traces: Path) -> None:
    seen: list[tuple[int, int]] = []
    names = ["cache", "hvd", "cache", ORACLE]
    report = replay_report(traces, names, steep_cost(), progress=lambda d, t: seen.append((d, t)))
    assert [p.name for p in report.policies] == ["plain", "cache", "hvd", "oracle"]
    assert (report.traces, report.looped, report.tokens) == (7, 1, 662)
    assert seen[-1] == (662, 662)
    plain, cache, _, best = report.policies
    for policy in report.policies:
        assert policy.total.tokens == 662
        assert policy.total.cycles + sum(a.accepted for a in policy.total.arms.values()) == 662
        assert sum(t.cycles for t in policy.datasets.values()) == policy.total.cycles
        assert policy.total.seconds >= best.total.seconds - 1e-9
    assert plain.total.cycles == 662
    assert plain.speedup_micro == plain.speedup_macro == 1.0
    assert cache.speedup_micro == pytest.approx(plain.total.seconds / cache.total.seconds)
    each = [cache.datasets[d].seconds / best.datasets[d].seconds - 1 for d in "xy"]
    assert cache.regret_macro == pytest.approx(sum(each) / 2)
    assert best.regret_micro == best.regret_macro == 0.0
    tree = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert tree["policies"]["cache"]["datasets"]["x"]["tokens"] == 300
    assert tree["policies"]["cache"]["tokens_per_cycle"] == pytest.approx(662 / cache.total.cycles)
    kept = replay_report(traces, ["cache"], steep_cost(), keep_loops=True)
    assert (kept.tokens, kept.looped) == (740, 0)


def test_policies_are_told_what_came_of_their_choices(traces: Path) -> None:
    report = replay_report(traces, ["any-match", "hvd"], steep_cost(), head=SimulatedHead(0.9))
    any_match, hvd = report.policies[1:3]
    assert any_match.total.arms[Arm.EAGLE3].cycles > 0
    assert hvd.regret_micro < any_match.regret_micro


def test_simulating_twice_gives_the_same(traces: Path) -> None:
    first, second = (replay_report(traces, ["hvd"], steep_cost(), head=SimulatedHead(0.5)).to_dict() for _ in range(2))
    assert first == second


def test_what_cannot_be_replayed_is_one_clear_line(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", CLASSES) as writer:
        writer.add(make_trace([1], []))
    with pytest.raises(TraceError, match="hold no responses"):
        replay_report(tmp_path / "t", ["cache"], steep_cost())
    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        replay_report(tmp_path / "t", ["best"], steep_cost())


def test_simulate_counts_walks() -> None:
    walked = offers(make_trace([1], [5, 6]), {})
    sums, count = simulate([walked, walked], {"plain": make_policy("plain")}, steep_cost())
    assert count == 2
    assert sums[ORACLE][""].tokens == sums["plain"][""].tokens == 4
