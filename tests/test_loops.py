"""Loop onset: a model that is stuck is found, text that only looks alike is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd.traces.schema import Trace
from hvd.training.loops import cut_loop, loop_onset
from hvd.types import Arm, FinishReason, StepRecord


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(100, 10_000, length).tolist()


def onset(tokens: list[int]) -> int | None:
    return loop_onset(np.array(tokens, np.int32))


@pytest.mark.parametrize(("period", "repeats"), [(1, 48), (1, 500), (2, 24), (7, 8), (30, 3), (64, 4), (128, 3)])
@pytest.mark.parametrize("rest", [0, 1])
def test_a_stuck_model_is_found(period: int, repeats: int, rest: int) -> None:
    unit = text(period, seed=1)
    stuck = text(50) + unit * repeats + unit[: rest * (period // 2)]
    assert onset(stuck) == 50 + period


def test_the_whole_response_may_be_a_loop() -> None:
    assert onset(text(10) * 20) == 10


def test_what_is_no_loop() -> None:
    rows = [token for i in range(40) for token in (1, 2, 1000 + i, 3, 2000 + i, 4)]
    assert onset(rows) is None, "a table or a numbered list: the cells differ"
    assert onset(text(50) + [7] * 47) is None, "a rule of 47 dashes is short"
    assert onset(text(50) + text(100, 1) * 2) is None, "said twice"
    assert onset(text(50) + text(20, 1) * 30 + [2]) is None, "it stopped by itself"
    assert onset(text(50) + [0] * 400 + text(5)) is None, "a row of zeros inside a text"
    assert onset([]) is None
    assert onset(text(300)) is None


def test_code_with_similar_lines_is_no_loop() -> None:
    lines = [[5, 6, 300 + i, 7, 300 + i, 8, 9] for i in range(60)]
    assert onset([token for line in lines for token in line]) is None


@given(st.lists(st.integers(0, 2), max_size=200))
def test_the_onset_is_what_it_says(tokens: list[int]) -> None:
    found = onset(tokens)
    periods = [
        p
        for p in range(1, 129)
        for start in range(len(tokens) + 1)
        if len(tokens) - start >= max(48, 3 * p)
        and (found is None or start + p <= found)
        and all(tokens[i] == tokens[i - p] for i in range(start + p, len(tokens)))
    ]
    assert bool(periods) == (found is not None)


def test_a_cut_trace_ends_as_cut_off() -> None:
    steps = tuple(StepRecord(i, 3 + i, Arm.PLAIN, 0, 0, 1, 2) for i in range(200))
    response = np.array(text(50) + [1, 2] * 75, np.int32)
    trace = Trace("a", np.arange(3, dtype=np.int32), response, np.zeros(9, np.uint8), FinishReason.STOP, steps=steps)
    cut = cut_loop(trace)
    assert cut.response.tolist() == response[:52].tolist()
    assert cut.finish_reason is FinishReason.LENGTH
    assert len(cut.steps) == 52
    assert cut_loop(cut) is cut
