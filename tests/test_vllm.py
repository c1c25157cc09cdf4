"""vLLM itself: it loads a head made here and drafts the same tokens, and as a peer it really decodes.

Skipped where vLLM is not installed. Everything is in float32, where the two programs agree but for the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvd.bench import peers_vllm
from hvd.bench.peers import PeerSetup, cut_at_stop, open_peers
from hvd.config import Eagle3Config, SamplingParams
from hvd.drafters.eagle3 import Eagle3Drafter
from hvd.models.checkpoint import Checkpoint, load_checkpoint
from hvd.models.eagle3 import HeadOutput, NumpyHead
from hvd.models.eagle3_checkpoint import load_eagle3
from hvd.models.torch_target import TorchTarget
from hvd.traces.schema import Trace
from hvd.training.eagle3.fit import FitOptions
from hvd.training.eagle3.train import Eagle3Options, train_eagle3
from hvd.types import Draft, Float32Array
from support import plain

vllm = pytest.importorskip("vllm")

V = 128
CONTEXT = 256
MAX_TOKENS = 32
EOS = list(range(16))
"""The checkpoint's own, at which nothing here is to end."""
LENGTH = 4
"""Of a drafted chain."""
TIE = 1e-4
"""Two logits nearer than this may change places from one program to the other."""
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PROMPTS = [np.random.default_rng(size).integers(V, size=size).tolist() for size in (1, 2, 3, 7, 12, 33, 60, 150)]


@pytest.fixture(scope="module", autouse=True)
def _quiet_vllm() -> Iterator[None]:
    """A vLLM of this process that leaves its cores and threads alone; sizes for a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setattr(torch, "set_num_threads", torch.set_num_threads)  # vLLM puts another in its place
        yield


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    """Its weights are float16 on disk, like a head's copy of the embedding: nothing is rounded on the way."""
    return tiny_model(
        "llama", layers=7, hidden=64, heads=2, kv_heads=1, intermediate=96, vocab=V, context=CONTEXT, rope=ROPE,
        spread=1.0, dtype="float16", eos=EOS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return load_checkpoint(model)


@pytest.fixture(scope="module")
def target(checkpoint: Checkpoint) -> TorchTarget:
    return TorchTarget(checkpoint, dtype="float32")


@pytest.fixture(scope="module")
def answers(target: TorchTarget) -> list[list[int]]:
    """Plain decoding's."""
    return [plain(target, prompt, SamplingParams(max_tokens=MAX_TOKENS)).token_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def head(
    checkpoint: Checkpoint, target: TorchTarget, answers: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Trained on the very answers that it will draft, so that much is accepted; with a part of the vocabulary.

    Every answer comes under two names: then the held-out one, by which the best weights are chosen, is known too.
    """
    traces = [
        Trace(f"{name}/{number}#turn0", np.array(prompt, np.int32), np.array(answer, np.int32), np.zeros(0, np.uint8))
        for name in "ab"
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))
    ]
    fit = FitOptions(length=CONTEXT, epochs=15, patience=15, precision="float32", learning_rate=1e-2)
    options = Eagle3Options(vocab=96, hold_out=0.1, fit=fit)
    return train_eagle3(checkpoint, target, traces, tmp_path_factory.mktemp("eagle3"), options).folder


# -- a head made here ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafting:
    """One call of vLLM's drafter: behind `length` committed tokens, the last of them `token`."""

    length: int
    token: int
    draft: list[int]


@dataclass(frozen=True)
class Answer:
    """What vLLM made of a prompt, and all that it drafted on the way."""

    text: list[int]
    tokens: list[int]
    draftings: list[Drafting]


@pytest.fixture(scope="module")
def in_vllm(model: Path, head: Path) -> list[Answer]:
    """The prompts one after the other through `method: eagle3`.

    Each in one chunk: vLLM 0.32 has the head eat a wrong token at the end of every chunk of a prompt but the last.
    """
    from vllm.v1.spec_decode.eagle import EagleProposer

    seen: list[Drafting] = []
    propose = EagleProposer.propose

    def noting(proposer: Any, *args: Any, **given: Any) -> Any:
        # `target_positions` are of the tokens whose states came in; one stands behind the last of them already.
        last = -1 if given["token_indices_to_sample"] is None else int(given["token_indices_to_sample"][0])
        length = int(given["target_positions"][last]) + 2
        drafts = propose(proposer, *args, **given)
        seen.append(Drafting(length, int(given["next_token_ids"][0]), drafts[0].tolist()))
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleProposer, "propose", noting)
        llm = vllm.LLM(
            str(model),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=CONTEXT,
            max_num_seqs=1,
            max_num_batched_tokens=CONTEXT,
            enable_prefix_caching=False,
            speculative_config={"method": "eagle3", "model": str(head), "num_speculative_tokens": LENGTH},
        )
        answers = []
        for prompt in PROMPTS:
            seen.clear()
            params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
            [result] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            tokens = list(result.outputs[0].token_ids)
            answers.append(Answer(prompt + tokens, tokens, list(seen)))
    return answers


class Noting(NumpyHead):
    """Keeps the logits behind which it drafts."""

    def forward(self, *args: Any, **options: Any) -> HeadOutput:
        output = super().forward(*args, **options)
        self.seen: list[Float32Array] = [*getattr(self, "seen", []), output.logits[-1]]
        return output


def ours(drafter: Eagle3Drafter, target: TorchTarget, text: Sequence[int], lengths: Sequence[int]) -> Iterator[Draft]:
    """What our drafter makes behind the first `lengths` tokens of a text, in the order asked."""
    states = target.hidden_states(np.array(text, np.int32))
    before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])  # row i is of the token in front of token i
    drafter.open(0)
    done = 0
    for length in lengths:
        if length > done:
            drafter.observe(0, np.array(text[done:length], np.int32), before[done:length], prompt=False)
            done = length
        draft = drafter.propose(0, LENGTH)
        assert draft is not None
        yield draft
    drafter.close(0, keep=False)


def test_a_head_drafts_the_same_tokens_in_vllm_as_here(
    checkpoint: Checkpoint, target: TorchTarget, head: Path, answers: list[list[int]], in_vllm: list[Answer]
) -> None:
    noting = Noting(load_eagle3(head, target.spec, checkpoint.tensor))
    drafter = Eagle3Drafter(noting, Eagle3Config(chain_length=LENGTH, min_prob=0.0), target.spec.aux_layers)
    assert [answer.tokens for answer in in_vllm] == answers
    same, ties, accepted, drafts = 0, 0, 0, set()
    for answer in in_vllm:
        # The last call may stand behind tokens that are cut off, past the most that were asked for.
        draftings = [one for one in answer.draftings if one.length <= len(answer.text)]
        found = ours(drafter, target, answer.text, [one.length for one in draftings])
        for theirs, draft in zip(draftings, found, strict=True):
            assert answer.text[theirs.length - 1] == theirs.token
            tokens = draft.tokens.tolist()
            drafts.add(tuple(tokens))
            differs = next((at for at in range(LENGTH) if tokens[at] != theirs.draft[at]), None)
            if differs is None:
                same += 1
                accepted += common(tokens, answer.text[theirs.length :])
                continue
            second, first = np.sort(noting.seen[differs - LENGTH])[-2:]
            assert first - second < TIE, f"behind {theirs.length} tokens: {theirs.draft} in vLLM, {tokens} here"
            ties += 1
    assert same >= 60
    assert ties <= same // 20
    assert len(drafts) >= 20
    assert accepted >= 20


def common(draft: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (one, other) in enumerate(zip(draft, text, strict=False)) if one != other), len(draft))


# -- vLLM as a peer ------------------------------------------------------------------------------------------------


def test_every_method_of_the_peer_decodes_as_we_do(
    model: Path, head: Path, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the end or to one of our stop ids, whatever the checkpoint's are. An engine is a process, as in a bench."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    options = peers_vllm.engine_options
    eager = {"enforce_eager": True}  # compiling takes minutes
    monkeypatch.setattr(peers_vllm, "engine_options", lambda *given: options(*given) | eager)
    stop = (answers[0][9],)
    wanted = [cut_at_stop(answer, stop) for answer in answers]
    assert {reason for _, reason in wanted} == {"stop", "length"}
    assert any(token in EOS for tokens, _ in wanted for token in tokens[:-1])
    methods, missing = open_peers(["vllm"], PeerSetup(str(model), 1, stop, CONTEXT, eagle3=str(head)))
    assert set(missing) <= {"vllm-suffix"}
    if missing:
        assert "arctic-inference" in missing["vllm-suffix"]
    assert [method.name for method in methods] == [name for name in peers_vllm.METHODS if name not in missing]
    for method in methods:
        for prompt, (tokens, reason) in zip(PROMPTS, wanted, strict=True):
            found = method.decode(prompt, MAX_TOKENS)
            assert (found.tokens, found.finish_reason) == (tokens, reason), method.name
            assert found.decoded == len(tokens) - 1
            assert 0 < found.decode_seconds < found.wall_seconds
            assert 0 < found.prefill_seconds < found.wall_seconds


def test_a_gguf_file_is_one_missing_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    methods, missing = open_peers(["vllm"], PeerSetup(str(tmp_path / "model.gguf"), 1, (), CONTEXT))
    assert not methods
    assert list(missing) == ["vllm"]
    assert "GGUF" in missing["vllm"]
