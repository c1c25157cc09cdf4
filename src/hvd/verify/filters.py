"""The filters that turn adjusted logits into the candidates of one draw. docs/losslessness.md states the order.

Each takes and returns `(ids, logits)`: candidate token ids, ascending, and their float64 logits already divided by
the temperature. At least one candidate always remains. Ties at an edge go to the smaller id.
"""

from __future__ import annotations

import numpy as np

from hvd.types import Float64Array, Int64Array

_NUCLEUS_START = 256


def top_k(ids: Int64Array, logits: Float64Array, k: int) -> tuple[Int64Array, Float64Array]:
    """Keep the k likeliest (k <= 0: all)."""
    if k <= 0 or k >= len(logits):
        return ids, logits
    edge = np.partition(logits, len(logits) - k)[len(logits) - k]
    kept = logits > edge
    kept[np.flatnonzero(logits == edge)[: k - int(kept.sum())]] = True
    return ids[kept], logits[kept]


def top_p(ids: Int64Array, logits: Float64Array, p: float) -> tuple[Int64Array, Float64Array]:
    """Keep the smallest set of likeliest candidates whose probability, renormalised over the candidates, reaches p."""
    if p >= 1.0:
        return ids, logits
    weights = np.exp(logits - logits.max())
    kept = np.sort(_nucleus(weights, p * float(weights.sum())))
    return ids[kept], logits[kept]


def _nucleus(weights: Float64Array, mass: float) -> Int64Array:
    """Indices of the heaviest weights until their sum reaches `mass`; sorts no more of them than it needs."""
    count = _NUCLEUS_START
    while True:
        heavy = np.arange(len(weights))
        if count < len(weights):
            edge = np.partition(weights, len(weights) - count)[len(weights) - count]
            heavy = np.flatnonzero(weights >= edge)
        heavy = heavy[np.argsort(-weights[heavy], kind="stable")]
        before = np.cumsum(weights[heavy]) - weights[heavy]
        if count >= len(weights) or before[-1] >= mass:
            return heavy[: max(1, int(np.searchsorted(before, mass, side="left")))]
        count *= 16


def min_p(ids: Int64Array, logits: Float64Array, fraction: float) -> tuple[Int64Array, Float64Array]:
    """Drop candidates less likely than `fraction` times the likeliest."""
    if fraction <= 0.0:
        return ids, logits
    kept = np.exp(logits - logits.max()) >= fraction
    return ids[kept], logits[kept]
