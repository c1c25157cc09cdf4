"""What the gate computes, in Numba: features of drafts, the trained model's hazards, the fallback's, their mixture.

One call does a whole step of one request: a pass of the target leaves the processor's caches full of weights, and then
a hundred small NumPy calls cost three times what they cost in a loop. Serving and training use the same functions, so
features have the same bits in both.

The drafts of a request stand in *slots*: the longest match, the best-scored one, a resumed copy (`features.py`).
Features have the columns that `features.py` names. All kernels are in one file: `hvd/jit.py` says why.
"""

from __future__ import annotations

import logging
from functools import cache
from math import exp, log, log1p

import numpy as np
from numpy.typing import NDArray

from hvd import jit
from hvd.types import Float32Array, Float64Array, Int32Array, Int64Array

SLOTS = 3
"""The longest match, the best-scored, the resumed copy."""

# Entries of a slot's `facts`.
LENGTH, MATCH, SCORE, LOCAL, AGE, ORIGIN = range(6)

PROFILE = (1, 2, 4, 8, 16, 32)
WINDOWS = (1, 2, 4, 8, 16, 32, 64)
CLASSES = 8

PLACE_FACTS = 9
PLACE_COLUMNS = PLACE_FACTS + SLOTS + 2 * CLASSES
TEXT_COLUMNS = 5 + len(WINDOWS) + 2 * CLASSES
DRAFT_COLUMNS = 9 + len(PROFILE) + CLASSES
RIVAL_COLUMNS = 4 + 5 * SLOTS
STATE_COLUMNS = TEXT_COLUMNS + DRAFT_COLUMNS + RIVAL_COLUMNS

# The fallback's buckets: depth of the match x hit rate x first place or later x slot.
DEPTH_EDGES = (2, 3, 5, 9, 17)
RATE_EDGES = (0.35, 0.75)
BUCKETS = (len(DEPTH_EDGES) + 1) * (len(RATE_EDGES) + 1) * 2 * SLOTS
TRIALS, RIGHT, FORETOLD, SHIFT = range(4)

# Rows of a forecast: survival, hazards of the fallback and of the trained model, prior and bucket of the fallback.
SURVIVAL, FALLBACK, TRAINED, PRIOR, BUCKET = range(5)

LEAST_SURVIVAL = np.float32(0.004)
"""A draft is not looked at behind the place where its survival falls below this: it is taken to end there."""

COMPILE_SECONDS = 8
"""What compiling took on two cores, about."""

_log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------------------- features


@jit.jit
def _bits(word: np.uint64) -> int:
    count = 0
    while word:
        word &= word - np.uint64(1)
        count += 1
    return count


@jit.jit
def _hit_rate(hits: np.uint64, window: int, generated: int) -> float:
    """Share of shadow hits in the last `window` generated tokens, half a hit and half a miss added."""
    mask = ~np.uint64(0) >> np.uint64(64 - window)
    return (_bits(hits & mask) + 0.5) / (min(window, generated) + 1.0)


@jit.jit
def _hit_run(hits: np.uint64) -> int:
    run = 0
    while run < 64 and (hits >> np.uint64(run)) & np.uint64(1):
        run += 1
    return run


@jit.jit
def _class_of(table: NDArray[np.uint8], token: int) -> int:
    return int(table[min(max(token, 0), table.size - 1)])


@jit.jit
def _text_row(row: Float32Array, past: Int64Array, hits: np.uint64, tail: np.uint64) -> None:
    """Facts of the text. Arguments as in `describe`."""
    prompt, generated, behind = past
    row[0], row[1] = log1p(prompt), log1p(generated)
    row[2] = generated / max(1, prompt + generated)
    row[3] = log1p(_hit_run(hits))
    row[4] = log1p(_bits(hits) / max(1, _bits(hits & ~(hits << np.uint64(1)))))
    for i, window in enumerate(WINDOWS):
        row[5 + i] = _hit_rate(hits, window, generated)
    at = 5 + len(WINDOWS)
    for bit in range(CLASSES):
        seen = 0
        for i in range(behind):
            seen += int(tail >> np.uint64(8 * i + bit)) & 1
        row[at + bit] = int(tail >> np.uint64(8 * max(0, behind - 1) + bit)) & 1
        row[at + CLASSES + bit] = seen / max(1, behind)


