"""What the engine's tests share: an engine over small parts, drafters that know the answer, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvd.config import EngineConfig, SamplingParams, SuffixConfig
from hvd.drafters.base import Drafter
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.llm import LLM, Completion
from hvd.models.target import Target
from hvd.payoff.cost import CostModel, Surface
from hvd.payoff.features import STATE_NAMES
from hvd.payoff.predictor import MLPWeights, Predictor, ScalarPredictor
from hvd.tokenizer import Tokenizer
from hvd.types import Arm, Draft, Float32Array, Int32Array

POLICIES = ("plain", "cache", "eagle3", "any-match", "match-len", "score", "hvd-paper", "hvd")


def paper_predictor() -> ScalarPredictor:
    """An untrained scalar predictor: it says yes and no as it happens, which losslessness must bear."""
    rng = np.random.default_rng(0)
    inputs = len(STATE_NAMES)
    weights = MLPWeights(
        (
            (rng.normal(0, 0.3, (inputs, 8)).astype(np.float32), np.zeros(8, np.float32)),
            (rng.normal(0, 4, (8, 1)).astype(np.float32), np.full(1, 6, np.float32)),
        ),
        np.zeros(inputs, np.float32),
        np.ones(inputs, np.float32),
    )
    return ScalarPredictor(weights)


def flat_cost(*, eagle3: bool = True, shared_passes: bool = True, min_width: int = 1) -> CostModel:
    """Costs as a GPU has them: nearly flat in width."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    seconds = np.asarray([[1e-2 + 1e-4 * n for n in sizes]])
    drafting = Surface(sizes, (0,), np.asarray([[1e-3 * n for n in sizes]])) if eagle3 else None
    return CostModel(Surface(sizes, (0,), seconds), eagle3=drafting, shared_passes=shared_passes, min_width=min_width)


def make_llm(
    target: Target,
    tokenizer: Tokenizer | None = None,
    *,
    suffix: SuffixConfig | None = None,
    eagle3: Drafter | None = None,
    policy: str = "hvd",
    max_batch: int = 16,
    prefill_chunk: int = 256,
    predictors: Sequence[Predictor] = (),
    cost: CostModel | None = None,
) -> LLM:
    """An LLM over a target, with the suffix cache and, if given, an EAGLE3 arm."""
    suffix = suffix or SuffixConfig()
    fingerprint = tokenizer.fingerprint if tokenizer is not None else "none"
    drafters: dict[Arm, Drafter] = {Arm.CACHE: SuffixDrafter(suffix, target.spec.vocab_size, fingerprint)}
    if eagle3 is not None:
        drafters[Arm.EAGLE3] = eagle3
    config = EngineConfig(suffix=suffix, policy=policy, record=True, max_batch=max_batch, prefill_chunk=prefill_chunk)
    return LLM.from_parts(target, tokenizer, drafters, cost or flat_cost(), config, [paper_predictor(), *predictors])


def plain(
    target: Target, prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None = None
) -> Completion:
    """The same prompt with no drafter at all: the reference."""
    llm = LLM.from_parts(target, tokenizer, {}, flat_cost(), EngineConfig(policy="plain"))
    return llm.generate([list(prompt)], params)[0]


class OracleDrafter(Drafter):
    """Stands for a head: drafts what is known to follow, with wrong branches and wrong tokens strewn in.

    answers      prompt -> the output to draft from
    wrong_every  every n-th draft token is replaced by a wrong one (0 = none)
    tree         hang a wrong sibling in front of every node
    """

    arm = Arm.EAGLE3

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        vocab_size: int,
        *,
        wrong_every: int = 0,
        tree: bool = False,
    ) -> None:
        self._texts = [[*prompt, *answer] for prompt, answer in answers.items()]
        self._vocab = vocab_size
        self._wrong = wrong_every
        self._tree = tree
        self._seen: dict[int, list[int]] = {}
        self.hidden_rows: dict[int, int] = {}

    def open(self, key: int, scope: str = "") -> None:
        self._seen[key] = []
        self.hidden_rows[key] = 0

    def observe(self, key: int, tokens: Int32Array, hidden: Float32Array | None, *, prompt: bool) -> None:
        assert hidden is not None, "wants_hidden says that hidden states are needed"
        assert len(hidden) == len(tokens)
        self._seen[key].extend(tokens.tolist())
        self.hidden_rows[key] += len(hidden)

    def propose(self, key: int, room: int) -> Draft | None:
        seen = self._seen[key]
        text = next((t for t in self._texts if t[: len(seen)] == seen and len(t) > len(seen)), None)
        if text is None:
            return None
        chain = text[len(seen) : len(seen) + room]
        chain = [
            (t + 1) % self._vocab if self._wrong and (len(seen) + i) % self._wrong == 0 else t
            for i, t in enumerate(chain)
        ]
        return self._branched(chain, room) if self._tree else Draft.chain(np.asarray(chain, np.int32), Arm.EAGLE3)

    def _branched(self, chain: Sequence[int], room: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in chain:
            tokens += [(token + 2) % self._vocab, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        zeros = np.zeros(len(tokens), np.int32)
        ones = np.ones(len(tokens), np.float32)
        draft = Draft(
            np.asarray(tokens, np.int32), np.asarray(parents, np.int32), ones, Arm.EAGLE3, 0.0, 0, zeros, zeros
        )
        return draft.first(room)

    def close(self, key: int, *, keep: bool) -> None:
        del self._seen[key]

    @property
    def wants_hidden(self) -> bool:
        return True

    @property
    def live(self) -> int:
        return len(self._seen)


def deep_cycles(completion: Completion, accepted: int = 3) -> int:
    """Cycles that accepted at least so many draft tokens (hard_cases M3: otherwise a run is void)."""
    return sum(record.accepted >= accepted for record in completion.records)
