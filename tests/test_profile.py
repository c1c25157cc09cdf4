"""Profiling, on a target whose clock is ours: what is measured, what is kept, and that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvd.drafters.base import Drafter
from hvd.models.target import KVCache, Span, SpanOutput, Target, TargetSpec
from hvd.payoff import profile as profiling
from hvd.payoff.cost import CostModel
from hvd.payoff.profile import cost_path, load_or_profile, profile
from hvd.types import Arm, Draft, Float32Array, Int32Array

SPEC = TargetSpec("fake", "llama", 100, 8, 4, 8192, (1, 2, 3), "f00d", "onnx", "int4", min_width=2, shared_passes=False)


class Clock:
    """Stands for `time.perf_counter`; passes and drafts move it on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Cache(KVCache):
    def __init__(self) -> None:
        self.length = self.pending = 0
        self.closed = False

    def keep(self, path: Sequence[int]) -> None:
        self.length += len(path)
        self.pending = 0

    def rollback(self, length: int) -> None:
        self.length, self.pending = length, 0

    def close(self) -> None:
        self.closed = True


class FakeTarget(Target):
    """A pass takes 10 ms + 1 ms a position + 1 us for each position attended to; now and then ten times as long."""

    def __init__(self, clock: Clock, spec: TargetSpec = SPEC, hiccup_every: int = 0) -> None:
        self.spec = spec
        self.clock = clock
        self.hiccup_every = hiccup_every
        self.caches: list[Cache] = []
        self.passes: list[tuple[int, int]] = []

    def open(self) -> Cache:
        self.caches.append(Cache())
        return self.caches[-1]

    def forward(self, spans: Sequence[Span]) -> list[SpanOutput]:
        (span,) = spans
        assert span.cache.pending == 0
        assert span.cache.length + len(span.tokens) <= self.spec.context_limit
        assert 0 <= span.tokens.min() <= span.tokens.max() < self.spec.vocab_size
        width = len(span.tokens)
        self.passes.append((width, span.cache.length))
        seconds = 0.010 + 0.001 * max(width, self.spec.min_width) + 1e-6 * span.cache.length
        hiccup = self.hiccup_every and len(self.passes) % self.hiccup_every == 0
        self.clock.now += seconds * (10 if hiccup else 1)
        span.cache.pending = width
        return [SpanOutput(np.zeros((width, self.spec.vocab_size), np.float32), None)]


class FakeHead(Drafter):
    """Catching up takes 0.5 ms a token, drafting 2 ms a token."""

    arm = Arm.EAGLE3

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.live: dict[int, int] = {}

    @property
    def wants_hidden(self) -> bool:
        return True

    def open(self, key: int, scope: str = "") -> None:
        self.live[key] = 0

    def observe(self, key: int, tokens: Int32Array, hidden: Float32Array | None, *, prompt: bool) -> None:
        assert hidden is not None
        assert hidden.shape == (len(tokens), 24)
        self.live[key] += len(tokens)

    def propose(self, key: int, room: int) -> Draft | None:
        self.clock.now += 0.0005 * self.live[key] + 0.002 * room
        self.live[key] = 0
        return Draft.chain(np.zeros(room, np.int32), Arm.EAGLE3)

    def close(self, key: int, *, keep: bool) -> None:
        assert not keep
        del self.live[key]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(profiling, "time", clock)
    return clock


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("hiccup_every", [0, 9])
def test_costs_are_what_passes_took(clock: Clock, quick: bool, hiccup_every: int) -> None:
    target = FakeTarget(clock, hiccup_every=hiccup_every)
    cost = profile(target, quick=quick)
    for width, context in ((2, 32), (8, 32), (32, 32), (24, 256), (8, 150)):
        assert cost.verify(width, context) == pytest.approx(0.010 + 0.001 * width + 1e-6 * context, rel=0.02)
    assert cost.verify(1, 32) == cost.verify(2, 32)
    assert (cost.min_width, cost.shared_passes) == (2, False)
    assert all(cache.closed for cache in target.caches)
    if not quick:
        assert cost.verify(64, 4096) == pytest.approx(0.010 + 0.064 + 0.0041, rel=0.02)


