"""The engine: schedule, propose, allocate, draft, forward, walk, commit. It knows token ids and requests, no files.

One `step` is one pass of the target. Requests still in prefill bring a chunk of their prompt, the others their last
committed token with a draft behind it. Every committed token reaches every drafter of its request, whichever arm
supplied it (docs/architecture.md).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd.config import EngineConfig
from hvd.drafters.base import Drafter
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.clock import Clock
from hvd.engine.request import Request
from hvd.errors import ConfigError, ModelError
from hvd.models.target import Span, SpanOutput, Target
from hvd.payoff.cost import CostModel
from hvd.payoff.explanation import Explanation, explain
from hvd.payoff.policy import Choice, Policy, Situation
from hvd.types import ROOT, Arm, CycleTimes, Draft, FinishReason, StepRecord
from hvd.verify.walk import Walk, sound_part, walk

_LOG = logging.getLogger(__name__)
_PLAIN = Choice(Arm.PLAIN)


@dataclass(slots=True)
class _Cycle:
    """One request's way through one step."""

    request: Request
    situation: Situation
    choice: Choice = _PLAIN
    draft: Draft | None = None
    explanation: Explanation | None = None
    walked: Walk | None = None
    walking: float = 0.0


class Engine:
    """Decodes many requests side by side over one target.

    drafters      by arm; may be empty
    make_policy   builds a policy by name; policies live as long as the engine and learn across requests
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[Arm, Drafter],
        make_policy: Callable[[str], Policy],
        cost: CostModel,
        config: EngineConfig,
    ) -> None:
        self.target = target
        self.cost = cost
        self.config = config
        self._drafters = dict(drafters)
        self._make_policy = make_policy
        self._policies: dict[str, Policy] = {}
        self._keys = itertools.count()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def live(self) -> int:
        """Requests waiting or running."""
        return len(self._waiting) + len(self._running)

    def policy(self, name: str) -> Policy:
        """The engine's instance of a policy. Raises ConfigError if it is unknown, or its drafter is missing."""
        if name not in self._policies:
            policy = self._make_policy(name)
            missing = policy.needs - self._drafters.keys()
            if missing:
                needs = ", ".join(sorted(missing))
                raise ConfigError(f"policy {name!r} needs {needs}; give an EAGLE3 head: --eagle3, or LLM(eagle3=...)")
            self._policies[name] = policy
        return self._policies[name]

    def add(self, request: Request) -> None:
        """Queue a request; it runs with the next steps."""
        self.policy(request.policy)
        request.key = next(self._keys)
        self._waiting.append(request)

    def cancel(self, request: Request) -> bool:
        """End a request now, between two steps. False if it has ended already, or was never added.

        What was committed stays; text held back as the possible beginning of a stop text is not released.
        """
        if request.done or request.key < 0:
            return False
        request.finish_reason = FinishReason.CANCELLED
        self._leave(request)
        return True

    def preempt(self, request: Request) -> bool:
        """Free a running request's KV cache and put it back in front of the queue. False if it is not running.

        It resumes by prefill, its text and its drafters' knowledge unchanged; no draft outlives a step.
        """
        if request not in self._running:
            return False
        self._running.remove(request)
        if request.cache is not None:
            request.cache.close()
            request.cache = None
        self._waiting.appendleft(request)
        return True

    def step(self) -> list[Request]:
        """One pass of the target. Returns the requests that had a cycle in it.

        What goes wrong with one request (its drafters, its policy, its processors) ends that request by the error. An
        error of the target, or an interruption, is raised; the requests stay, and the next step takes them up again.
        """
        try:
            return self._step()
        finally:
            for request in self._running:
                if request.cache is not None and request.cache.pending:
                    request.cache.keep(())

    def _step(self) -> list[Request]:
        prefills, ready = self._schedule()
        clock = Clock()
        cycles = self._propose(ready)
        clock.lap("propose")
        cycles = self._allocate(cycles)
        clock.lap("gate")
        cycles = self._explain(cycles)
        clock.lap("explain")
        cycles = self._draft(cycles)
        clock.lap("propose")
        outputs = self._forward(prefills, cycles)
        clock.lap("forward")
        for request, output in zip(prefills, outputs, strict=False):
            self._guard(request, self._fill, request, output, clock.seconds["forward"] / len(outputs))
        clock.lap("prefill")
        for cycle, output in zip(cycles, outputs[len(prefills) :], strict=True):
            self._guard(cycle.request, self._walk, cycle, output)
            cycle.walking = clock.lap("walk")
        self._account(cycles, len(outputs), clock)
        return [cycle.request for cycle in cycles]

    def _guard(self, request: Request, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do something for one request; an error ends that request alone. None after an error."""
        try:
            return act(*arguments)
        except BaseException as error:
            _LOG.debug("request %d failed", request.key, exc_info=True)
            request.fail(error)
            self._leave(request)
            if not isinstance(error, Exception):
                raise
            return None

    # -- schedule -------------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[Request], list[Request]]:
        """Admit waiting requests; tell those in prefill from those ready for a cycle."""
        while self._waiting and len(self._running) < self.config.max_batch:
            request = self._waiting.popleft()
            self._running.append(request)
            self._guard(request, self._admit, request)
        prefills = [request for request in self._running if request.behind > 1]
        ready = [request for request in self._running if request.behind == 1]
        return prefills, ready

    def _admit(self, request: Request) -> None:
        request.cache = self.target.open()
        if request.observed:  # resumed: its drafters have kept what they know
            return
        uses = self.policy(request.policy).uses
        for arm in [arm for arm in self._drafters if arm in uses]:
            self._drafters[arm].open(request.key, request.scope)
            request.drafters += (arm,)
        request.history.prompt(request.slice(0, request.prompt_length))
        self._observe(request, np.zeros((1, self._hidden_width), np.float32))

    # -- propose, allocate, draft ---------------------------------------------------------------------------------

    def _propose(self, ready: Sequence[Request]) -> list[_Cycle]:
        """Ask the suffix cache, which is free, and put together what each policy may look at."""
        situations = [(request, self._guard(request, self._situation, request)) for request in ready]
        return [_Cycle(request, situation) for request, situation in situations if situation is not None]

    def _situation(self, request: Request) -> Situation:
        assert request.cache is not None
        cached, others = self._ask(Arm.CACHE, request, request.room), self._alternatives(request)
        if Arm.EAGLE3 not in request.drafters:
            return Situation(cached, request.history, request.room, request.cache.length, alternatives=others)
        head = self._drafters[Arm.EAGLE3]
        return Situation(
            cached,
            request.history,
            request.room,
            request.cache.length,
            eagle3=max(0, min(request.room, head.limit(request.key))),
            backlog=head.backlog(request.key),
            whole=head.all_or_nothing,
            alternatives=others,
        )

    def _alternatives(self, request: Request) -> tuple[Draft, ...]:
        """What else the suffix cache could draft, for policies that compare."""
        if Arm.CACHE not in request.drafters or request.room <= 0 or not self.policy(request.policy).compares:
            return ()
        cache = self._drafters[Arm.CACHE]
        vocab_size = self.target.spec.vocab_size
        drafts = (sound_part(d, vocab_size, request.room) for d in cache.alternatives(request.key, request.room))
        return tuple(draft for draft in drafts if draft is not None)

    def _ask(self, arm: Arm, request: Request, room: int) -> Draft | None:
        """A drafter's draft, cut to what may be shown to the target."""
        if arm not in request.drafters or room <= 0:
            return None
        return sound_part(self._drafters[arm].propose(request.key, room), self.target.spec.vocab_size, room)

    def _allocate(self, cycles: Sequence[_Cycle]) -> list[_Cycle]:
        """Each policy chooses arm and length for all of its requests at once: they share the pass."""
        for name in dict.fromkeys(cycle.request.policy for cycle in cycles):
            group = [cycle for cycle in cycles if cycle.request.policy == name]
            try:
                choices = self.policy(name).choose([cycle.situation for cycle in group], self.cost)
                for cycle, choice in zip(group, choices, strict=True):
                    cycle.choice = choice
            except Exception as error:  # noqa: BLE001 - a policy may be anybody's; its requests end by its error
                for cycle in group:
                    cycle.request.fail(error)
                    self._leave(cycle.request)
        return [cycle for cycle in cycles if not cycle.request.done]

    def _explain(self, cycles: list[_Cycle]) -> list[_Cycle]:
        """Note why, for those who watch. Their time is not the gate's."""
        watched = [cycle for cycle in cycles if cycle.request.watch is not None]
        for cycle in watched:
            request, policy = cycle.request, self.policy(cycle.request.policy)
            cycle.explanation = self._guard(request, explain, policy, cycle.situation, cycle.choice, self.cost)
        return [cycle for cycle in cycles if not cycle.request.done] if watched else cycles

    def _draft(self, cycles: Sequence[_Cycle]) -> list[_Cycle]:
        """Cut the cache draft to the chosen length, or let the head draft."""
        for cycle in cycles:
            cycle.draft = self._guard(cycle.request, self._chosen_draft, cycle)
        return [cycle for cycle in cycles if not cycle.request.done]

    def _chosen_draft(self, cycle: _Cycle) -> Draft | None:
        choice, situation = cycle.choice, cycle.situation
        length = min(choice.length, cycle.request.room)
        cached = choice.draft or situation.cache
        if choice.arm == Arm.CACHE and cached is not None and length > 0:
            return cached.first(length)
        if choice.arm != Arm.EAGLE3:
            return None
        started = time.perf_counter()
        draft = self._ask(Arm.EAGLE3, cycle.request, length)
        self.cost.observe_eagle3(length, situation.backlog, situation.context, time.perf_counter() - started)
        return draft

    # -- forward --------------------------------------------------------------------------------------------------

    def _forward(self, prefills: Sequence[Request], cycles: Sequence[_Cycle]) -> list[SpanOutput]:
        spans = [self._prefill_span(request) for request in prefills]
        spans += [self._cycle_span(cycle) for cycle in cycles]
        if not spans:
            return []
        started = time.perf_counter()
        outputs = self.target.forward(spans)
        if not prefills:
            widths = [len(span.tokens) for span in spans]
            contexts = [span.cache.length for span in spans]
            self.cost.observe_verify(widths, contexts, time.perf_counter() - started)
        return outputs

    def _prefill_span(self, request: Request) -> Span:
        assert request.cache is not None
        start = request.cache.length
        stop = min(len(request.tokens) - 1, start + self.config.prefill_chunk)
        return Span(request.cache, request.slice(start, stop), rows="none", hidden=self._hidden(request))

    def _cycle_span(self, cycle: _Cycle) -> Span:
        request = cycle.request
        assert request.cache is not None
        tokens = request.slice(len(request.tokens) - 1, len(request.tokens))
        parents = None
        if cycle.draft is not None:
            tokens = np.concatenate([tokens, cycle.draft.tokens]).astype(np.int32, copy=False)
            if not cycle.draft.is_chain:
                parents = np.concatenate([[ROOT], cycle.draft.parents + 1]).astype(np.int32)
        return Span(request.cache, tokens, parents, rows="all", hidden=self._hidden(request))

    def _hidden(self, request: Request) -> bool:
        return any(self._drafters[arm].wants_hidden for arm in request.drafters)

    @property
    def _hidden_width(self) -> int:
        return len(self.target.spec.aux_layers) * self.target.spec.hidden_size

    # -- walk, commit ---------------------------------------------------------------------------------------------

    def _fill(self, request: Request, output: SpanOutput, seconds: float) -> None:
        """A chunk of prompt is in the KV cache."""
        assert request.cache is not None
        request.cache.keep(range(request.cache.pending))
        request.stats.prefill_seconds += seconds
        self._observe(request, output.hidden)

    def _walk(self, cycle: _Cycle, output: SpanOutput) -> None:
        """Verify, then commit."""
        cycle.walked = walk(cycle.draft, output.logits, cycle.request.sampler, cycle.request.advance)
        self._commit(cycle, cycle.walked, output)

    def _commit(self, cycle: _Cycle, walked: Walk, output: SpanOutput) -> None:
        """Keep the accepted path in the KV cache and tell everybody."""
        request, draft = cycle.request, cycle.draft
        assert request.cache is not None
        accepted = len(walked.tokens) - 1
        kept = [0, *(node + 1 for node in walked.path[:accepted])]
        request.credit(draft, accepted)
        end = request.cache.length + len(kept)
        request.cache.keep(kept)
        if request.cache.length != end:  # a state that can't be cut back would corrupt the text without a word
            raise ModelError(f"the KV cache of {self.target.spec.name} can't drop rejected tokens; use policy 'plain'")
        self._observe(request, None if output.hidden is None else output.hidden[kept])
        offered = len(cycle.situation.cache) if cycle.situation.cache is not None else 0
        drafted = len(draft) if draft is not None else 0
        tokens = np.asarray(walked.tokens, np.int32)
        request.history.commit(tokens, self._hits(request, len(tokens)), _arm(draft), drafted, accepted, offered)
        if request.done:  # its last draft was cut off, which says nothing of its payoff
            self._leave(request)
        else:
            self.policy(request.policy).observe(cycle.situation, _as_run(cycle), accepted)

    def _observe(self, request: Request, hidden: np.ndarray | None) -> None:
        """Tell the drafters the tokens up to the one behind the KV cache (drafters/base.py has the alignment).

        hidden   float32 [n, A*H]: states of the last n positions of the KV cache
        """
        assert request.cache is not None
        stop = request.cache.length + 1
        fresh = stop - request.observed
        if fresh <= 0:  # resumed after preemption: these were seen before
            return
        tokens = request.slice(request.observed, stop)
        rows = None if hidden is None else hidden[len(hidden) - fresh :]
        prompt = stop <= request.prompt_length
        for arm in request.drafters:
            drafter = self._drafters[arm]
            drafter.observe(request.key, tokens, rows if drafter.wants_hidden else None, prompt=prompt)
        request.observed = stop

    def _hits(self, request: Request, count: int) -> np.ndarray:
        suffix = self._drafters.get(Arm.CACHE)
        if Arm.CACHE in request.drafters and isinstance(suffix, SuffixDrafter):
            return suffix.last_hits(request.key)
        return np.zeros(count, np.uint8)

    # -- account ------------------------------------------------------------------------------------------------------

    def _account(self, cycles: Sequence[_Cycle], spans: int, clock: Clock) -> None:
        """Write down what each cycle did and took; phases that a pass shares are split evenly."""
        if not cycles:
            return
        spent, count = clock.seconds, len(cycles)
        propose, gate, forward = spent["propose"] / count, spent["gate"] / count, spent["forward"] / spans
        for cycle in cycles:
            if cycle.walked is not None and cycle.request.error is None:
                times = CycleTimes(propose, gate, forward, cycle.walking)
                cycle.request.stats.decode_seconds += propose + gate + forward + cycle.walking
                record = _record(cycle, cycle.walked, times)
                cycle.request.record(record, keep=self.config.record)
                if cycle.request.watch is not None and cycle.explanation is not None:
                    cycle.request.watch(cycle.explanation, cycle.draft, record)
        self.cost.observe_overhead((spent["gate"] + spent["walk"]) / count)

    # -- leave --------------------------------------------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        """Free all that belongs to an ended request; only a whole answer may serve later ones."""
        for queue in (self._running, self._waiting):
            if request in queue:
                queue.remove(request)
        keep = request.error is None and request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.cache is not None:
            request.cache.close()
            request.cache = None
        arms, request.drafters = request.drafters, ()
        for arm in arms:
            try:
                self._drafters[arm].close(request.key, keep=keep)
            except Exception:  # noqa: BLE001 - one drafter's fault must not keep the others from being freed
                _LOG.exception("drafter %r could not close request %d", arm, request.key)


def _record(cycle: _Cycle, walked: Walk, times: CycleTimes) -> StepRecord:
    cached, draft, choice = cycle.situation.cache, cycle.draft, cycle.choice
    drafted = len(draft) if draft is not None else 0
    return StepRecord(
        position=cycle.request.generated - len(walked.tokens),
        context=cycle.situation.context,
        arm=_arm(draft),
        drafted=drafted,
        accepted=len(walked.tokens) - 1,
        committed=len(walked.tokens),
        width=drafted + 1,
        offered=len(cached) if cached is not None else 0,
        match_len=cached.match_len if cached is not None else 0,
        score=cached.score if cached is not None else 0.0,
        expected=choice.expected,
        reason=choice.reason,
        times=times,
    )


def _arm(draft: Draft | None) -> Arm:
    return draft.arm if draft is not None else Arm.PLAIN


def _as_run(cycle: _Cycle) -> Choice:
    """The choice as it was carried out: a drafter may have offered less, or nothing."""
    drafted = len(cycle.draft) if cycle.draft is not None else 0
    return replace(cycle.choice, arm=_arm(cycle.draft), length=drafted)
