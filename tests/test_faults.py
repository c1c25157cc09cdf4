"""When something breaks in the middle of a step: whose request ends, what is freed, and that the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.errors import HVDError
from hvd.models.target import KVCache, Span, SpanOutput
from hvd.payoff import policy as policies
from hvd.payoff.cost import CostModel
from hvd.payoff.policy import Choice, Policy, Situation
from hvd.testing import FakeTarget, ScriptedHead
from hvd.types import Arm, Draft, Float32Array, Int32Array
from support import make_llm, plain

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
OTHER = [2, 7, 1, 8, 2, 8]
PARAMS = SamplingParams(max_tokens=30)


class Fault(Exception):  # noqa: N818
    """What the tests break things with."""


def expect_other_unharmed(llm: LLM, target: FakeTarget) -> None:
    assert llm.generate([OTHER], PARAMS)[0].token_ids == plain(target, OTHER, PARAMS).token_ids
    assert llm.engine.live == 0
    assert llm.drafters[Arm.CACHE].live_requests == 0  # type: ignore[attr-defined]


class OutOfMemory(FakeTarget):
    """Can't open a KV cache the first time."""

    failed = False

    def open(self) -> KVCache:
        if not self.failed:
            self.failed = True
            raise MemoryError("no room for a KV cache")
        return super().open()


def test_a_request_that_cannot_be_admitted_ends_by_its_error() -> None:
    target = OutOfMemory(seed=1)
    llm = make_llm(target)
    stream = llm.stream(PROMPT, PARAMS)
    for _ in range(2):
        with pytest.raises(MemoryError, match="KV cache"):
            next(stream)
    expect_other_unharmed(llm, target)


class FailingHead(ScriptedHead):
    """Raises in one of its methods once it has been called often enough."""

    def __init__(self, method: str, after: int) -> None:
        super().__init__(lambda text, room: [1, 2, 3][:room], wants_hidden=True)
        self.method, self.left = method, after

    def _tick(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                raise Fault(method)

    def open(self, key: int, scope: str = "") -> None:
        self._tick("open")
        super().open(key, scope)

    def observe(self, key: int, tokens: Int32Array, hidden: Float32Array | None, *, prompt: bool) -> None:
        self._tick("observe")
        super().observe(key, tokens, hidden, prompt=prompt)

    def propose(self, key: int, room: int) -> Draft | None:
        self._tick("propose")
        return super().propose(key, room)

    def close(self, key: int, *, keep: bool) -> None:
        self._tick("close")
        super().close(key, keep=keep)


@pytest.mark.parametrize("method", ["open", "observe", "propose"])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_drafters_error_ends_the_request_that_met_it(method: str, after: int) -> None:
    target = FakeTarget(seed=2)
    llm = make_llm(target, policy="eagle3", eagle3=FailingHead(method, after))
    streams = [llm.stream(prompt, PARAMS) for prompt in (PROMPT, OTHER, PROMPT[:4], OTHER[:3], [1], [2])]
    failed = 0
    for stream, prompt in zip(streams, (PROMPT, OTHER, PROMPT[:4], OTHER[:3], [1], [2]), strict=True):
        try:
            assert stream.completion().token_ids == plain(target, prompt, PARAMS).token_ids
        except Fault:
            failed += 1
    assert failed == 1
    expect_other_unharmed(llm, target)


def test_a_drafter_that_cannot_close_does_not_keep_others_from_being_freed() -> None:
    target = FakeTarget(seed=3)
    llm = make_llm(target, policy="any-match", eagle3=FailingHead("close", 1))
    assert llm.generate([PROMPT], PARAMS)[0].token_ids == plain(target, PROMPT, PARAMS).token_ids
    expect_other_unharmed(llm, target)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Fault, StopIteration])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_an_error_while_sampling_leaves_the_engine_sound(error: type[BaseException], place: int) -> None:
    target = FakeTarget(seed=4)
    llm = make_llm(target, policy="cache")
    llm.generate([PROMPT, OTHER], PARAMS)

    def processor(output: Sequence[int], logits: np.ndarray) -> None:
        if len(output) == place:
            raise error

    good = [llm.stream(OTHER, PARAMS), llm.stream(PROMPT, PARAMS)]
    bad = llm.stream(PROMPT, PARAMS, processors=[processor])
    more = llm.stream([7, 7], PARAMS)
    with pytest.raises(RuntimeError if error is StopIteration else error):
        bad.completion()
    assert len(bad.request.output) == place == len(bad.request.sampler.output)
    for stream, prompt in zip([*good, more], (OTHER, PROMPT, [7, 7]), strict=True):
        assert stream.completion().token_ids == plain(target, prompt, PARAMS).token_ids
    expect_other_unharmed(llm, target)


