"""Where a response got stuck. Small models loop until the token cap, and loops flatter any cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hvd.traces.schema import Trace
from hvd.types import FinishReason, Int32Array

MAX_PERIOD = 128
MIN_REPEATS = 3
MIN_TOKENS = 48


def loop_onset(tokens: Int32Array) -> int | None:
    """Index of the first token that only repeats the period before it, up to the end; None without a loop.

    tokens   int32 [n], a response

    A loop is a tail with tokens[i] == tokens[i - p] for a period p <= 128 that lasts for at least 3 periods
    and 48 tokens (the first period, which is still text, counted). It may end within a period. A table, a
    list or a row of zeros inside a text is none, because the text goes on; neither is a response that stopped
    by itself: its stop token breaks the period. Of several periods the earliest onset wins.
    """
    tokens = np.asarray(tokens)
    onsets = [onset for period in _periods(len(tokens)) if (onset := _onset(tokens, period)) is not None]
    return min(onsets, default=None)


def cut_loop(trace: Trace) -> Trace:
    """The trace without its loop and the steps that reach into it; cut off as it is, it ends as LENGTH."""
    onset = loop_onset(trace.response)
    if onset is None:
        return trace
    steps = tuple(step for step in trace.steps if step.position + step.committed <= onset)
    return replace(trace, response=trace.response[:onset], finish_reason=FinishReason.LENGTH, steps=steps)


def _periods(length: int) -> range:
    return range(1, min(MAX_PERIOD, length // MIN_REPEATS) + 1) if length >= MIN_TOKENS else range(0)


def _onset(tokens: Int32Array, period: int) -> int | None:
    if tokens[-1] != tokens[-1 - period]:
        return None
    breaks = np.flatnonzero(tokens[period:] != tokens[:-period])
    repeating_from = int(breaks[-1]) + 1 + period if len(breaks) else period
    tail = len(tokens) - repeating_from + period
    return repeating_from if tail >= max(MIN_TOKENS, MIN_REPEATS * period) else None
