"""Replays one prompt's answer, behind the measuring, and counts what can't be seen in a record.

The suffix cache's drafts depend on the committed text alone, so one walk over the answer (`hvd.training.replay`) gives
the draft and the payoff at every position; the step records say where each policy stood and what it took. All counts
are additive trees (`hvd.bench.tallies`); `hvd.bench.analysis` adds them up and turns them into figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from hvd.bench.gates import Gates, State
from hvd.bench.sources import SHARED, name_source, source_of, token_roles
from hvd.bench.tallies import CONTEXT_EDGES, TENTHS, PayoffTally, Tree, bin_of
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.llm import LLM, Completion
from hvd.payoff.cost import CostModel
from hvd.payoff.history import History
from hvd.payoff.policy import make_policy
from hvd.payoff.predictor import Predictor
from hvd.traces.prompts import Message, Prompt
from hvd.traces.schema import Trace
from hvd.training.loops import loop_onset
from hvd.training.replay import SimulatedHead, Walk, cycles, walk
from hvd.training.simulate import Totals, oracle, play, policy_with
from hvd.types import Arm, StepRecord

PLAIN = "plain"
OFFLINE = "offline"
"""States at every position of an answer, with the history of plain decoding."""
ASKED = "hvd"
"""The policy whose states the predictors are asked about, when it is measured; else the first that uses the cache."""


class Analyst:
    """Keeps what outlives a prompt: a suffix cache in step with the engines', policies that learn as theirs do."""

    def __init__(
        self, base: LLM, policies: Sequence[str], predictors: Sequence[Predictor], scope: str, max_tokens: int | None
    ) -> None:
        """`policies`: the names that are measured. `scope`: as in `hvd.bench.runner.SCOPES`. `max_tokens`: as asked."""
        self._base = base
        self._scope, self._max_tokens = scope, max_tokens
        fingerprint = base.tokenizer.fingerprint if base.tokenizer is not None else ""
        suffix = replace(base.config.suffix, shared=scope != "none")
        self._drafter = SuffixDrafter(suffix, base.target.spec.vocab_size, fingerprint)
        self._classes = base.tokenizer.token_classes() if base.tokenizer is not None else History.UNKNOWN_CLASSES
        self._key = 0
        self._players = {name: policy_with(name, predictors) for name in policies if _walkable(name)}
        asked = [n for n in policies if _walkable(n) and Arm.CACHE in self._players[n].uses]
        self._asked = ASKED if ASKED in asked else next(iter(asked), None)
        self._gates = Gates(predictors)
        self._cost = base.cost

    def begin(self) -> None:
        """The machine is warm: take the cost model as it stands now. It goes on learning; regret needs one measure."""
        self._cost = deepcopy(self._base.cost)

    def find(
        self, id_: str, prompt: Prompt, messages: Sequence[Message], done: Mapping[str, Completion]
    ) -> dict[str, Any]:
        """The findings of one prompt: who it is, and `counts`. `done`: the completions by policy, plain among them."""
        plain = done[PLAIN]
        walked = self._walk(id_, prompt, plain)
        same = {n: c for n, c in done.items() if _walkable(n) and c.token_ids == plain.token_ids}
        roles = token_roles(self._base.tokenizer, plain.prompt_token_ids, messages) if self._base.tokenizer else []
        counts: dict[str, Tree] = {"payoff": {}, "gates": {}, "curves": {}, "sources": {}, "guesses": {}, "head": {}}
        self._look(OFFLINE, self._offline(walked), counts)
        for name, completion in same.items():
            counts["guesses"][name] = _guesses(walked, completion.records, self._cost)
            if Arm.CACHE in self._players[name].uses:
                self._look(name, self._live(walked, completion.records), counts)
                counts["sources"][name] = _sources(walked, completion.records, roles)
            if any(step.arm is Arm.EAGLE3 for step in completion.records):
                counts["head"][name] = _head(completion.records)
        counts["seconds"] = self._seconds(walked, done)
        return {
            "id": id_,
            "dataset": prompt.dataset,
            "category": prompt.category,
            "loops": loop_onset(walked.trace.response) is not None,
            "tokens": len(walked),
            "counts": counts,
        }

    def _walk(self, id_: str, prompt: Prompt, plain: Completion) -> Walk:
        room = self._base.target.spec.context_limit - len(plain.prompt_token_ids)
        limit = room if self._max_tokens is None else min(room, self._max_tokens)
        trace = Trace(
            id=id_,
            prompt=np.asarray(plain.prompt_token_ids, np.int32),
            response=np.asarray(plain.token_ids, np.int32),
            token_classes=self._classes,
            finish_reason=plain.finish_reason,
            dataset=prompt.dataset if self._scope == "dataset" else "",
            sampling=json.dumps({"max_tokens": limit}),
        )
        self._key += 1
        return walk(trace, self._drafter, self._key, keep=self._scope != "none")

    def _look(self, name: str, states: Iterator[State], counts: dict[str, Tree]) -> None:
        """Count states; ask the gates about those offline and those of one policy."""
        tally = PayoffTally()
        asked = self._gates.session(online=name == ASKED) if name in (OFFLINE, self._asked) else None
        for state in states:
            if asked is not None:
                asked.look(state)
            if state.step is not None and state.step.offered != (0 if state.draft is None else len(state.draft)):
                tally.unlike += 1
            if state.draft is None:
                tally.bare += 1
            elif state.payoff is None:
                tally.censored += 1
            else:
                tally.count(state.draft, state.payoff)
        counts["payoff"][name] = tally.tree()
        if asked is not None:
            counts["gates"][name] = asked.gates.counts
            counts["curves"][name] = {model: curve.bins for model, curve in asked.curves.items()}

    def _offline(self, walked: Walk) -> Iterator[State]:
        for cycle in cycles(walked, make_policy(PLAIN), self._cost):
            yield _state(walked, cycle.position, cycle.situation.history)

    def _live(self, walked: Walk, steps: Sequence[StepRecord]) -> Iterator[State]:
        """The states of a policy's own cycles, with the history that its engine had."""
        history = History(self._classes)
        history.prompt(walked.trace.prompt)
        for step in steps:
            yield _state(walked, step.position, history, step)
            stop = step.position + step.committed
            tokens, hits = walked.trace.response[step.position : stop], walked.hits[step.position : stop]
            history.commit(tokens, hits, step.arm, step.drafted, step.accepted, step.offered)

    def _seconds(self, walked: Walk, done: Mapping[str, Completion]) -> dict[str, float]:
        """Seconds by the cost model: every policy played on the answer, and the oracle."""
        head = self._simulated_head(done)
        trace = replace(walked.trace, steps=tuple(_head_steps(done)))
        walked = replace(walked, trace=trace)
        seconds = {}
        for name, policy in self._players.items():
            totals = Totals()
            play(walked, policy, self._cost, head, totals)
            seconds[name] = totals.seconds
        totals = Totals()
        oracle(walked, self._cost, head, totals)
        return seconds | {"oracle": totals.seconds}

    def _simulated_head(self, done: Mapping[str, Completion]) -> SimulatedHead | None:
        """A stand-in for the head, as good as the real one was on this prompt."""
        if Arm.EAGLE3 not in self._base.drafters:
            return None
        steps = _head_steps(done)
        right = sum(step.accepted for step in steps)
        tried = right + sum(step.accepted < step.drafted for step in steps)
        config = self._base.config.eagle3
        length = config.chain_length if config.shape == "chain" else config.depth
        return SimulatedHead(right / tried if tried else 0.5, length)