class BrokenPolicy(Policy):
    """Always raises."""

    name = "broken"
    uses: ClassVar[frozenset[Arm]] = frozenset({Arm.CACHE})

    def choose(self, situations: Sequence[Situation], cost: CostModel) -> list[Choice]:
        raise Fault("choose")


def test_a_policys_error_ends_its_own_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies._BUILT_IN, "broken", f"{__name__}:BrokenPolicy")
    target = FakeTarget(seed=5)
    llm = make_llm(target, policy="cache")
    good, bad = llm.stream(PROMPT, PARAMS), llm.stream(OTHER, PARAMS, policy="broken")
    assert good.completion().token_ids == plain(target, PROMPT, PARAMS).token_ids
    with pytest.raises(Fault, match="choose"):
        bad.completion()
    expect_other_unharmed(llm, target)


class FlakyTarget(FakeTarget):
    """Fails in every fifth pass."""

    calls = 0

    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        self.calls += 1
        if self.calls % 5 == 0:
            raise Fault("the device fell over")
        return super().forward(spans)


def test_a_failed_pass_is_raised_and_can_be_tried_again() -> None:
    target = FlakyTarget(seed=6)
    stream = make_llm(target, policy="cache").stream(PROMPT, PARAMS)
    faults = 0
    while not stream.request.done:
        try:
            next(stream, None)
        except Fault:
            faults += 1
    assert faults >= 2
    assert stream.completion().token_ids == plain(FakeTarget(seed=6), PROMPT, PARAMS).token_ids


def test_cancelling_a_preempted_request_frees_all() -> None:
    target = FakeTarget(seed=7)
    llm = make_llm(target, policy="cache")
    used = llm.drafters[Arm.CACHE].bytes_used  # type: ignore[attr-defined]
    for _ in range(20):
        stream = llm.stream(PROMPT, PARAMS)
        next(stream)
        assert llm.engine.preempt(stream.request)
        assert not llm.engine.preempt(stream.request)
        assert stream.cancel()
    assert llm.drafters[Arm.CACHE].bytes_used == used  # type: ignore[attr-defined]
    expect_other_unharmed(llm, target)


class SlowTarget(FakeTarget):
    """A pass takes ten milliseconds."""

    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        time.sleep(0.01)
        return super().forward(spans)


def test_cancel_gets_its_turn_while_another_thread_decodes() -> None:
    target = SlowTarget(seed=8)
    llm = make_llm(target, policy="plain", max_batch=1)
    long = llm.stream(PROMPT, SamplingParams(max_tokens=300))
    queued = llm.stream(OTHER, SamplingParams(max_tokens=3))
    worker = threading.Thread(target=queued.completion)
    worker.start()
    next(long)
    assert long.cancel()
    worker.join()
    assert len(long.request.output) < 100, "the other thread had to wait for its first token, cancel must not"
    assert len(queued.completion().token_ids) == 3


@pytest.mark.parametrize(
    "prompt", [None, 5, [["a"]], [[1.5, 2.0]], [[None]], [[True, "x"]], [{"role": "user"}]], ids=repr
)
def test_prompts_of_other_kinds_are_refused(prompt: object) -> None:
    llm = make_llm(FakeTarget())
    with pytest.raises(HVDError):
        llm.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(HVDError):
        llm.generate([[1]], {})  # type: ignore[arg-type]


def test_integer_arrays_are_prompts() -> None:
    llm = make_llm(FakeTarget())
    expected = llm.generate([PROMPT], PARAMS)[0].token_ids
    for prompt in (np.asarray(PROMPT), tuple(PROMPT), [np.asarray(PROMPT, np.int32)]):
        assert llm.generate(prompt, PARAMS)[0].token_ids == expected  # type: ignore[arg-type]
