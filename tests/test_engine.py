"""The engine over fakes: the step, limits, batches, cancelling, preemption, clean-up, counts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hvd.config import EngineConfig, SamplingParams
from hvd.engine.llm import LLM
from hvd.errors import ConfigError, HVDError, RequestError
from hvd.testing import FakeTarget
from hvd.types import Arm, FinishReason
from support import POLICIES, OracleDrafter, deep_cycles, make_llm, plain

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
GREEDY = SamplingParams(max_tokens=60)


def test_repetitive_text_takes_fewer_passes_and_is_the_same() -> None:
    target = FakeTarget()
    expected = plain(target, PROMPT, GREEDY).token_ids
    llm = make_llm(target, policy="cache")
    cold, warm = (llm.generate([PROMPT], GREEDY)[0] for _ in range(2))
    assert cold.token_ids == warm.token_ids == expected
    assert warm.stats.cycles < 60 / 2
    assert deep_cycles(warm) > 0
    assert warm.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tree", [False, True])
def test_every_policy_gives_the_plain_text(policy: str, tree: bool) -> None:
    target = FakeTarget(seed=1)
    expected = plain(target, PROMPT, GREEDY).token_ids
    head = OracleDrafter({tuple(PROMPT): expected}, target.spec.vocab_size, wrong_every=5, tree=tree)
    llm = make_llm(target, policy=policy, eagle3=head)
    for _ in range(2):
        answer = llm.generate([PROMPT], GREEDY)[0]
        assert answer.token_ids == expected
        assert answer.stats.committed == answer.stats.cycles + sum(a.accepted for a in answer.stats.arms.values()) == 60
        assert sum(r.committed for r in answer.records) == 60
        assert all(r.accepted <= r.drafted and r.width == r.drafted + 1 for r in answer.records)
    if policy == "eagle3":
        assert answer.stats.arms[Arm.EAGLE3].accepted > 20
    assert llm.engine.live == 0


def test_counts_name_the_arm_of_each_token() -> None:
    target = FakeTarget(seed=2)
    llm = make_llm(target, policy="cache")
    llm.generate([PROMPT], GREEDY)
    answer = llm.generate([PROMPT], GREEDY)[0]
    by_arm = [p.arm for p in answer.pieces]
    assert [p.token for p in answer.pieces] == answer.token_ids
    assert by_arm.count(Arm.CACHE) == answer.stats.arms[Arm.CACHE].accepted > 0
    assert by_arm.count(Arm.PLAIN) == answer.stats.cycles


@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_never_more_than_max_tokens_and_no_pass_wider_than_the_room(max_tokens: int) -> None:
    """K2-05."""
    target = FakeTarget(seed=3)
    params = SamplingParams(max_tokens=max_tokens)
    expected = plain(target, PROMPT, SamplingParams(max_tokens=20)).token_ids[:max_tokens]
    for head in (None, OracleDrafter({tuple(PROMPT): expected + [0] * 20}, target.spec.vocab_size)):
        llm = make_llm(target, policy="cache" if head is None else "eagle3", eagle3=head)
        llm.generate([PROMPT], SamplingParams(max_tokens=20))
        target.passes.clear()
        answer = llm.generate([PROMPT], params)[0]
        assert answer.token_ids == expected
        room = max_tokens
        for record in answer.records:
            assert record.width <= room
            room -= record.committed
        assert room == 0
        if max_tokens == 1:
            assert answer.records[0].drafted == 0


@pytest.mark.parametrize("length", range(40, 64))
def test_the_context_limit_ends_a_request_cleanly(length: int) -> None:
    """K3-04: total never passes the limit, the text is plain to the last token, eight at once."""
    target = FakeTarget(context_limit=64, seed=4)
    prompts = [[(i * 7 + j) % 50 for i in range(length)] for j in range(8)]
    endless = SamplingParams(max_tokens=None)
    llm = make_llm(target, policy="any-match")
    for _ in range(2):
        answers = llm.generate(prompts, endless)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(prompt) + len(answer.token_ids) == 64
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.token_ids == plain(target, prompt, endless).token_ids


def test_requests_that_come_and_go_do_not_disturb_each_other() -> None:
    target = FakeTarget(seed=5)
    prompts = [[(i * (k + 2)) % 60 for i in range(3 + 5 * k)] for k in range(9)]
    params = [SamplingParams(max_tokens=5 + 7 * k, temperature=0.9 * (k % 2), seed=k) for k in range(9)]
    expected = [plain(target, p, s).token_ids for p, s in zip(prompts, params, strict=True)]
    llm = make_llm(target, policy="cache", max_batch=4, prefill_chunk=8)
    streams = [
        llm.stream(p, s, policy=POLICIES[k % 2 and -1]) for k, (p, s) in enumerate(zip(prompts, params, strict=True))
    ]
    next(streams[3])
    assert streams[3].cancel()
    assert not streams[3].cancel()
    for k, stream in enumerate(streams):
        answer = stream.completion()
        if k == 3:
            assert answer.finish_reason is FinishReason.CANCELLED
            assert answer.token_ids == expected[3][: len(answer.token_ids)]
        else:
            assert answer.token_ids == expected[k]
    assert llm.engine.live == 0
    assert llm.drafters[Arm.CACHE].live_requests == 0  # type: ignore[attr-defined]


def test_a_cancelled_answer_is_not_kept_for_others() -> None:
    """K5-09, K8-01: half-finished text does not enter the shared cache."""
    target = FakeTarget(seed=6)
    llm = make_llm(target, policy="cache")
    before = llm.drafters[Arm.CACHE].bytes_used  # type: ignore[attr-defined]
    with llm.stream(PROMPT, SamplingParams(max_tokens=200)) as stream:
        for _ in range(30):
            next(stream)
    assert llm.drafters[Arm.CACHE].bytes_used == before  # type: ignore[attr-defined]
    fresh = make_llm(target, policy="cache").generate([PROMPT], GREEDY)[0]
    after = llm.generate([PROMPT], GREEDY)[0]
    assert [(r.arm, r.drafted, r.accepted) for r in after.records] == [
        (r.arm, r.drafted, r.accepted) for r in fresh.records
    ]


@pytest.mark.parametrize("after_steps", range(1, 12, 2))
def test_a_preempted_request_resumes_as_if_nothing_had_been(after_steps: int) -> None:
    """K3-11: no draft outlives a step, the KV cache is rebuilt by prefill, counts are those of an undisturbed run."""
    target = FakeTarget(seed=7)
    expected = plain(target, PROMPT, GREEDY).token_ids
    head = OracleDrafter({tuple(PROMPT): expected}, target.spec.vocab_size, wrong_every=4)
    undisturbed = make_llm(target, policy="any-match", eagle3=head).generate([PROMPT], GREEDY)[0]
    llm = make_llm(target, policy="any-match", eagle3=head)
    stream = llm.stream(PROMPT, GREEDY)
    for _ in range(after_steps):
        llm.step()
    llm.engine.preempt(stream.request)
    answer = stream.completion()
    assert answer.token_ids == expected
    assert answer.stats.arms == undisturbed.stats.arms
    assert head.hidden_rows[stream.request.key] == len(stream.request.tokens)


def test_hidden_states_reach_the_head_exactly_once_a_token() -> None:
    target = FakeTarget(seed=8)
    expected = plain(target, PROMPT, GREEDY).token_ids
    head = OracleDrafter({tuple(PROMPT): expected}, target.spec.vocab_size, wrong_every=3, tree=True)
    llm = make_llm(target, policy="any-match", eagle3=head, prefill_chunk=4)
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=40))
    while not stream.request.done:
        llm.step()
        if not stream.request.done and stream.request.behind == 1:
            assert head.hidden_rows[stream.request.key] == len(stream.request.tokens)


def test_an_error_in_one_request_leaves_the_others_alone() -> None:
    target = FakeTarget(seed=9)
    llm = make_llm(target)

    def broken(output: object, logits: np.ndarray) -> None:
        raise ArithmeticError("a user's processor failed")

    bad = llm.stream(PROMPT, GREEDY, processors=[broken])
    good = llm.stream(PROMPT, GREEDY)
    assert good.completion().token_ids == plain(target, PROMPT, GREEDY).token_ids
    with pytest.raises(ArithmeticError, match="processor failed"):
        bad.completion()
    assert llm.engine.live == 0


def test_threads_share_the_engine() -> None:
    """K5-05: many callers at once, some cancelling; nothing is left behind."""
    target = FakeTarget(seed=10)
    llm = make_llm(target, policy="cache")
    prompts = [[(i * (k + 3)) % 64 for i in range(10)] for k in range(20)]
    params = SamplingParams(max_tokens=12)
    expected = [plain(target, p, params).token_ids for p in prompts]
    wrong: list[int] = []

    def run(worker: int) -> None:
        for k in range(worker, 200, 8):
            if k % 3 == 0:
                with llm.stream(prompts[k % 20], params) as stream:
                    next(stream)
            elif llm.generate([prompts[k % 20]], params)[0].token_ids != expected[k % 20]:
                wrong.append(k)

    threads = [threading.Thread(target=run, args=(w,)) for w in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert llm.engine.live == 0
    assert llm.drafters[Arm.CACHE].live_requests == 0  # type: ignore[attr-defined]


def test_bad_requests_are_refused_in_one_clear_line() -> None:
    llm = make_llm(FakeTarget(context_limit=64))
    for prompt, message in (
        ([], "empty"),
        ([1] * 64, "64 tokens"),
        ([64], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt])
    with pytest.raises(ConfigError, match="match-len"):
        llm.generate([[1]], policy="nonsense")
    with pytest.raises(ConfigError, match="needs eagle3; give an EAGLE3 head: --eagle3, or LLM"):
        llm.generate([[1]], policy="eagle3")
    with pytest.raises(HVDError, match="no tokenizer"):
        llm.generate("text")
    assert llm.engine.live == 0
    assert llm.generate([[1]], SamplingParams(max_tokens=1))[0].stats.committed == 1


def test_an_unstarted_request_can_be_cancelled_and_an_empty_step_is_harmless() -> None:
    llm = make_llm(FakeTarget())
    stream = llm.stream(PROMPT, GREEDY)
    assert stream.cancel()
    assert stream.completion().token_ids == []
    llm.step()
    assert llm.engine.live == 0


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"threads": "2"}, "threads must be a whole number"),
        ({"threads": 2.5}, "threads must be a whole number"),
        ({"threads": True}, "threads must be a whole number"),
        ({"threads": 0}, "threads must be a whole number"),
        ({"predictor": 5}, "predictor must be a file"),
        ({"predictor": [5]}, "predictor must be a file"),
    ],
)
def test_values_of_another_kind_are_refused_in_one_line_before_a_model_is_loaded(
    option: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("no-such-model", **option)


def test_a_policy_is_a_name() -> None:
    with pytest.raises(ConfigError, match="policy must be a policy's name, got 5"):
        EngineConfig(policy=5)  # type: ignore[arg-type]
    llm = make_llm(FakeTarget())
    with pytest.raises(ConfigError, match="policy must be a policy's name, got 5"):
        llm.generate([[1, 2]], policy=5)  # type: ignore[arg-type]