def test_a_quick_profile_is_quick(clock: Clock) -> None:
    profile(FakeTarget(clock))
    assert clock.now < 3.0


def test_the_head_is_measured_and_left_as_it_was(clock: Clock) -> None:
    head = FakeHead(clock)
    cost = profile(FakeTarget(clock), head)
    assert cost.eagle3(4, 1, 100) == pytest.approx(0.0085)
    assert cost.eagle3(1, 11, 100) == pytest.approx(0.0075)
    assert head.live == {}


def test_the_head_is_measured_as_it_runs_behind_a_pass_of_the_target(clock: Clock) -> None:
    """A second draft in a row finds the head's weights in the processor's caches, which tells nothing of decoding."""
    target = FakeTarget(clock)

    class Cold(FakeHead):
        passes = 0

        def propose(self, key: int, room: int) -> Draft | None:
            if len(target.passes) > self.passes:
                clock.now += 0.003
            self.passes = len(target.passes)
            return super().propose(key, room)

    cost = profile(target, Cold(clock))
    assert cost.eagle3(4, 1, 100) == pytest.approx(0.0115)
    assert all(cache.closed for cache in target.caches)


def test_costs_of_one_head_are_not_those_of_another(clock: Clock) -> None:
    class Other(FakeHead):
        fingerprint = "other"

    target = FakeTarget(clock)
    paths = {cost_path(target), cost_path(target, FakeHead(clock)), cost_path(target, Other(clock))}
    assert len(paths) == 3


@pytest.mark.parametrize("limit", [8, 40, 64, 300])
def test_short_contexts_are_respected(clock: Clock, limit: int) -> None:
    target = FakeTarget(clock, replace(SPEC, context_limit=limit, min_width=1))
    cost = profile(target, quick=False)
    assert np.isfinite(cost.verify_curve(64, 1000)).all()


def test_progress_is_told(clock: Clock) -> None:
    told: list[tuple[str, int, int]] = []
    profile(FakeTarget(clock), progress=lambda *args: told.append(args))
    assert told[0][1:] == (0, 2)
    assert told[-1][1:] == (2, 2)


def test_costs_are_kept_and_found_again(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_CACHE", str(tmp_path))
    target = FakeTarget(clock)
    first = load_or_profile(target)
    passes = len(target.passes)
    again = load_or_profile(target)
    assert len(target.passes) == passes
    assert (again.verify_curve(40, 99) == first.verify_curve(40, 99)).all()
    other = FakeTarget(clock, replace(SPEC, weights="int8"))
    load_or_profile(other)
    assert other.passes
    load_or_profile(target, FakeHead(clock))
    assert len(target.passes) > passes
    cost_path(target).write_bytes(b"torn")
    load_or_profile(target)
    assert CostModel.load(cost_path(target)).verify(8, 32) == pytest.approx(0.018, rel=0.02)


def test_costs_that_can_not_be_kept_are_used(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cost").write_text("a file in the folder's place")
    monkeypatch.setenv("HVD_CACHE", str(tmp_path))
    assert load_or_profile(FakeTarget(clock)).verify(8, 32) == pytest.approx(0.018, rel=0.02)
    assert "can't keep the measured costs" in caplog.text


MODEL = Path(os.environ.get("HVD_TEST_MODELS", "~/.cache/hvd/models")).expanduser() / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.model
def test_a_real_target_is_profiled() -> None:
    from hvd.models.loader import load_target

    target, _ = load_target(str(MODEL))
    cost = profile(target)
    curve = cost.verify_curve(64, 512)
    assert (curve > 0).all()
    assert curve[0] == curve[cost.min_width - 1]
    assert curve[63] > curve[1]
