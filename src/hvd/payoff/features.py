"""What the predictors see: one definition, in serving and in training.

State features describe the request and the draft as a whole, token features one place of the draft. Both are cheap
facts: no hidden states, no logits, no target pass. They follow the list of arXiv 2606.01019 and add the trie's counts,
the profile of its probabilities and shadow hits.
"""

from __future__ import annotations

from math import log1p

import numpy as np
from numpy.typing import NDArray

from hvd.payoff.history import History
from hvd.types import Arm, Draft, Float32Array

FEATURE_VERSION = 1
"""Raised whenever a feature changes its meaning, order or number: predictors trained on another version are refused."""

CLASS_NAMES = ("space", "newline", "blank", "punct", "bracket", "delim", "digit", "special")
"""Bits 0..7 of `Tokenizer.token_classes`."""

_WINDOWS = (1, 2, 4, 8, 16, 32, 64)
_PROFILE = (1, 2, 4, 8, 16, 32)
_RECENT = 3
_BITS: Float32Array = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.float32)
_BIT_TUPLES = [tuple(row) for row in _BITS.tolist()]
_LOG_K: Float32Array = np.log1p(np.arange(1, 4097)).astype(np.float32)

POLICY_NAMES = (
    "cache_rate",
    *(f"accepted_{i}" for i in range(1, _RECENT + 1)),
    "accepted_mean",
    "cache_accept_ratio",
)
"""State features that depend on which arms ran. A predictor fit on one policy's cycles and used under another's should
not lean on them; all others depend on the committed text alone."""

STATE_NAMES = (
    *("log_prompt", "log_generated", "position", "hit_run", "hit_run_mean"),
    *(f"hits_{w}" for w in _WINDOWS),
    *POLICY_NAMES,
    *(f"last_{c}" for c in CLASS_NAMES),
    *(f"tail_{c}" for c in CLASS_NAMES),
    *("score", "log_score", "log_match", "log_length", "local"),
    *("log_count_first", "log_parent_first", "prob_mean", "single_share"),
    *(f"product_{k}" for k in _PROFILE),
    *(f"draft_{c}" for c in CLASS_NAMES),
)
"""Names of the columns of `state_features`."""

TOKEN_NAMES = (
    *("prob", "log_count", "log_parent", "product", "log_k", "log_depth", "single", "parent_single", "repeat"),
    *(f"token_{c}" for c in CLASS_NAMES),
    *(f"before_{c}" for c in CLASS_NAMES),
)
"""Names of the columns of `token_features`."""

_TOKEN_CLASSES = slice(len(TOKEN_NAMES) - 16, len(TOKEN_NAMES) - 8)
_BEFORE_CLASSES = slice(len(TOKEN_NAMES) - 8, len(TOKEN_NAMES))


def state_features(history: History, draft: Draft) -> Float32Array:
    """Facts of the request and of a (non-empty) cache draft as a whole, float32 [S], columns as in `STATE_NAMES`."""
    return features(history, draft)[0]


def features(history: History, draft: Draft) -> tuple[Float32Array, Float32Array]:
    """`state_features` and `token_features` of a (non-empty) cache draft; cheaper than one after the other."""
    token = token_features(history, draft)
    row = [*_text_row(history), *_policy_row(history), *_class_row(history), *_draft_row(draft, token)]
    classes = token[:, _TOKEN_CLASSES].sum(0) / np.float32(len(draft))
    return np.concatenate((np.array(row, np.float32), classes)), token


def _text_row(history: History) -> list[float]:
    prompt, generated = history.prompt_length, history.generated_length
    hits, runs = history.hits.bit_count(), history.hit_runs
    return [
        log1p(prompt),
        log1p(generated),
        generated / max(1, prompt + generated),
        log1p(history.hit_run),
        log1p(hits / max(1, runs)),
        *(history.hit_rate(window) for window in _WINDOWS),
    ]


def _policy_row(history: History) -> list[float]:
    """Columns `POLICY_NAMES`; lengths as log1p, zeros before the first cycle."""
    recent = history.recent
    if not recent:
        return [0.0] * len(POLICY_NAMES)
    cycles = len(recent)
    cached = [(drafted, accepted) for arm, drafted, accepted in recent if arm is Arm.CACHE]
    last = [log1p(accepted) for _, _, accepted in list(recent)[: -_RECENT - 1 : -1]]
    drafted = sum(d for d, _ in cached)
    return [
        len(cached) / cycles,
        *last,
        *[0.0] * (_RECENT - len(last)),
        log1p(sum(accepted for _, _, accepted in recent) / cycles),
        sum(a for _, a in cached) / drafted if drafted else 0.0,
    ]


def _class_row(history: History) -> list[float]:
    tail = history.tail
    rows = [_BIT_TUPLES[mask] for mask in tail] or [_BIT_TUPLES[0]]
    return [*rows[-1], *(sum(column) / len(rows) for column in zip(*rows, strict=True))]


def _draft_row(draft: Draft, token: Float32Array) -> list[float]:
    length = len(draft)
    products = token[:, 3]
    return [
        draft.score,
        log1p(max(0.0, draft.score)),
        log1p(draft.match_len),
        log1p(length),
        float(draft.local),
        float(token[0, 1]),
        float(token[0, 2]),
        float(draft.probs.sum()) / length,
        int(np.count_nonzero(draft.counts == 1)) / length,
        *(float(products[k - 1]) if k <= length else 0.0 for k in _PROFILE),
    ]


def token_features(history: History, draft: Draft) -> Float32Array:
    """Facts of every place of a (non-empty) cache draft, float32 [n, T], columns as in `TOKEN_NAMES`."""
    n = len(draft)
    out = np.empty((n, len(TOKEN_NAMES)), np.float32)
    out[:, 0] = draft.probs
    np.log1p(draft.counts, out=out[:, 1], dtype=np.float32, casting="same_kind")
    np.log1p(draft.parent_counts, out=out[:, 2], dtype=np.float32, casting="same_kind")
    np.multiply.accumulate(draft.probs, out=out[:, 3])
    out[:, 4] = log_places(0, n)
    out[:, 5] = log_places(draft.match_len, n)
    np.equal(draft.counts, 1, out=out[:, 6], casting="unsafe")
    np.equal(draft.parent_counts, 1, out=out[:, 7], casting="unsafe")
    out[0, 8] = 0.0
    np.equal(draft.tokens[1:], draft.tokens[:-1], out=out[1:, 8], casting="unsafe")
    classes = _BITS[history.classes(draft.tokens)]
    out[:, _TOKEN_CLASSES] = classes
    out[0, _BEFORE_CLASSES] = _BITS[history.last_class]
    out[1:, _BEFORE_CLASSES] = classes[:-1]
    return out


def log_places(start: int, n: int) -> Float32Array:
    """log(1 + start + k) for k = 1..n, float32 [n]. Read only."""
    if start + n <= len(_LOG_K):
        return _LOG_K[start : start + n]
    values: NDArray[np.float32] = np.log1p(np.arange(start + 1, start + n + 1)).astype(np.float32)
    return values
