"""Measures policies interleaved: every prompt runs under all of them before the next, in an order that rotates.

Each policy has an engine of its own (its own suffix cache, its own learning), all share one loaded target and one cost
model. The machine's slow and fast moments then fall on all policies alike, and none profits from another's cache.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter

import numpy as np

from hvd.bench.conversation import Conversation
from hvd.config import SamplingParams
from hvd.drafters.base import Drafter
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.llm import LLM, Completion
from hvd.errors import ConfigError, RequestError
from hvd.payoff.predictor import Predictor
from hvd.traces.prompts import Prompt
from hvd.training.loops import loop_onset
from hvd.types import Arm

PLAIN = "plain"
SCOPES = ("none", "dataset", "all")
"""Whose earlier answers a request's cache may draw on: none but its own text, those of its data set, all."""
AGAIN = "plain-again"
"""Plain decoding measured a second time: what it differs from `plain` by is noise."""


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """One prompt under one policy.

    tokens               generated
    decode_seconds       of all cycles; prefill and tokenization are not in it
    wall_seconds         of the whole request, as its caller sees it
    drafted, accepted    draft tokens verified, accepted
    positions            positions computed in verify passes
    phases               seconds by phase: propose, gate, forward, walk
    identical            token ids equal plain decoding's
    differs_at           first output position that differs, None when identical
    loop_onset           where the output got stuck repeating itself; None when it did not
    output               digest of the token ids
    """

    id: str
    dataset: str
    category: str
    policy: str
    prompt_tokens: int
    tokens: int
    decode_seconds: float
    prefill_seconds: float
    wall_seconds: float
    cycles: int
    drafted: int
    accepted: int
    positions: int
    arms: dict[str, dict[str, int]]
    phases: dict[str, float]
    finish_reason: str
    identical: bool
    differs_at: int | None
    loop_onset: int | None
    output: str

    def as_json(self) -> dict[str, object]:
        """The record as `hvd bench --json` writes it."""
        return asdict(self)


@dataclass(slots=True)
class Outcome:
    """What one conversation gave: a record a turn and policy; the turns that could not run, and why."""

    records: list[BenchRecord] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


class Runner:
    """Runs conversations under several policies; see the module's docstring.

    base         a loaded model; its target, tokenizer, head and cost model are used
    policies     names; plain decoding is put in front when missing, since everything is compared with it
    params       sampling parameters. ConfigError when they sample without a seed: the texts would differ each time
    predictors   at most one of each kind; each policy takes the kind it needs
    scope        one of SCOPES
    repeat       measure plain decoding a second time, as `plain-again`
    """

    def __init__(
        self,
        base: LLM,
        policies: Sequence[str],
        params: SamplingParams,
        *,
        predictors: Sequence[Predictor] = (),
        scope: str = "none",
        repeat: bool = False,
    ) -> None:
        if scope not in SCOPES:
            raise ConfigError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
        if not params.greedy and params.seed is None:
            raise ConfigError("a benchmark with temperature > 0 needs a seed; else the outputs can't be compared")
        self._params, self._scope = params, scope
        names = {name: name for name in [PLAIN, *policies]} | ({AGAIN: PLAIN} if repeat else {})
        self._engines = {
            name: policy_engine(base, policy, predictors, shared=scope != "none") for name, policy in names.items()
        }
        self._order = deque(self._engines)

    @property
    def policies(self) -> list[str]:
        """What is measured, in the order of the tables."""
        return list(self._engines)

    def warm_up(self) -> None:
        """Run every policy once, so that no measurement pays for compiling or for first passes."""
        engine = next(iter(self._engines.values()))
        ids = engine.chat_prompt([{"role": "user", "content": "List: one two three one two three one two three"}])
        for llm in self._engines.values():
            llm.generate([ids], SamplingParams(max_tokens=16, ignore_eos=True), scope="warm-up")

    def run(self, prompt: Prompt, on_turn: Callable[[], None] = lambda: None) -> Outcome:
        """Measure one conversation, turn by turn. Plain decoding's answers go into the history of open ones."""
        outcome, conversation = Outcome(), Conversation(prompt)
        for id_, messages in conversation:
            try:
                ids = self._engines[PLAIN].chat_prompt(messages)
                done = self._measure(ids, prompt.dataset)
            except RequestError as error:
                outcome.skipped.append((id_, str(error)))
                conversation.answered("")
                continue
            finally:
                on_turn()
            outcome.records += [_record(id_, prompt, name, done) for name in self._engines]
            conversation.answered(done[PLAIN][0].text)
        return outcome

    def _measure(self, ids: list[int], dataset: str) -> dict[str, tuple[Completion, float]]:
        """(completion, wall seconds) by policy."""
        scope = dataset if self._scope == "dataset" else ""
        done = {}
        for name in self._order:
            started = perf_counter()
            [completion] = self._engines[name].generate([ids], self._params, scope=scope)
            done[name] = completion, perf_counter() - started
        self._order.rotate(-1)
        return done


def policy_engine(base: LLM, policy: str, predictors: Sequence[Predictor] = (), *, shared: bool = False) -> LLM:
    """An engine of its own over a loaded model: a fresh suffix cache; target, head, cost model and predictors shared.

    policy   a name, or "name@mode" with a mode of the suffix cache (`SuffixConfig.mode`): fixed rules verify whole
             drafts, and do better with the shorter ones of "arctic"
    shared   whether the cache keeps finished answers for later requests of the same scope
    """
    name, _, mode = policy.partition("@")
    suffix = replace(base.config.suffix, shared=shared, mode=mode or base.config.suffix.mode)
    config = replace(base.config, policy=name, record=True, suffix=suffix)
    drafters: dict[Arm, Drafter] = dict(base.drafters)
    if Arm.CACHE in drafters:
        fingerprint = base.tokenizer.fingerprint if base.tokenizer is not None else ""
        drafters[Arm.CACHE] = SuffixDrafter(suffix, base.target.spec.vocab_size, fingerprint)
    return LLM.from_parts(base.target, base.tokenizer, drafters, base.cost, config, predictors)


def _record(id_: str, prompt: Prompt, policy: str, done: Mapping[str, tuple[Completion, float]]) -> BenchRecord:
    completion, wall = done[policy]
    stats, ids = completion.stats, completion.token_ids
    differs = first_difference(ids, done[PLAIN][0].token_ids)
    return BenchRecord(
        id=id_,
        dataset=prompt.dataset,
        category=prompt.category,
        policy=policy,
        prompt_tokens=stats.prompt_tokens,
        tokens=len(ids),
        decode_seconds=stats.decode_seconds,
        prefill_seconds=stats.prefill_seconds,
        wall_seconds=wall,
        cycles=stats.cycles,
        drafted=sum(arm.drafted for arm in stats.arms.values()),
        accepted=sum(arm.accepted for arm in stats.arms.values()),
        positions=stats.width,
        arms={
            arm.value: {"cycles": of.cycles, "drafted": of.drafted, "accepted": of.accepted}
            for arm, of in stats.arms.items()
        },
        phases=_phases(completion),
        finish_reason=completion.finish_reason.value,
        identical=differs is None,
        differs_at=differs,
        loop_onset=loop_onset(np.asarray(ids, np.int32)),
        output=hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16],
    )


def _phases(completion: Completion) -> dict[str, float]:
    names = ("propose", "gate", "forward", "walk")
    return {name: sum(getattr(record.times, name) for record in completion.records) for name in names}


def first_difference(ours: Sequence[int], plain: Sequence[int]) -> int | None:
    """Index of the first token that differs (or is missing on one side); None when equal."""
    for i, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(plain) else min(len(ours), len(plain))
