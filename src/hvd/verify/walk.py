"""Verification: walk down the draft along the target's own choices.

There is no rejection sampling and no draft distribution: at each node the *one* sampler draws the target's token from
the target's logits, the token is committed, and the walk goes on while that token is a child of the node. What is
committed is therefore what plain decoding would have written, whatever was drafted (docs/losslessness.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvd.types import ROOT, Draft, Float32Array
from hvd.verify.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a walk went.

    tokens   committed token ids, at least one: accepted draft tokens, then the bonus token
    path     draft nodes accepted, in order; len(tokens) - 1 of them
    """

    tokens: list[int]
    path: list[int]


def walk(draft: Draft | None, rows: Float32Array, sampler: Sampler, ends: Callable[[int], bool]) -> Walk:
    """Commit tokens until the draft is left or the request ends.

    rows   float [n + 1, V]: the target's logits behind the last committed token, then behind each draft node
    ends   told of each committed token; True when the request ends with it
    """
    tokens: list[int] = []
    path: list[int] = []
    node = ROOT
    while True:
        token = sampler.next(rows[node + 1])
        tokens.append(token)
        if ends(token):
            return Walk(tokens, path)
        child = _child(draft, node, token)
        if child is None:
            return Walk(tokens, path)
        path.append(child)
        node = child


def _child(draft: Draft | None, node: int, token: int) -> int | None:
    """The child of `node` that proposes `token`; children stand behind their parents."""
    if draft is None:
        return None
    behind = slice(node + 1, None)
    found = np.flatnonzero((draft.parents[behind] == node) & (draft.tokens[behind] == token))
    return node + 1 + int(found[0]) if len(found) else None


def sound_part(draft: Draft | None, vocab_size: int, room: int) -> Draft | None:
    """The part of a draft that may be shown to the target: at most `room` nodes, cut before the first node whose id is
    outside the vocabulary or whose parent does not stand before it. None when nothing is left. TypeError if they are
    not integers."""
    if draft is None:
        return None
    if draft.tokens.dtype.kind not in "iu" or draft.parents.dtype.kind not in "iu":
        raise TypeError(
            f"a draft's tokens and parents must be integers, got {draft.tokens.dtype}, {draft.parents.dtype}"
        )
    order = np.arange(len(draft))
    bad = (draft.tokens < 0) | (draft.tokens >= vocab_size) | (draft.parents < ROOT) | (draft.parents >= order)
    sound = int(np.argmax(bad)) if bad.any() else len(draft)
    length = min(sound, room)
    return draft.first(length) if length > 0 else None
