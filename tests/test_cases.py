"""Faults that users met elsewhere, by the id they are filed under here; those of one room live in that room's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hvd.config import SamplingParams, SuffixConfig
from hvd.engine.llm import LLM
from hvd.errors import ModelError, UnsupportedModelError
from hvd.models.loader import load_target
from hvd.models.target import Span, Target
from hvd.testing import FakeKVCache, FakeTarget, ScriptedHead
from hvd.tokenizer import Tokenizer
from hvd.types import Arm, Draft
from hvd.verify.sampler import raw_logprobs
from support import OracleDrafter, deep_cycles, flat_cost, make_llm, plain

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PENALTIES = {
    "frequency": SamplingParams(max_tokens=64, frequency_penalty=0.8),
    "negative frequency": SamplingParams(max_tokens=64, frequency_penalty=-1.0),
    "presence": SamplingParams(max_tokens=64, presence_penalty=1.0),
    "repetition": SamplingParams(max_tokens=64, repetition_penalty=1.3),
    "all": SamplingParams(max_tokens=64, frequency_penalty=0.8, presence_penalty=1.0, repetition_penalty=1.3),
}


@pytest.fixture(scope="module")
def real(smollm2: object) -> tuple[Target, Tokenizer]:
    return load_target(str(smollm2), backend="onnx", weights="int4")


@pytest.mark.parametrize("kind", ["MambaConfig", "Mamba2Config", "FalconMambaConfig", "JambaConfig", "Zamba2Config"])
def test_k3_02_a_model_whose_state_cannot_be_cut_back_is_refused(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"is a (state-space or hybrid model|mixture of experts)"):
        load_target(tmp_path)


def test_k3_02_a_cache_that_does_not_crop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault injection: `keep` leaves rejected tokens where they are and says nothing."""
    keep = FakeKVCache.keep
    monkeypatch.setattr(FakeKVCache, "keep", lambda cache, path: keep(cache, range(cache.pending)))
    llm = make_llm(FakeTarget(), policy="cache")
    with pytest.raises(ModelError, match="can't drop rejected tokens"):
        llm.generate([PROMPT * 4], SamplingParams(max_tokens=64))


@pytest.mark.model
@pytest.mark.parametrize("name", PENALTIES)
def test_k1_01_penalties_do_not_weaken_with_better_drafts(name: str, real: tuple[Target, Tokenizer]) -> None:
    target, tokenizer = real
    prompt = tokenizer.encode("river river river river")
    expected = plain(target, prompt, PENALTIES[name]).token_ids
    llm = make_llm(target, policy="cache")
    cold, warm = (llm.generate([prompt], PENALTIES[name])[0] for _ in range(2))
    assert cold.token_ids == warm.token_ids == expected
    assert deep_cycles(warm) > 0, "void"


@pytest.mark.model
def test_k1_03_bias_holds_at_draft_places(real: tuple[Target, Tokenizer]) -> None:
    target, tokenizer = real
    prompt = tokenizer.encode("one two three one two three one two three one")
    llm = make_llm(target, policy="cache")
    free = llm.generate([prompt], SamplingParams(max_tokens=48))[0].token_ids
    banned = max(set(free), key=free.count)
    assert free.count(banned) >= 3, "void"
    assert banned not in llm.generate([prompt], SamplingParams(max_tokens=48, logit_bias={banned: -100.0}))[0].token_ids
    forced = llm.generate([prompt], SamplingParams(max_tokens=20, logit_bias={7: 100.0}, ignore_eos=True))[0]
    assert forced.token_ids == [7] * 20


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_k1_10_logprobs_are_those_of_the_raw_row_at_every_place(
    temperature: float, real: tuple[Target, Tokenizer]
) -> None:
    target, tokenizer = real
    llm = make_llm(target, policy="cache")
    prompts = [tokenizer.encode(f"{w} and {w} and {w} and") for w in ("red", "green", "blue", "black")]
    params = SamplingParams(max_tokens=40, logprobs=5, temperature=temperature, seed=5, logit_bias={11: -2.0})
    for _ in range(2):
        answers = llm.generate(prompts, params)
    assert sum(a.stats.arms[Arm.CACHE].accepted for a in answers) >= 80, "void: too few drafts were accepted"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.logprobs) == len(answer.token_ids)
        cache = target.open()
        text = np.asarray(prompt + answer.token_ids, np.int32)
        rows = target.forward([Span(cache, text, rows="all")])[0].logits[len(prompt) - 1 : -1]
        for row, token, entry in zip(rows, answer.token_ids, answer.logprobs, strict=True):
            assert entry == raw_logprobs(row, token, 5), "bit for bit: teacher-forced in one pass"
        cache.close()


def _wrong(text: list[int], answer: list[int], alternate: bool) -> Draft:
    """Always the same wrong block; or right and wrong in turn."""
    done = len(text) - len(PROMPT)
    right = answer[done : done + 4]
    if alternate and done % 2:
        return Draft.chain(np.asarray(right, np.int32), Arm.EAGLE3)
    wrong = [(right[0] + 1) % 64 if right else 0, 7, 7, 7]
    return Draft.chain(np.asarray(wrong, np.int32), Arm.EAGLE3)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("spread", [3.0, 1e-6])
def test_k5_03_every_cycle_commits_whatever_is_drafted(alternate: bool, spread: float) -> None:
    target = FakeTarget(seed=12, spread=spread)
    answer = plain(target, PROMPT, SamplingParams(max_tokens=50)).token_ids
    head = ScriptedHead(lambda text, room: _wrong(list(text), answer, alternate).first(room))
    llm = make_llm(target, policy="eagle3", eagle3=head)
    result = llm.generate([PROMPT], SamplingParams(max_tokens=50))[0]
    assert result.token_ids == answer
    assert result.stats.cycles <= 50
    assert all(record.committed >= 1 for record in result.records)


