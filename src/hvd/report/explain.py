"""One request, cycle by cycle, with what its policy knew: from a running model, or replayed from a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd.detokenizer import IncrementalDetokenizer
from hvd.payoff.explanation import Explanation, Prospect, explain
from hvd.report.source import Source, find_source
from hvd.types import ROOT, Arm, Draft, Float64Array, Int32Array, StepRecord

if TYPE_CHECKING:
    from hvd.config import SamplingParams
    from hvd.engine.llm import LLM
    from hvd.payoff.cost import CostModel
    from hvd.payoff.policy import Policy
    from hvd.tokenizer import Tokenizer
    from hvd.training.replay import SimulatedHead, Walk

_BEFORE = 8
"""Tokens in front of a draft that its text depends on: a character has at most four bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ExplainedCycle:
    """What was decided, and what came of it.

    draft    what was verified; None for nothing, and for the drafts of a simulated head, whose tokens nobody knows
    cache    the cache draft to show: the one on offer, or, if another one was verified, that
    source   where that had been read; None when in another request's answer, or without a draft
    """

    record: StepRecord
    explanation: Explanation
    draft: Draft | None
    cache: Draft | None
    source: Source | None


@dataclass(slots=True, eq=False)
class ExplainedRequest:
    """A request with its cycles. `replayed`: from a trace, so times are the cost model's and not measured.

    prompt, output   int32 [p], int32 [n]
    tokenizer        None = texts are token ids
    """

    prompt: Int32Array
    output: Int32Array
    cycles: list[ExplainedCycle]
    policy: str
    model: str = ""
    name: str = ""
    finish_reason: str = ""
    replayed: bool = False
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @property
    def tokens_per_cycle(self) -> float:
        """Committed tokens a cycle, which is also plain decoding's passes over this request's; 0.0 without cycles."""
        return len(self.output) / len(self.cycles) if self.cycles else 0.0

    def tokens_by_arm(self) -> dict[Arm, int]:
        """Output tokens by who drafted them; PLAIN = the target's own, bonus tokens among them."""
        tokens = dict.fromkeys(Arm, 0)
        for cycle in self.cycles:
            tokens[cycle.record.arm] += cycle.record.accepted
        tokens[Arm.PLAIN] = len(self.output) - tokens[Arm.CACHE] - tokens[Arm.EAGLE3]
        return tokens

    def texts(self, tokens: Int32Array, before: Int32Array | None = None) -> list[str]:
        """The text of each token behind others; "" where a character is not yet whole."""
        if self.tokenizer is None:
            return [f"\u27e8{token}\u27e9" for token in tokens.tolist()]
        return token_texts(self.tokenizer, tokens, before if before is not None else tokens[:0])

    def text_at(self, position: int) -> Int32Array:
        """Prompt and output up to a position of the output."""
        return np.concatenate([self.prompt, self.output[:position]])


def token_texts(tokenizer: Tokenizer, tokens: Int32Array, before: Int32Array) -> list[str]:
    """The text that each token adds behind those before it, special tokens spelled out."""
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    stream.push(before[-_BEFORE:].tolist())
    texts = [stream.push([token]) for token in tokens.tolist()]
    rest = stream.flush()
    if len(texts) > 1 and not any(texts):  # a decoder that speaks only at the end
        return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens.tolist()]
    if texts:
        texts[-1] += rest
    return texts


def explain_live(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams,
    policy: str,
    progress: Callable[[int], None] = lambda tokens: None,
) -> ExplainedRequest:
    """Decode a prompt, int ids, and watch. `progress` is called with the number of tokens so far."""
    seen: list[tuple[Explanation, Draft | None, StepRecord]] = []
    with llm.stream(prompt, params, policy=policy) as running:
        running.request.watch = lambda *what: seen.append(what)
        for count, _ in enumerate(running, start=1):
            progress(count)
        completion = running.completion()
    request = ExplainedRequest(
        prompt=np.asarray(completion.prompt_token_ids, np.int32),
        output=np.asarray(completion.token_ids, np.int32),
        cycles=[],
        policy=policy,
        model=llm.target.spec.name,
        finish_reason=completion.finish_reason.value,
        tokenizer=llm.tokenizer,
    )
    for explanation, draft, record in seen:
        request.cycles.append(_cycle(request, record, explanation, draft))
    return request