@jit.jit
def _draft_row(
    row: Float32Array,
    tokens: Int32Array,
    counts: Int32Array,
    parents: Int32Array,
    probs: Float32Array,
    facts: Float64Array,
    table: NDArray[np.uint8],
) -> None:
    n = int(facts[LENGTH])
    score = facts[SCORE]
    row[0], row[1], row[2], row[3], row[4] = score, log1p(max(0.0, score)), log1p(facts[MATCH]), log1p(n), facts[LOCAL]
    row[5], row[6] = log1p(counts[0]), log1p(parents[0])
    row[9:] = 0.0
    product, total, single, at = np.float32(1.0), 0.0, 0, 9 + len(PROFILE)
    for k in range(n):
        product *= probs[k]
        total += probs[k]
        single += counts[k] == 1
        for i, place in enumerate(PROFILE):
            if place == k + 1:
                row[9 + i] = product
        mask = _class_of(table, tokens[k])
        for bit in range(CLASSES):
            row[at + bit] += (mask >> bit) & 1
    row[7], row[8] = total / n, single / n
    for bit in range(CLASSES):
        row[at + bit] /= np.float32(n)


@jit.jit
def _agreements(tokens: Int32Array, facts: Float64Array, same: Int64Array) -> None:
    """same [slot, slot]: leading tokens that two drafts have in common; 0 where one is missing."""
    for i in range(SLOTS):
        for j in range(SLOTS):
            n = int(min(facts[i, LENGTH], facts[j, LENGTH]))
            k = 0
            while k < n and tokens[i, k] == tokens[j, k]:
                k += 1
            same[i, j] = k


@jit.jit
def _rival_row(
    row: Float32Array, slot: int, counts: Int32Array, probs: Float32Array, facts: Float64Array, same: Int64Array
) -> None:
    row[0], row[1] = slot == 0, facts[slot, AGE] > 0
    row[2], row[3] = log1p(facts[slot, AGE]), log1p(facts[slot, ORIGIN])
    row[4:] = 0.0
    for other in range(SLOTS):
        if facts[other, LENGTH] > 0:
            at = 4 + 5 * other
            row[at], row[at + 1], row[at + 2] = 1.0, log1p(same[slot, other]), log1p(facts[other, MATCH])
            row[at + 3], row[at + 4] = probs[other, 0], log1p(counts[other, 0])


@jit.jit
def _place_row(
    row: Float32Array,
    k: int,
    product: np.float32,
    before: int,
    mask: int,
    tokens: Int32Array,
    counts: Int32Array,
    parents: Int32Array,
    probs: Float32Array,
    match: float,
    same: Int64Array,
) -> None:
    """Facts of one place of a draft. `product`: of the probs up to it; `before`, `mask`: classes of token k-1 and k."""
    row[0], row[1], row[2], row[3] = probs[k], log1p(counts[k]), log1p(parents[k]), product
    row[4], row[5] = log1p(k + 1), log1p(match + k + 1)
    row[6], row[7] = counts[k] == 1, parents[k] == 1
    row[8] = k > 0 and tokens[k] == tokens[k - 1]
    for slot in range(SLOTS):
        row[PLACE_FACTS + slot] = k < same[slot]
    at = PLACE_FACTS + SLOTS
    for bit in range(CLASSES):
        row[at + bit] = (mask >> bit) & 1
        row[at + CLASSES + bit] = (before >> bit) & 1


