"""A head in the engine: it is fed what it should be, whatever the arms do, and the output is that of plain decoding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hvd.config import Eagle3Config, SamplingParams
from hvd.drafters.eagle3 import Eagle3Drafter
from hvd.engine.llm import Completion
from hvd.models.checkpoint import load_checkpoint
from hvd.models.eagle3 import NumpyHead
from hvd.models.eagle3_checkpoint import load_eagle3
from hvd.models.torch_target import TorchTarget
from hvd.types import Arm, Draft
from support import make_llm, plain
from tiny_head import make_head

VOCAB = 16
TREE = Eagle3Config(shape="tree", total=32, depth=3, top_k=8)
CHAIN = Eagle3Config(shape="chain", chain_length=4)
PROMPT = [5, 9, 13, 5, 9, 13, 5, 9, 2]


class Watched(Eagle3Drafter):
    """Remembers what each draft was made from: (tokens committed, draft logits behind them)."""

    def __init__(self, head: NumpyHead, config: Eagle3Config) -> None:
        super().__init__(head, config)
        self.drafts: list[tuple[int, np.ndarray]] = []

    def propose(self, key: int, room: int) -> Draft | None:
        draft = super().propose(key, room)
        output = self._requests[key].output
        if draft is not None:
            assert output is not None
            assert self._requests[key].cache.length == self._requests[key].committed - 1
            self.drafts.append((self._requests[key].committed, output.logits[-1].copy()))
        return draft


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> TorchTarget:
    path = tiny_model("llama", vocab=VOCAB, layers=8, context=512)
    return TorchTarget(load_checkpoint(path), dtype="float64", threads=1)


def head_for(target: TorchTarget, folder: Path, context: int = 512) -> NumpyHead:
    options = {"hidden": 32, "target_hidden": 32, "vocab": VOCAB, "target_vocab": VOCAB, "embedding": True}
    make_head(folder, max_position_embeddings=context, **options)
    return NumpyHead(load_eagle3(folder, target.spec, lambda name: np.empty(0)))


def accepted(result: Completion, arm: Arm) -> int:
    return sum(record.accepted for record in result.records if record.arm is arm)


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("policy", ["eagle3", "hvd", "match-len"])
@pytest.mark.parametrize("prefill_chunk", [3, 256])
def test_every_draft_is_that_of_a_fresh_head(
    target: TorchTarget, tmp_path: Path, config: Eagle3Config, policy: str, prefill_chunk: int
) -> None:
    """The states that reached the head are those of one pass over the finished text, each with the token behind it."""
    head = head_for(target, tmp_path)
    drafter = Watched(head, config)
    llm = make_llm(target, eagle3=drafter, policy=policy, prefill_chunk=prefill_chunk)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=4)
    result = llm.generate([PROMPT], params)[0]
    assert result.token_ids == plain(target, PROMPT, params).token_ids
    text = np.array([*PROMPT, *result.token_ids], np.int32)
    states = target.hidden_states(text)
    assert drafter.drafts
    for committed, logits in drafter.drafts:
        features = head.fuse(states[: committed - 1])
        fresh = head.forward(text[1:committed], features, head.open()).logits[-1]
        np.testing.assert_allclose(logits, fresh, atol=1e-4)
    if policy == "eagle3" and config is TREE:
        assert accepted(result, Arm.EAGLE3) > 10


@pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
def test_k3_06_text_longer_than_the_heads_positions(
    target: TorchTarget, tmp_path: Path, config: Eagle3Config, caplog: pytest.LogCaptureFixture
) -> None:
    """Head of 32 positions, target of 512; prompts of 20 and 40 at once, then a short one."""
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, VOCAB, count).tolist() for count in (20, 40, 8)]
    params = [SamplingParams(max_tokens=100), SamplingParams(max_tokens=100), SamplingParams(max_tokens=12)]
    drafter = Watched(head_for(target, tmp_path, context=32), config)
    llm = make_llm(target, eagle3=drafter, policy="eagle3")
    with caplog.at_level(logging.WARNING, "hvd"):
        results = llm.generate(prompts, params)
    for prompt, options, result in zip(prompts, params, results, strict=True):
        assert result.token_ids == plain(target, prompt, options).token_ids
    assert max(committed for committed, _ in drafter.drafts) <= 31
    drafted = [sum(record.drafted for record in result.records) for result in results]
    assert drafted[0] > 0
    assert drafted[1] == 0
    assert drafted[2] > 0
    assert sum("32 positions" in record.message for record in caplog.records) == 1