def explain_walk(
    walk: Walk,
    policy: Policy,
    cost: CostModel,
    head: SimulatedHead | None = None,
    tokenizer: Tokenizer | None = None,
    name: str = "",
) -> ExplainedRequest:
    """Replay a policy over a trace, by the code that decides when serving, and watch. `name` is the policy's."""
    from hvd.training.replay import cycles

    trace = walk.trace
    request = ExplainedRequest(
        prompt=trace.prompt,
        output=trace.response,
        cycles=[],
        policy=name or policy.name,
        model=trace.model,
        name=trace.id,
        finish_reason=trace.finish_reason.value,
        replayed=True,
        tokenizer=tokenizer,
    )
    for cycle in cycles(walk, policy, cost, head):
        explanation = explain(policy, cycle.situation, cycle.choice, cost)
        choice, cache = cycle.choice, cycle.situation.cache
        chosen = explanation.cache if choice.arm is Arm.CACHE else None
        record = StepRecord(
            position=cycle.position,
            context=cycle.situation.context,
            arm=choice.arm,
            drafted=choice.length,
            accepted=cycle.accepted,
            committed=cycle.committed,
            width=choice.length + 1,
            offered=len(cache) if cache is not None else 0,
            match_len=cache.match_len if cache is not None else 0,
            score=cache.score if cache is not None else 0.0,
            expected=choice.expected,
            reason=choice.reason,
        )
        request.cycles.append(_cycle(request, record, explanation, chosen and chosen.first(choice.length)))
    return request


def _cycle(
    request: ExplainedRequest, record: StepRecord, explanation: Explanation, draft: Draft | None
) -> ExplainedCycle:
    cache = explanation.cache
    if draft is not None and draft.arm is Arm.CACHE and (cache is None or not _begins_with(cache, draft)):
        cache = draft
    source = find_source(request.text_at(record.position), cache) if cache is not None else None
    return ExplainedCycle(record, explanation, draft, cache, source)


def _begins_with(draft: Draft, beginning: Draft) -> bool:
    return np.array_equal(draft.tokens[: len(beginning)], beginning.tokens)


def accepted_nodes(draft: Draft, committed: Int32Array) -> list[int]:
    """Nodes of a draft on the path that was committed, in order: for a chain, its beginning."""
    path: list[int] = []
    parent = ROOT
    for token in committed.tolist():
        below = np.flatnonzero((draft.parents == parent) & (draft.tokens == token))
        if not len(below):
            break
        parent = int(below[0])
        path.append(parent)
    return path


def lengths_shown(n: int, chosen: int) -> list[int]:
    """Lengths that stand for a curve over 1..n: powers of two, the end, and the one that was chosen."""
    steps = {1 << power for power in range(n.bit_length()) if 1 << power <= n}
    return sorted(steps | {n} | ({chosen} if 0 < chosen <= n else set()))


def request_json(request: ExplainedRequest) -> dict[str, Any]:
    """Everything as JSON values (`hvd explain --json`); seconds, and positions in the output. docs/explain.md."""
    return {
        "model": request.model,
        "policy": request.policy,
        "id": request.name,
        "replayed": request.replayed,
        "finish_reason": request.finish_reason,
        "prompt_tokens": len(request.prompt),
        "tokens": len(request.output),
        "cycles": len(request.cycles),
        "tokens_per_cycle": request.tokens_per_cycle,
        "tokens_by_arm": {arm.value: count for arm, count in request.tokens_by_arm().items()},
        "prompt_token_ids": request.prompt.tolist(),
        "token_ids": request.output.tolist(),
        "pieces": request.texts(request.output, request.prompt),
        "decisions": [_cycle_json(request, cycle) for cycle in request.cycles],
    }


def _cycle_json(request: ExplainedRequest, cycle: ExplainedCycle) -> dict[str, Any]:
    record, explanation = cycle.record, cycle.explanation
    times = record.times
    return {
        "position": record.position,
        "arm": record.arm.value,
        "drafted": record.drafted,
        "accepted": record.accepted,
        "committed": record.committed,
        "expected": None if np.isnan(record.expected) else record.expected,
        "reason": record.reason,
        "draft": None if cycle.draft is None else _draft_json(request, record.position, cycle.draft),
        "cache": None if cycle.cache is None else _draft_json(request, record.position, cycle.cache),
        "source": None if cycle.source is None else {"start": cycle.source.start, "length": cycle.source.length},
        "features": explanation.features,
        "plain_seconds": explanation.plain_seconds,
        "prospects": {prospect.arm.value: _prospect_json(prospect) for prospect in explanation.prospects},
        "backlog": explanation.backlog,
        "seconds": None
        if request.replayed
        else {"propose": times.propose, "gate": times.gate, "forward": times.forward, "walk": times.walk},
    }


def _draft_json(request: ExplainedRequest, position: int, draft: Draft) -> Mapping[str, Any]:
    return {
        "token_ids": draft.tokens.tolist(),
        "texts": request.texts(draft.tokens, request.text_at(position)) if draft.is_chain else None,
        "parents": None if draft.is_chain else draft.parents.tolist(),
        "probs": _floats(draft.probs.astype(np.float64)),
        "counts": draft.counts.tolist(),
        "match_len": draft.match_len,
        "score": draft.score,
        "local": draft.local,
        "age": draft.age,
        "origin": draft.origin,
    }


def _prospect_json(prospect: Prospect) -> Mapping[str, Any]:
    survival, rates = prospect.survival, prospect.rates
    return {
        "survival": None if survival is None else _floats(survival),
        "seconds": _floats(prospect.seconds),
        "tokens_per_second": None if rates is None else _floats(rates),
    }


def _floats(values: Float64Array) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