@jit.jit
def _state_row(
    row: Float32Array,
    slot: int,
    past: Int64Array,
    hits: np.uint64,
    tail: np.uint64,
    tokens: Int32Array,
    counts: Int32Array,
    parents: Int32Array,
    probs: Float32Array,
    facts: Float64Array,
    same: Int64Array,
    table: NDArray[np.uint8],
) -> None:
    middle, end = TEXT_COLUMNS, TEXT_COLUMNS + DRAFT_COLUMNS
    _text_row(row[:middle], past, hits, tail)
    _draft_row(row[middle:end], tokens[slot], counts[slot], parents[slot], probs[slot], facts[slot], table)
    _rival_row(row[end:], slot, counts, probs, facts, same)


@jit.jit
def _last_class(past: Int64Array, tail: np.uint64) -> int:
    return int(tail >> np.uint64(8 * max(0, past[2] - 1))) & 255


@jit.jit
def describe(
    slot: int,
    past: Int64Array,
    hits: np.uint64,
    tail: np.uint64,
    tokens: Int32Array,
    counts: Int32Array,
    parents: Int32Array,
    probs: Float32Array,
    facts: Float64Array,
    table: NDArray[np.uint8],
    state: Float32Array,
    place: Float32Array,
) -> None:
    """Features of the draft in `slot`.

    past                     int64 [3]       prompt length, generated length, tokens in the tail
    hits, tail               uint64          `History.hits`; class masks of the last tokens, a byte each, newest highest
    tokens, counts, parents  int32 [SLOTS, m]
    probs                    float32 [SLOTS, m]
    facts                    float64 [SLOTS, 6]   LENGTH (0 = empty slot) ... ORIGIN
    table                    uint8 [V+1]     class masks by token id
    state, place             written: float32 [STATE_COLUMNS], float32 [n, PLACE_COLUMNS]
    """
    same = np.zeros((SLOTS, SLOTS), np.int64)
    _agreements(tokens, facts, same)
    _state_row(state, slot, past, hits, tail, tokens, counts, parents, probs, facts, same, table)
    product, before = np.float32(1.0), _last_class(past, tail)
    for k in range(int(facts[slot, LENGTH])):
        product *= probs[slot, k]
        mask = _class_of(table, tokens[slot, k])
        _place_row(
            place[k], k, product, before, mask, tokens[slot], counts[slot], parents[slot], probs[slot],
            facts[slot, MATCH], same[slot],
        )  # fmt: skip
        before = mask


# ------------------------------------------------------------------------------------------------------- models


@jit.jit
def _sigmoid(x: float | np.float32) -> np.float32:
    return np.float32(1.0 / (1.0 + exp(-min(60.0, max(-60.0, x)))))


@jit.jit
def _add_product(out: Float32Array, row: Float32Array, weights: Float32Array) -> None:
    """out += row @ weights"""
    for i in range(row.size):
        x = row[i]
        if x != 0.0:
            for j in range(out.size):
                out[j] += x * weights[i, j]


@jit.jit
def _rest(sizes: Int64Array, flat: Float32Array, x: Float32Array, y: Float32Array) -> np.float32:
    """The layers behind the first, whose output is x. `flat` holds each one's weights, then its bias."""
    at = 0
    for layer in range(sizes.size - 1):
        rows, columns = sizes[layer], sizes[layer + 1]
        y[:columns] = flat[at + rows * columns : at + rows * columns + columns]
        for i in range(rows):
            value = x[i]
            if value > 0.0:
                start = at + i * columns
                for j in range(columns):
                    y[j] += value * flat[start + j]
        x, y = y, x
        at += (rows + 1) * columns
    logit: np.float32 = x[0]
    return logit


@jit.jit
def _prior(k: int, count: int, parent: int, match: float, run: float, near: float, far: float) -> np.float32:
    """The fallback's formula: see `FallbackSurvival`."""
    odds = log((count + 0.2) / (max(parent - count, 0) + 0.4))
    logit = 0.9 * odds + 0.61 * log1p(max(0.0, match - 1.0) + k + 1.0) + 0.62 * log1p(k + 1.0)
    logit += -2.36 + 0.11 * far + 0.36 * run
    if k == 0:
        logit += 0.93 + 0.21 * near
    return np.float32(logit)


