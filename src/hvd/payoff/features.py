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
_PROFILE_INDEX = np.array(_PROFILE) - 1
_RECENT = 3
_BITS: Float32Array = ((np.arange(256)[:, None] >> np.arange(8)) & 1).astype(np.float32)
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

_PLAIN_COLUMNS = len(TOKEN_NAMES) - 16


def state_features(history: History, draft: Draft) -> Float32Array:
    """Facts of the request and of a (non-empty) cache draft as a whole, float32 [S], columns as in `STATE_NAMES`."""
    masks = history.classes(draft.tokens)
    row = [*_text_row(history), *_policy_row(history)]
    return np.concatenate(
        (np.array(row, np.float32), _class_row(history), _draft_row(draft), _profile(draft), _BITS[masks].mean(0)),
        dtype=np.float32,
    )


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


def _class_row(history: History) -> Float32Array:
    tail = _BITS[history.tail_classes]
    return np.concatenate((_BITS[history.last_class], tail.sum(0) / np.float32(max(1, len(tail)))))


def _draft_row(draft: Draft) -> Float32Array:
    length = len(draft)
    row = [
        draft.score,
        log1p(max(0.0, draft.score)),
        log1p(draft.match_len),
        log1p(length),
        float(draft.local),
        log1p(int(draft.counts[0])),
        log1p(int(draft.parent_counts[0])),
        float(draft.probs.mean()),
        int((draft.counts == 1).sum()) / length,
    ]
    return np.array(row, np.float32)


def _profile(draft: Draft) -> Float32Array:
    """Running product of the probabilities at a few lengths; 0 behind the draft's end."""
    product = np.zeros(_PROFILE[-1], np.float32)
    head = draft.probs[: _PROFILE[-1]]
    np.multiply.accumulate(head, out=product[: len(head)])
    profile: Float32Array = product[_PROFILE_INDEX]
    return profile


def token_features(history: History, draft: Draft) -> Float32Array:
    """Facts of every place of a (non-empty) cache draft, float32 [n, T], columns as in `TOKEN_NAMES`."""
    n = len(draft)
    masks = history.classes(draft.tokens)
    out = np.empty((n, len(TOKEN_NAMES)), np.float32)
    out[:, 0] = draft.probs
    out[:, 1] = np.log1p(draft.counts, dtype=np.float32)
    out[:, 2] = np.log1p(draft.parent_counts, dtype=np.float32)
    np.multiply.accumulate(draft.probs, out=out[:, 3])
    out[:, 4] = _log_places(0, n)
    out[:, 5] = _log_places(draft.match_len, n)
    out[:, 6] = draft.counts == 1
    out[:, 7] = draft.parent_counts == 1
    out[0, 8] = 0.0
    out[1:, 8] = draft.tokens[1:] == draft.tokens[:-1]
    out[:, _PLAIN_COLUMNS : _PLAIN_COLUMNS + 8] = _BITS[masks]
    out[0, _PLAIN_COLUMNS + 8 :] = _BITS[history.last_class]
    out[1:, _PLAIN_COLUMNS + 8 :] = out[:-1, _PLAIN_COLUMNS : _PLAIN_COLUMNS + 8]
    return out


def _log_places(start: int, n: int) -> Float32Array:
    """log(1 + start + k) for k = 1..n, float32 [n]."""
    if start + n <= len(_LOG_K):
        return _LOG_K[start : start + n]
    values: NDArray[np.float32] = np.log1p(np.arange(start + 1, start + n + 1)).astype(np.float32)
    return values
