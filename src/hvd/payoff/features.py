"""What the predictors see: one definition, in serving and in training. kernels.py computes it.

State features describe the request and a draft as a whole, token features one place of the draft. Both are cheap
facts: no hidden states, no logits, no target pass. They follow the list of arXiv 2606.01019 and add the trie's counts,
the profile of its probabilities, shadow hits, and what the cache's other drafts say: where the longest match and the
best-scored one agree, both are right far more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd.payoff.history import History
from hvd.types import Arm, Draft, Float32Array, Float64Array, Int32Array, Int64Array

FEATURE_VERSION = 2
"""Raised whenever a feature changes its meaning, order or number: predictors trained on another version are refused."""

CLASS_NAMES = ("space", "newline", "blank", "punct", "bracket", "delim", "digit", "special")
"""Bits 0..7 of `Tokenizer.token_classes`."""

SLOT_NAMES = ("longest", "scored", "resumed")
"""Where a draft stands among those of its request: `Situation.cache`, then its `alternatives`, a resumed copy last."""

_RECENT = 3

CONTEXT_NAMES = (
    *("log_prompt", "log_generated", "position", "hit_run", "hit_run_mean"),
    *(f"hits_{w}" for w in (1, 2, 4, 8, 16, 32, 64)),
    *(f"last_{c}" for c in CLASS_NAMES),
    *(f"tail_{c}" for c in CLASS_NAMES),
    *("score", "log_score", "log_match", "log_length", "local"),
    *("log_count_first", "log_parent_first", "prob_mean", "single_share"),
    *(f"product_{k}" for k in (1, 2, 4, 8, 16, 32)),
    *(f"draft_{c}" for c in CLASS_NAMES),
)
"""Facts of the text and of the draft alone."""

RIVAL_NAMES = (
    *("main", "resumed", "log_age", "log_origin"),
    *(
        f"{s}_{fact}"
        for s in SLOT_NAMES
        for fact in ("there", "log_same", "log_match", "prob_first", "log_count_first")
    ),
)
"""Which of the drafts on offer this one is, and what the others say; `log_same`: leading tokens in common."""

POLICY_NAMES = (
    "cache_rate",
    *(f"accepted_{i}" for i in range(1, _RECENT + 1)),
    "accepted_mean",
    "cache_accept_ratio",
)
"""State features that depend on which arms ran, for the paper's predictor alone. The others depend on the committed
text, so what was fit on one policy's cycles serves under another's."""

STATE_NAMES = (*CONTEXT_NAMES, *POLICY_NAMES)
"""Names of the columns of `state_features`."""

TOKEN_NAMES = (
    *("prob", "log_count", "log_parent", "product", "log_k", "log_depth", "single", "parent_single", "repeat"),
    *(f"as_{s}" for s in SLOT_NAMES),
    *(f"token_{c}" for c in CLASS_NAMES),
    *(f"before_{c}" for c in CLASS_NAMES),
)
"""Names of the columns of `token_features`; `as_..`: that draft is the same up to here."""


class Offers(NamedTuple):
    """A request's past and the drafts on offer, as the kernels want them: see `kernels.describe`."""

    past: Int64Array
    hits: np.uint64
    tail: np.uint64
    tokens: Int32Array
    counts: Int32Array
    parents: Int32Array
    probs: Float32Array
    facts: Float64Array
    table: NDArray[np.uint8]


def slots(drafts: Sequence[Draft]) -> list[Draft | None]:
    """Drafts of one request by slot: the first is the main one; of two for one slot the later counts."""
    placed: list[Draft | None] = [None] * len(SLOT_NAMES)
    for i, draft in enumerate(drafts):
        placed[2 if draft.age else min(i, 1)] = draft
    return placed


def distinct(drafts: Sequence[Draft]) -> list[Draft]:
    """Drafts that are not but the beginning of one before them."""
    kept: list[Draft] = []
    for draft in drafts:
        if not any(np.array_equal(other.tokens[: len(draft)], draft.tokens) for other in kept):
            kept.append(draft)
    return kept


def offers(history: History, placed: Sequence[Draft | None]) -> Offers:
    """Put a request's past and its drafts by slot together."""
    longest = max(len(draft) for draft in placed if draft is not None)
    tokens, counts, parents = np.zeros((3, len(placed), longest), np.int32)
    probs, facts = np.zeros((len(placed), longest), np.float32), np.zeros((len(placed), 6))
    for i, draft in enumerate(placed):
        if draft is not None:
            n = len(draft)
            tokens[i, :n], probs[i, :n] = draft.tokens, draft.probs
            counts[i, :n], parents[i, :n] = draft.counts, draft.parent_counts
            facts[i] = n, draft.match_len, draft.score, draft.local, draft.age, draft.origin
    tail = history.tail
    return Offers(
        np.array((history.prompt_length, history.generated_length, len(tail))),
        np.uint64(history.hits),
        np.uint64(int.from_bytes(tail, "little")),
        tokens,
        counts,
        parents,
        probs,
        facts,
        history.class_table,
    )


def features(history: History, placed: Sequence[Draft | None], slot: int) -> tuple[Float32Array, Float32Array]:
    """What a survival model sees of the (non-empty) draft in a slot.

    Returns float32 [S], columns `CONTEXT_NAMES` and `RIVAL_NAMES`, and float32 [n, T], columns `TOKEN_NAMES`.
    """
    from hvd.payoff import kernels  # Numba takes a third of a second to import

    draft = placed[slot]
    assert draft is not None
    state = np.empty(len(CONTEXT_NAMES) + len(RIVAL_NAMES), np.float32)
    token = np.empty((len(draft), len(TOKEN_NAMES)), np.float32)
    kernels.describe(slot, *offers(history, placed), state, token)
    return state, token


def state_features(history: History, draft: Draft) -> Float32Array:
    """Facts of the request and of a (non-empty) cache draft as a whole, float32 [S], columns as in `STATE_NAMES`."""
    state, _ = features(history, slots([draft]), 2 if draft.age else 0)
    return np.concatenate((state[: len(CONTEXT_NAMES)], policy_features(history)))


def token_features(history: History, draft: Draft) -> Float32Array:
    """Facts of every place of a (non-empty) cache draft alone on offer, float32 [n, T], columns as in `TOKEN_NAMES`."""
    return features(history, slots([draft]), 2 if draft.age else 0)[1]


def policy_features(history: History) -> Float32Array:
    """Columns `POLICY_NAMES`, float32; lengths as log1p, zeros before the first cycle."""
    recent = history.recent
    if not recent:
        return np.zeros(len(POLICY_NAMES), np.float32)
    cycles = len(recent)
    cached = [(drafted, accepted) for arm, drafted, accepted in recent if arm is Arm.CACHE]
    last = [log1p(accepted) for _, _, accepted in list(recent)[: -_RECENT - 1 : -1]]
    drafted = sum(d for d, _ in cached)
    row = (
        len(cached) / cycles,
        *last,
        *[0.0] * (_RECENT - len(last)),
        log1p(sum(accepted for _, _, accepted in recent) / cycles),
        sum(a for _, a in cached) / drafted if drafted else 0.0,
    )
    return np.array(row, np.float32)
