"""Losslessness on real arithmetic: tiny float64 models of every family, every policy, both arms, chain, tree, batches,
greedy and seeded sampling with all processors: token ids equal to plain decoding, and plain equal to transformers'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy import stats

from hvd.config import Eagle3Config, SamplingParams, SuffixConfig
from hvd.models.checkpoint import load_checkpoint
from hvd.models.torch_target import TorchTarget
from hvd.testing import FakeTarget
from support import POLICIES, OracleDrafter, deep_cycles, make_llm, plain

PROMPT = [5, 9, 13, 5, 9, 13, 5, 9, 2, 40, 41, 42, 5, 9]
BASE = {"max_tokens": 48}
SAMPLINGS = {
    "greedy": SamplingParams(**BASE),
    "seeded": SamplingParams(**BASE, temperature=1.2, seed=42),
    "filters": SamplingParams(**BASE, temperature=1.5, seed=1, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(**BASE, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.8),
    "negative": SamplingParams(**BASE, frequency_penalty=-1.0),
    "masks": SamplingParams(
        **BASE, temperature=0.8, seed=9, logit_bias={7: 3.0, 8: -100.0}, bad_words=((3,), (5, 9)), min_tokens=20,
        stop_token_ids=(11, 12, 13), logprobs=3,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target_of(tiny_model: Callable[..., Path]) -> Callable[..., TorchTarget]:
    made: dict[str, TorchTarget] = {}

    def get(family: str, **options: object) -> TorchTarget:
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = TorchTarget(load_checkpoint(tiny_model(family, **options)), dtype="float64", threads=1)
        return made[key]

    return get


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_plain_is_what_transformers_writes(family: str, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model(family)
    target = TorchTarget(load_checkpoint(path), dtype="float64", threads=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        written = model.generate(torch.tensor([PROMPT]), max_new_tokens=48, do_sample=False)[0, len(PROMPT) :].tolist()
    assert plain(target, PROMPT, SAMPLINGS["greedy"]).token_ids == written


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_policy_and_shape_gives_the_plain_ids(
    family: str, sampling: str, target_of: Callable[..., TorchTarget]
) -> None:
    target, params = target_of(family), SAMPLINGS[sampling]
    expected = plain(target, PROMPT, params)
    deep = 0
    for policy, tree in itertools.product(POLICIES, (False, True)):
        head = OracleDrafter({tuple(PROMPT): expected.token_ids}, target.spec.vocab_size, wrong_every=6, tree=tree)
        llm = make_llm(target, policy=policy, eagle3=head, prefill_chunk=5)
        for _ in range(2):  # cold, then with the whole answer in the cache
            answer = llm.generate([PROMPT], params)[0]
            assert answer.token_ids == expected.token_ids, (policy, tree)
            assert answer.finish_reason == expected.finish_reason
            for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
                assert ours.token == theirs.token
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
                assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
            deep += deep_cycles(answer)
    assert deep > 20, "void: hardly any draft was accepted"


@pytest.mark.parametrize("policy", ["cache", "hvd", "any-match"])
def test_a_mixed_batch_gives_what_each_gives_alone(policy: str, target_of: Callable[..., TorchTarget]) -> None:
    """K1-07: the same seed alone, among seven others, cold and warm."""
    target = target_of("qwen3")
    prompts = [PROMPT[: 3 + k] + [k] * k for k in range(8)]
    params = [
        *SAMPLINGS.values(),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=30, temperature=1.5, seed=42),
    ]
    expected = [plain(target, p, s).token_ids for p, s in zip(prompts, params, strict=True)]
    heads = OracleDrafter({tuple(p): e for p, e in zip(prompts, expected, strict=True)}, 64, wrong_every=5, tree=True)
    llm = make_llm(target, policy=policy, eagle3=heads, max_batch=5, prefill_chunk=4)
    for _ in range(3):
        assert [a.token_ids for a in llm.generate(prompts, params)] == expected
    assert heads.live == 0


def test_a_seed_is_kept_and_other_seeds_differ(target_of: Callable[..., TorchTarget]) -> None:
    llm = make_llm(target_of("llama"), policy="cache")

    def text(seed: int) -> tuple[int, ...]:
        return tuple(llm.generate([PROMPT], SamplingParams(max_tokens=32, temperature=1.5, seed=seed))[0].token_ids)

    assert len({text(42) for _ in range(5)}) == 1
    assert len({text(seed) for seed in range(1, 6)}) == 5
    unseeded = SamplingParams(max_tokens=32, temperature=1.5)
    assert len({tuple(llm.generate([PROMPT], unseeded)[0].token_ids) for _ in range(5)}) == 5


@pytest.mark.parametrize("place", range(0, 24))
@pytest.mark.parametrize("shift", [1, 7])
def test_a_draft_wrong_at_one_place_is_left_there(
    place: int, shift: int, target_of: Callable[..., TorchTarget]
) -> None:
    """M4, M7: the prompt holds the model's own continuation with one token changed, at every place in turn."""
    target = target_of("llama")
    seed_prompt = PROMPT
    wrong = plain(target, seed_prompt, SAMPLINGS["greedy"]).token_ids[:24]
    wrong[place] = (wrong[place] + shift) % 64
    prompt = seed_prompt + wrong + seed_prompt
    expected = plain(target, prompt, SAMPLINGS["greedy"]).token_ids
    assert make_llm(target, policy="cache").generate([prompt], SAMPLINGS["greedy"])[0].token_ids == expected


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("warm_with", ["likeliest", "least likely"])
def test_the_distribution_is_exact_whatever_is_drafted(temperature: float, warm_with: str) -> None:
    """K1-06, M6: two-token replies of a 16-token vocabulary, no seed, the cache always offers a fixed draft; G-test."""
    target = FakeTarget(vocab_size=16, order=2, spread=1.0, seed=3)
    joint = _joint(target, [2, 3], temperature)
    order = np.argsort(-joint.ravel())
    pick = int(order[0] if warm_with == "likeliest" else order[-1])
    prompt = [1, 2, 3, pick // 16, pick % 16, 1, 2, 3]
    llm = make_llm(target, policy="cache", suffix=SuffixConfig(shared=False), max_batch=256)
    params = SamplingParams(max_tokens=3, temperature=temperature)
    counts = np.zeros((16, 16))
    for _ in range(80):
        for answer in llm.generate([prompt] * 256, params):
            counts[answer.token_ids[0], answer.token_ids[1]] += 1
            assert answer.records[0].drafted == 2, "void: a draft must be on offer in every request"
    total = counts.sum()
    likely = joint * total >= 5
    seen, want = counts[likely], joint[likely] * total
    if not likely.all():
        seen, want = np.append(seen, counts[~likely].sum()), np.append(want, joint[~likely].sum() * total)
    assert total >= 20_000
    assert stats.power_divergence(seen, want * seen.sum() / want.sum(), lambda_="log-likelihood").pvalue > 1e-4
    assert (counts.sum(axis=1)[joint.sum(axis=1) > 0.01] > 0).all()


def _joint(target: FakeTarget, prompt: list[int], temperature: float) -> np.ndarray:
    """P(first, second) from the target's own logits, by enumeration."""

    def distribution(tokens: list[int]) -> np.ndarray:
        row = target.logits(tokens).astype(np.float64)
        weights = np.exp((row - row.max()) / temperature)
        return weights / weights.sum()

    first = distribution(prompt)
    return np.stack([first[i] * distribution([*prompt, i]) for i in range(16)])


def test_eagle3_config_is_checked() -> None:
    with pytest.raises(ValueError, match="shape"):
        Eagle3Config(shape="bush")