@jit.jit
def _bucket(slot: int, k: int, match: float, base: int) -> int:
    depth = 0
    for edge in DEPTH_EDGES:
        depth += match + k + 1 >= edge
    return ((slot * (len(DEPTH_EDGES) + 1) + depth) * 2 + (k == 0)) * (len(RATE_EDGES) + 1) + base


@jit.jit
def _odds(probability: float) -> float:
    return log(probability / (1.0 - probability))


@jit.jit
def forecast(
    past: Int64Array,
    hits: np.uint64,
    tail: np.uint64,
    tokens: Int32Array,
    counts: Int32Array,
    parents: Int32Array,
    probs: Float32Array,
    facts: Float64Array,
    table: NDArray[np.uint8],
    place_weights: Float32Array,
    state_weights: Float32Array,
    bias: Float32Array,
    sizes: Int64Array,
    flat: Float32Array,
    trust: float,
    shift: float,
    outcomes: Float64Array,
    out: Float32Array,
    lengths: Int64Array,
) -> None:
    """Survival of every draft on offer. Arguments before `place_weights` as in `describe`.

    place_weights, state_weights, bias   float32 [PLACE_COLUMNS, h], [STATE_COLUMNS, h], [h]: the trained model's first
                                         layer; h = 0: there is none
    sizes, flat    int64 [layers], float32: sizes from the first layer's output on, the weights and biases behind it
    trust, shift   weight of the trained model in the mixture, what is added to its log-odds
    outcomes       float64 [4, BUCKETS]    the fallback's
    out            written: float32 [SLOTS, 5, m]: rows SURVIVAL ... BUCKET
    lengths        written: int64 [SLOTS]: places foretold; 0 for empty slots and for drafts that are but the beginning
                   of one in an earlier slot
    """
    same = np.zeros((SLOTS, SLOTS), np.int64)
    _agreements(tokens, facts, same)
    hidden = bias.size
    width = max(hidden, sizes.max() if sizes.size else 0)
    state, row = np.zeros(STATE_COLUMNS, np.float32), np.zeros(PLACE_COLUMNS, np.float32)
    base, x, y = bias.copy(), np.zeros(width, np.float32), np.zeros(width, np.float32)
    near, far = _odds(_hit_rate(hits, 8, past[1])), _odds(_hit_rate(hits, 64, past[1]))
    rate, run = _hit_rate(hits, 16, past[1]), log1p(_hit_run(hits))
    column = int(rate > RATE_EDGES[0]) + int(rate > RATE_EDGES[1])
    for slot in range(SLOTS):
        lengths[slot] = n = int(facts[slot, LENGTH])
        for earlier in range(slot):
            if same[slot, earlier] == n:
                lengths[slot] = 0
        if lengths[slot] == 0:
            continue
        match = facts[slot, MATCH]
        if hidden:
            _state_row(state, slot, past, hits, tail, tokens, counts, parents, probs, facts, same, table)
            base[:] = bias
            _add_product(base, state, state_weights)
        product, survival, before = np.float32(1.0), np.float32(1.0), _last_class(past, tail)
        for k in range(n):
            prior = _prior(k, counts[slot, k], parents[slot, k], match, run, near, far)
            bucket = _bucket(slot, k, match, column)
            hazard = fallback = _sigmoid(prior + outcomes[SHIFT, bucket])
            trained = np.float32(0.0)
            if hidden:
                product *= probs[slot, k]
                mask = _class_of(table, tokens[slot, k])
                _place_row(
                    row, k, product, before, mask, tokens[slot], counts[slot], parents[slot], probs[slot], match,
                    same[slot],
                )  # fmt: skip
                before = mask
                x[:hidden] = base
                _add_product(x[:hidden], row, place_weights)
                trained = _sigmoid(_rest(sizes, flat, x, y) + shift)
                hazard = fallback + np.float32(trust) * (trained - fallback)
            survival *= hazard
            out[slot, SURVIVAL, k], out[slot, FALLBACK, k], out[slot, TRAINED, k] = survival, fallback, trained
            out[slot, PRIOR, k], out[slot, BUCKET, k] = prior, bucket
            if survival < LEAST_SURVIVAL:
                lengths[slot] = k + 1
                break


