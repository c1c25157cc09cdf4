"""What every backend does with the spans of a pass before it computes: check them, and read trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd.models.target import Span
from hvd.types import ROOT, BoolArray, Int32Array, Int64Array


def check_spans(spans: Sequence[Span], vocab_size: int, context_limit: int) -> None:
    """Refuse what `Target.forward` must not compute; called before anything is changed.

    Raises ValueError for an empty span, an id outside [0, vocab_size), parents that are not a tree in topological
    order, a span beyond the context limit, positions still pending, or a cache that appears twice.
    """
    seen: set[int] = set()
    for span in spans:
        tokens, cache = span.tokens, span.cache
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"a span needs at least one token in a flat array, got shape {tokens.shape}")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
            raise ValueError(f"token ids must be in [0, {vocab_size}), got {bad}")
        if span.parents is not None:
            _check_parents(span.parents, len(tokens))
        if cache.length + len(tokens) > context_limit:
            raise ValueError(
                f"{len(tokens)} tokens behind {cache.length} pass the context limit of {context_limit} positions"
            )
        if cache.pending:
            raise ValueError(f"{cache.pending} positions are pending in the cache; call keep() first")
        if id(cache) in seen:
            raise ValueError("a cache may appear only once in a pass")
        seen.add(id(cache))


def _check_parents(parents: Int32Array, count: int) -> None:
    if parents.shape != (count,):
        raise ValueError(f"parents must have one entry a token, {count}, got shape {parents.shape}")
    if np.any(parents < ROOT) or np.any(parents >= np.arange(count)):
        raise ValueError("each parent must be -1 or the index of an earlier token of the span")


def depths(parents: Int32Array) -> Int64Array:
    """Steps from each node up to its root: int64 [n], 0 for a child of the committed text."""
    depth = np.zeros(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            depth[node] = depth[parent] + 1
    return depth


def ancestor_mask(parents: Int32Array) -> BoolArray:
    """bool [n, n]: entry (i, j) tells whether token i attends to token j, an ancestor or itself."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask
