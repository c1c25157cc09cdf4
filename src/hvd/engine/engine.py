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
from dataclasses import dataclass

import numpy as np

from hvd.config import EngineConfig
from hvd.drafters.base import Drafter
from hvd.drafters.suffix import SuffixDrafter
from hvd.engine.request import Request
from hvd.errors import ConfigError
from hvd.models.target import Span, SpanOutput, Target
from hvd.payoff.cost import CostModel
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
                raise ConfigError(f"policy {name!r} needs {', '.join(sorted(missing))}; give an EAGLE3 head")
            self._policies[name] = policy
        return self._policies[name]

    def add(self, request: Request) -> None:
        """Queue a request; it runs with the next steps."""
        self.policy(request.policy)
        request.key = next(self._keys)
        self._waiting.append(request)

    def cancel(self, request: Request) -> bool:
        """End a request now, between two steps. False if it has ended already, or was never added."""
        if request.done or request.key < 0:
            return False
        request.finish_reason = FinishReason.CANCELLED
        if request.text is not None:
            request.text.finish()
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)
        return True

    def preempt(self, request: Request) -> None:
        """Free a running request's KV cache and put it back in front of the queue.

        It resumes by prefill, its text and its drafters' knowledge unchanged; no draft outlives a step.
        """
        self._running.remove(request)
        if request.cache is not None:
            request.cache.close()
            request.cache = None
        self._waiting.appendleft(request)

    def step(self) -> list[Request]:
        """One pass of the target. Returns the requests that committed tokens or ended in it."""
        prefills, ready = self._schedule()
        started = time.perf_counter()
        cycles = self._propose(ready)
        proposed = time.perf_counter()
        self._allocate(cycles)
        allocated = time.perf_counter()
        self._draft(cycles)
        drafted = time.perf_counter()
        outputs = self._forward(prefills, cycles)
        passed = time.perf_counter()
        for request, output in zip(prefills, outputs, strict=False):
            self._filled(request, output, (passed - drafted) / len(outputs))
        share = 1.0 / max(1, len(cycles))
        times = CycleTimes(
            (proposed - started + drafted - allocated) * share,
            (allocated - proposed) * share,
            (passed - drafted) / max(1, len(outputs)),
        )
        for cycle, output in zip(cycles, outputs[len(prefills) :], strict=True):
            self._walk(cycle, output, times)
        if cycles:
            self.cost.observe_overhead((time.perf_counter() - passed + allocated - started) * share)
        self._running = [request for request in self._running if not request.done]
        return [cycle.request for cycle in cycles]

    # -- schedule -------------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[Request], list[Request]]:
        """Admit waiting requests; tell those in prefill from those ready for a cycle."""
        while self._waiting and len(self._running) < self.config.max_batch:
            request = self._waiting.popleft()
            self._admit(request)
            self._running.append(request)
        prefills = [request for request in self._running if request.behind > 1]
        ready = [request for request in self._running if request.behind == 1]
        return prefills, ready

    def _admit(self, request: Request) -> None:
        request.cache = self.target.open()
        if request.observed:  # resumed: its drafters have kept what they know
            return
        uses = self.policy(request.policy).uses
        request.drafters = tuple(arm for arm in self._drafters if arm in uses)
        for arm in request.drafters:
            self._drafters[arm].open(request.key, request.scope)
        request.history.prompt(request.slice(0, request.prompt_length))
        self._observe(request, np.zeros((1, self._hidden_width), np.float32))

    # -- propose, allocate, draft ---------------------------------------------------------------------------------

    def _propose(self, ready: Sequence[Request]) -> list[_Cycle]:
        """Ask the suffix cache, which is free, and put together what each policy may look at."""
        return [_Cycle(request, self._situation(request)) for request in ready]

    def _situation(self, request: Request) -> Situation:
        assert request.cache is not None
        cached = self._ask(Arm.CACHE, request, request.room)
        if Arm.EAGLE3 not in request.drafters:
            return Situation(cached, request.history, request.room, request.cache.length)
        head = self._drafters[Arm.EAGLE3]
        return Situation(
            cached,
            request.history,
            request.room,
            request.cache.length,
            eagle3=max(0, min(request.room, head.limit(request.key))),
            backlog=head.backlog(request.key),
            whole=head.all_or_nothing,
        )

    def _ask(self, arm: Arm, request: Request, room: int) -> Draft | None:
        """A drafter's draft, cut to what may be shown to the target."""
        if arm not in request.drafters or room <= 0:
            return None
        return sound_part(self._drafters[arm].propose(request.key, room), self.target.spec.vocab_size, room)

    def _allocate(self, cycles: Sequence[_Cycle]) -> None:
        """Each policy chooses arm and length for all of its requests at once: they share the pass."""
        for name in dict.fromkeys(cycle.request.policy for cycle in cycles):
            group = [cycle for cycle in cycles if cycle.request.policy == name]
            choices = self.policy(name).choose([cycle.situation for cycle in group], self.cost)
            for cycle, choice in zip(group, choices, strict=True):
                cycle.choice = choice

    def _draft(self, cycles: Sequence[_Cycle]) -> None:
        """Cut the cache draft to the chosen length, or let the head draft."""
        for cycle in cycles:
            length = min(cycle.choice.length, cycle.request.room)
            if cycle.choice.arm == Arm.CACHE and cycle.situation.cache is not None and length > 0:
                cycle.draft = cycle.situation.cache.first(length)
            elif cycle.choice.arm == Arm.EAGLE3:
                started = time.perf_counter()
                cycle.draft = self._ask(Arm.EAGLE3, cycle.request, length)
                self.cost.observe_eagle3(
                    length, cycle.situation.backlog, cycle.situation.context, time.perf_counter() - started
                )

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

    def _filled(self, request: Request, output: SpanOutput, seconds: float) -> None:
        """A chunk of prompt is in the KV cache."""
        assert request.cache is not None
        request.cache.keep(range(request.cache.pending))
        request.stats.prefill_seconds += seconds
        self._observe(request, output.hidden)

    def _walk(self, cycle: _Cycle, output: SpanOutput, times: CycleTimes) -> None:
        """Verify, then commit; an error in one request's sampling ends that request alone."""
        request, draft = cycle.request, cycle.draft
        started = time.perf_counter()
        try:
            walked = walk(draft, output.logits, request.sampler, request.advance)
        except Exception as error:  # noqa: BLE001 - a user's processor may raise anything; kept, and raised to its caller
            _LOG.debug("request %d failed", request.key, exc_info=True)
            request.error = error
            self._release(request)
            return
        self._commit(cycle, walked, output)
        walking = time.perf_counter() - started
        request.stats.decode_seconds += times.propose + times.gate + times.forward + walking
        record = self._record(cycle, walked, CycleTimes(times.propose, times.gate, times.forward, walking))
        request.record(record, keep=self.config.record)

    def _commit(self, cycle: _Cycle, walked: Walk, output: SpanOutput) -> None:
        """Keep the accepted path in the KV cache and tell everybody."""
        request, draft = cycle.request, cycle.draft
        assert request.cache is not None
        accepted = len(walked.tokens) - 1
        kept = [0, *(node + 1 for node in walked.path[:accepted])]
        request.credit(draft, accepted)
        request.cache.keep(kept)
        self._observe(request, None if output.hidden is None else output.hidden[kept])
        offered = len(cycle.situation.cache) if cycle.situation.cache is not None else 0
        drafted = len(draft) if draft is not None else 0
        tokens = np.asarray(walked.tokens, np.int32)
        request.history.commit(tokens, self._hits(request, len(tokens)), _arm(draft), drafted, accepted, offered)
        if request.done:  # its last draft was cut off, which says nothing of its payoff
            self._release(request)
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

    def _record(self, cycle: _Cycle, walked: Walk, times: CycleTimes) -> StepRecord:
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

    def _release(self, request: Request) -> None:
        """Free all that belongs to an ended request; only a whole answer may serve later ones."""
        keep = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.cache is not None:
            request.cache.close()
            request.cache = None
        for arm in request.drafters:
            self._drafters[arm].close(request.key, keep=keep)
        request.drafters = ()


def _arm(draft: Draft | None) -> Arm:
    return draft.arm if draft is not None else Arm.PLAIN


def _as_run(cycle: _Cycle) -> Choice:
    """The choice as it was carried out: a drafter may have offered less, or nothing."""
    drafted = len(cycle.draft) if cycle.draft is not None else 0
    return Choice(_arm(cycle.draft), drafted, cycle.choice.expected, cycle.choice.reason)