@pytest.mark.parametrize("bad", [-1, 64, 69, 2**31 - 1])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_k4_09_bad_draft_ids_never_come_out(bad: int, place: int, temperature: float) -> None:
    target = FakeTarget(seed=13)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    answer = plain(target, PROMPT, params).token_ids

    def script(text: object, room: int) -> Draft:
        done = len(list(text)) - len(PROMPT)  # type: ignore[call-overload]
        tokens = (answer + [0] * 4)[done : done + 4]
        tokens[place] = bad
        return Draft.chain(np.asarray(tokens, np.int32), Arm.EAGLE3)

    result = make_llm(target, policy="eagle3", eagle3=ScriptedHead(script)).generate([PROMPT], params)[0]
    assert result.token_ids == answer
    assert all(record.drafted <= place for record in result.records)


def test_k5_09_the_same_prompt_gives_the_same_ids_whatever_came_before() -> None:
    target = FakeTarget(seed=14)
    params = SamplingParams(max_tokens=40)
    llm = make_llm(target, policy="cache")
    first = llm.generate([PROMPT], params)[0].token_ids
    rng = np.random.default_rng(0)
    for i in range(100):
        prompt = PROMPT[: int(rng.integers(1, 11))] + rng.integers(0, 64, 5).tolist()
        with llm.stream(prompt, SamplingParams(max_tokens=20, temperature=1.0, seed=i)) as stream:
            for _ in range(5 if i % 3 == 0 else 20):
                next(stream)
    assert llm.generate([PROMPT], params)[0].token_ids == first == llm.generate([PROMPT], params)[0].token_ids
    assert llm.engine.live == 0


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_k7_01_text_without_matches_costs_hardly_more_than_plain(batch: int, temperature: float) -> None:
    """Machine-free: modelled seconds of all passes, from the widths that were really run, on text like white noise."""
    target = FakeTarget(order=6, vocab_size=512, seed=15, spread=0.3)
    cost = flat_cost(eagle3=True)
    prompts = [[(i * 31 + j * 7) % 512 for i in range(20)] for j in range(batch)]
    params = [SamplingParams(max_tokens=60, temperature=temperature, seed=j) for j in range(batch)]
    seconds = {}
    for policy in ("plain", "hvd", "cache", "eagle3"):
        head = ScriptedHead(lambda text, room: Draft.chain(np.full(min(room, 4), 1, np.int32), Arm.EAGLE3))
        llm = make_llm(target, policy=policy, eagle3=head, max_batch=16, cost=flat_cost(eagle3=True))
        target.passes.clear()
        answers = llm.generate(prompts, params)
        drafting = sum(cost.eagle3(r.drafted, 1, r.context) for a in answers for r in a.records if r.arm is Arm.EAGLE3)
        seconds[policy] = sum(cost.verify(sum(widths), 0) for widths in target.passes) + drafting
    assert seconds["hvd"] <= 1.05 * seconds["plain"]
    assert seconds["hvd"] <= 1.05 * min(seconds.values())


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_k7_04_copying_does_not_get_worse_with_context(length: int) -> None:
    target = FakeTarget(order=3, vocab_size=64, context_limit=8192, seed=16)
    answer = plain(target, PROMPT, SamplingParams(max_tokens=64)).token_ids
    filler = np.random.default_rng(1).integers(0, 64, length).tolist()
    prompt = [*answer, *filler, *PROMPT]
    expected = plain(target, prompt, SamplingParams(max_tokens=64)).token_ids
    llm = make_llm(target, policy="hvd", suffix=SuffixConfig(shared=False))
    result = llm.generate([prompt], SamplingParams(max_tokens=64))[0]
    assert result.token_ids == expected == answer
    assert result.stats.tokens_per_cycle > 3.0


def test_k7_04_no_drift_over_many_requests() -> None:
    target = FakeTarget(seed=17)
    llm = make_llm(target, policy="hvd")
    params = SamplingParams(max_tokens=24)
    share = []
    for i in range(400):
        result = llm.generate([[(i * 7 + j) % 64 for j in range(8)]], params)[0]
        share.append(sum(arm.accepted for arm in result.stats.arms.values()) / 24)
    assert np.mean(share[-100:]) >= np.mean(share[:100]) - 0.05


def test_k7_06_counts_are_numbers_before_and_after_everything(tiny_model: Callable[..., object]) -> None:
    target = FakeTarget(seed=18)
    llm = make_llm(target, policy="cache")
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=5))
    assert stream.request.stats.tokens_per_cycle == 0.0
    assert stream.request.stats.verify_width_mean == 0.0
    stream.cancel()
    cancelled = stream.completion()
    assert cancelled.stats.committed == cancelled.stats.cycles == 0
    head = OracleDrafter({tuple(PROMPT): [1, 2]}, 64)
    undrafted = make_llm(target, policy="eagle3", eagle3=head).generate([PROMPT], SamplingParams(max_tokens=5))[0]
    assert undrafted.stats.committed == undrafted.stats.cycles + sum(a.accepted for a in undrafted.stats.arms.values())


def test_an_llm_without_any_drafter_is_plain() -> None:
    target = FakeTarget(seed=19)
    llm = LLM.from_parts(target, None, {}, flat_cost())
    expected = plain(target, PROMPT, SamplingParams(max_tokens=20)).token_ids
    assert llm.generate([PROMPT], SamplingParams(max_tokens=20))[0].token_ids == expected