def _walkable(name: str) -> bool:
    """Whether the walk's drafts are this policy's: "name@mode" drafts otherwise, and a repetition tells nothing new."""
    return "@" not in name and name != "plain-again"


def _state(walked: Walk, position: int, history: History, step: StepRecord | None = None) -> State:
    draft = walked.drafts[position]
    known = draft is not None and not walked.censored(position)
    payoff = int(walked.payoffs[position]) if known else None
    return State(draft, walked.alternatives(position), history, payoff, step)


def _head_steps(done: Mapping[str, Completion]) -> list[StepRecord]:
    """The head's cycles, of the policy that uses it most."""
    each = [[step for step in completion.records if step.arm is Arm.EAGLE3] for completion in done.values()]
    return max(each, key=len, default=[])


def _sources(walked: Walk, steps: Sequence[StepRecord], roles: Sequence[str]) -> Tree:
    """Accepted tokens of cache drafts by where they were copied from; those from the prompt also by its tenths."""
    text = np.concatenate([walked.trace.prompt, walked.trace.response])
    prompt = len(walked.trace.prompt)
    tokens: dict[str, int] = {}
    tenths = [0] * TENTHS
    for step in steps:
        if step.arm is not Arm.CACHE or not step.accepted:
            continue
        draft, at = walked.drafts[step.position], prompt + step.position
        shared = draft is not None and not draft.local
        place = None if shared else source_of(text[:at], step.match_len, int(text[at]))
        name = SHARED if shared else name_source(place, roles)
        tokens[name] = tokens.get(name, 0) + step.accepted
        if place is not None and place < prompt:
            tenths[place * TENTHS // prompt] += step.accepted
    return {"tokens": tokens, "tenths": tenths}


def _guesses(walked: Walk, steps: Sequence[StepRecord], cost: CostModel) -> Tree:
    """What wrong guesses cost: positions computed in vain, and cycles that a draft on offer would have spared.

    seconds   by the cost model, what passes took beyond those just as wide as what was accepted
    forgone   tokens that cost a pass although an earlier cycle had a cache draft on offer that held them (but for the
              last token: a draft that reaches the end gives it as the bonus)
    """
    rejected = wasted = forgone = reach = 0
    seconds = 0.0
    for step in steps:
        missed = step.drafted - step.accepted
        if missed > 0:
            rejected += missed
            wasted += step.accepted == 0
            seconds += cost.verify(step.width, step.context) - cost.verify(step.accepted + 1, step.context)
        reach = max(reach, step.position + int(walked.payoffs[step.position]))
        forgone += step.position + step.accepted < min(reach, len(walked) - 1)
    return {
        "tokens": len(walked),
        "cycles": len(steps),
        "drafted": sum(step.drafted for step in steps),
        "rejected": rejected,
        "wasted": wasted,
        "seconds": seconds,
        "forgone": forgone,
    }


def _head(steps: Sequence[StepRecord]) -> Tree:
    """[cycles, drafted, accepted] of the head by context."""
    rows = [[0, 0, 0] for _ in CONTEXT_EDGES]
    for step in steps:
        if step.arm is Arm.EAGLE3:
            row = rows[bin_of(step.context, CONTEXT_EDGES)]
            for i, more in enumerate((1, step.drafted, step.accepted)):
                row[i] += more
    return rows