@jit.jit
def learn(
    prior: Float32Array, bucket: Float32Array, tried: int, accepted: int, outcomes: Float64Array, trials: float,
    memory: float,
) -> None:  # fmt: skip
    """Take in an outcome: of `tried` tokens the first `accepted` were right (then one was wrong, if any was left).

    outcomes   float64 [4, BUCKETS]   TRIALS, RIGHT, FORETOLD by the formula, and what they amount to: SHIFT
    trials     that the formula's own expectation is worth
    memory     trials that a bucket holds at most
    """
    for k in range(min(tried, accepted + 1, prior.size)):
        where = int(bucket[k])
        outcomes[TRIALS, where] += 1.0
        outcomes[RIGHT, where] += k < accepted
        outcomes[FORETOLD, where] += _sigmoid(prior[k])
    for k in range(min(tried, accepted + 1, prior.size)):
        where = int(bucket[k])
        if outcomes[TRIALS, where] > memory:
            outcomes[:SHIFT, where] *= memory / outcomes[TRIALS, where]
        mean = min(0.99, max(0.01, outcomes[FORETOLD, where] / max(outcomes[TRIALS, where], 1e-9)))
        rate = (outcomes[RIGHT, where] + trials * mean) / (outcomes[TRIALS, where] + trials)
        outcomes[SHIFT, where] = log(rate * (1.0 - mean) / (mean * (1.0 - rate)))


@jit.jit
def log_losses(
    fallback: Float32Array, trained: Float32Array, tried: int, accepted: int, floor: float
) -> tuple[float, float, float]:
    """-log P(outcome) by both hazards: the first `accepted` of `tried` were right, the next one, if tried, wrong.

    Third: the tokens that `trained` expected of those that were reached to be right.
    """
    one = other = expected = 0.0
    for k in range(min(tried, accepted + 1)):
        first, second = float(fallback[k]), float(trained[k])
        expected += second
        if k >= accepted:
            first, second = 1.0 - first, 1.0 - second
        one -= log(max(first, floor))
        other -= log(max(second, floor))
    return one, other, expected


# -------------------------------------------------------------------------------------------------- compilation


@cache
def warm_up() -> None:
    """Load or compile every kernel now rather than within a request; says so, once after an install."""
    if not jit.compiled(forecast):
        _log.info("compiling the gate, once (about %d s)", COMPILE_SECONDS)
    m, none = 2, np.zeros(0, np.int64)
    ints, floats = np.zeros((SLOTS, m), np.int32), np.zeros((SLOTS, m), np.float32)
    facts = np.zeros((SLOTS, 6))
    offers = (np.zeros(3, np.int64), np.uint64(0), np.uint64(0), ints, ints, ints, floats, facts, np.zeros(1, np.uint8))
    outcomes, out, row = np.zeros((4, BUCKETS)), np.zeros((SLOTS, 5, m), np.float32), np.zeros(m, np.float32)
    empty = np.zeros((0, 0), np.float32)
    forecast(*offers, empty, empty, row[:0], none, row[:0], 0.0, 0.0, outcomes, out, np.zeros(SLOTS, np.int64))
    describe(0, *offers, np.zeros(STATE_COLUMNS, np.float32), np.zeros((m, PLACE_COLUMNS), np.float32))
    learn(row, row, 1, 0, outcomes, 8.0, 200.0)
    log_losses(row, row, 1, 0, 1e-3)
