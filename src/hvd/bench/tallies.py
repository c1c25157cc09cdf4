"""Counts that add up over prompts: trees of dictionaries and lists with numbers at their ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd.training.dataset import PAYOFF
from hvd.types import Draft, Float32Array

PAYOFF_EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Where the bins of payoff histograms begin."""
CONTEXT_EDGES = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)
CURVE_LENGTHS = (1, 2, 4, PAYOFF, 8, 16, 32)
"""Lengths k at which P(accepted length >= k) is compared with what happened."""
BINS = 10
TENTHS = 10

Tree = Any
"""A number, or a dict or list of trees."""


def add(a: Tree, b: Tree) -> Tree:
    """The sum of two trees of one shape; a key that one lacks counts as nothing there."""
    if isinstance(a, dict):
        return {key: add(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key)) for key in {**a, **b}}
    if isinstance(a, list):
        return [add(x, y) for x, y in zip(a, b, strict=True)]
    return a + b


def total(trees: Iterable[Tree]) -> Tree:
    """The sum of trees; {} of none."""
    result: Tree = {}
    for tree in trees:
        result = add(result, tree) if result else tree
    return result


def bin_of(value: float, edges: tuple[int, ...]) -> int:
    """Index of the bin that a value lies in; below the first edge: the first."""
    return max(0, bisect_right(edges, value) - 1)


@dataclass(slots=True)
class PayoffTally:
    """States at which a gate stands, by what their cache draft would pay.

    bare       no draft on offer        censored   the answer was cut off within the draft: payoff unknown
    states     all others; `paid` and `drafted` are sums of their payoffs and lengths
    unlike     live states at which the replay's draft is not as long as the engine's was: 0, or the replay is wrong
    """

    bare: int = 0
    censored: int = 0
    states: int = 0
    paid: int = 0
    drafted: int = 0
    unlike: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * len(PAYOFF_EDGES))

    def count(self, draft: Draft, payoff: int) -> None:
        """Take in a state with a known payoff."""
        self.states += 1
        self.paid += payoff
        self.drafted += len(draft)
        self.histogram[bin_of(payoff, PAYOFF_EDGES)] += 1

    def tree(self) -> Tree:
        """As counts that add up."""
        return {
            "bare": self.bare,
            "censored": self.censored,
            "states": self.states,
            "paid": self.paid,
            "drafted": self.drafted,
            "unlike": self.unlike,
            "histogram": self.histogram,
        }


@dataclass(slots=True)
class GateTally:
    """Answers to "will at least PAYOFF tokens be accepted?": [true yes, false yes, missed, true no] by gate."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def count(self, gate: str, yes: bool, pays: bool) -> None:
        """Take in one answer."""
        cell = (0 if pays else 1) if yes else (2 if pays else 3)
        self.counts.setdefault(gate, [0, 0, 0, 0])[cell] += 1


@dataclass(slots=True)
class CurveTally:
    """Calibration of a survival model, by length of CURVE_LENGTHS and bin of the prediction (of BINS; empty ones are
    left out): [states, sum of predictions, how many were accepted that far]."""

    bins: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def count(self, survival: Float32Array, payoff: int) -> None:
        """Take in a forecast, float32 [n], and what came of it."""
        for length in CURVE_LENGTHS:
            if length > len(survival):
                break
            expected = float(np.clip(survival[length - 1], 0.0, 1.0))
            place = str(min(BINS - 1, int(expected * BINS)))
            row = self.bins.setdefault(str(length), {}).setdefault(place, [0, 0.0, 0])
            row[0] += 1
            row[1] = round(row[1] + expected, 6)
            row[2] += int(payoff >= length)
