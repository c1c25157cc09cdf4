"""Losslessness on real models through ONNX Runtime: token ids equal to plain decoding, without exception.

104 prompts for every model and weight format: copies, edits and questions over this repository's own text, greedy and
seeded in turn. Each is decoded plainly, with `hvd`, and with whole cache drafts or with trees full of wrong branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.models.loader import load_target
from hvd.models.target import Target
from hvd.tokenizer import Tokenizer
from support import OracleDrafter, make_llm, plain

PROMPTS = 104
TOKENS = 12
TASKS = (
    "Repeat this text word for word:\n",
    "Correct what is wrong in this text and give the whole text back:\n",
    "What does this text say? Answer in one sentence.\n",
    "Write this as a JSON list of its lines:\n",
)


def prompts(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Passages of the project's own sources and documents under changing tasks."""
    root = Path(__file__).parent.parent
    text = "\n".join(p.read_text() for p in sorted([*root.glob("docs/*.md"), *root.glob("src/hvd/*.py")]))
    lines = [line for line in text.splitlines() if line.strip()]
    step = (len(lines) - 12) // PROMPTS
    for i in range(PROMPTS):
        passage = "\n".join(lines[i * step : i * step + 1 + i % 3])
        message = {"role": "user", "content": TASKS[i % len(TASKS)] + passage}
        yield tokenizer.encode(tokenizer.apply_chat_template([message]), add_special_tokens=False)


def params(i: int) -> SamplingParams:
    """Greedy, seeded, greedy with penalties, seeded with filters."""
    return (
        SamplingParams(max_tokens=TOKENS),
        SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=i),
        SamplingParams(max_tokens=TOKENS, repetition_penalty=1.2, frequency_penalty=0.3),
        SamplingParams(max_tokens=TOKENS, temperature=1.0, top_p=0.9, top_k=40, seed=i),
    )[i // len(TASKS) % 4]


def check(target: Target, tokenizer: Tokenizer, ids: list[int], i: int, llm: LLM) -> int:
    """One prompt plainly, with `hvd`, and with the whole cache draft or, each fourth, a tree; draft tokens accepted."""
    expected = plain(target, ids, params(i), tokenizer).token_ids
    answers = [llm.generate([ids], params(i), policy="hvd")[0]]
    if i % 4:
        answers.append(llm.generate([ids], params(i), policy="cache")[0])
    else:
        tree = OracleDrafter({tuple(ids): expected}, target.spec.vocab_size, wrong_every=7, tree=True)
        bushy = make_llm(target, tokenizer, eagle3=tree, policy="eagle3", prefill_chunk=24)
        answers.append(bushy.generate([ids], params(i))[0])
    for answer in answers:
        assert answer.token_ids == expected, f"prompt {i}"
    return sum(arm.accepted for answer in answers for arm in answer.stats.arms.values())


@pytest.mark.model
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("model", ["smollm2", "qwen_coder"])
def test_a_hundred_prompts_are_decoded_as_plain(model: str, weights: str, request: pytest.FixtureRequest) -> None:
    target, tokenizer = load_target(request.getfixturevalue(model), backend="onnx", weights=weights)
    llm = make_llm(target, tokenizer)
    accepted = sum(check(target, tokenizer, ids, i, llm) for i, ids in enumerate(prompts(tokenizer)))
    assert accepted > 5 * PROMPTS, "void: hardly any draft was accepted"
