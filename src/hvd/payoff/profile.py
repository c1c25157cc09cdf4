"""Measures what a target's passes and a head's drafts cost here: `hvd profile`, and a quick version at start-up."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hvd.drafters.base import Drafter
from hvd.errors import ConfigError, PredictorError
from hvd.models.onnx.cache import cache_root
from hvd.models.target import KVCache, Span, Target
from hvd.payoff.cost import CostModel, Surface, hardware_fingerprint
from hvd.types import Float64Array, Int32Array

Progress = Callable[[str, int, int], None]
"""Told (what, done, of how many)."""

QUICK_WIDTHS = (1, 2, 4, 8, 16, 32)
QUICK_CONTEXTS = (32, 256)
QUICK_SECONDS = 2.2
FULL_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
FULL_CONTEXTS = (32, 512, 2048, 4096)
FULL_REPEATS = 7
EAGLE3_LENGTHS = (1, 2, 4, 8)
KERNELS = 3
"""Raised when passes come to cost something else, so that no older measurement is taken for one of today."""
BACKLOG = 128

_LOG = logging.getLogger(__name__)
_CHUNK = 128
_KEY = -1


def profile(
    target: Target, eagle3: Drafter | None = None, quick: bool = True, progress: Progress | None = None
) -> CostModel:
    """Measure. `quick` stops repeating after about two seconds; the full profile takes minutes and knows long contexts.

    progress   called with ("profile", done, of how many)
    """
    spec = target.spec
    report = progress or (lambda what, done, total: None)
    limit = spec.context_limit
    widths = [w for w in (QUICK_WIDTHS if quick else FULL_WIDTHS) if spec.min_width <= w <= max(1, limit // 2)]
    contexts = [c for c in (QUICK_CONTEXTS if quick else FULL_CONTEXTS) if c + widths[-1] <= limit] or [0]
    deadline = time.perf_counter() + QUICK_SECONDS if quick else None
    verify = _measure_target(target, widths, contexts, deadline, report)
    drafting, backlog = _measure_head(target, eagle3, min(limit, 64)) if eagle3 is not None else (None, 0.0)
    return CostModel(
        verify,
        eagle3=drafting,
        backlog_seconds=backlog,
        min_width=spec.min_width,
        shared_passes=spec.shared_passes,
        hardware=hardware_fingerprint(),
        model=model_fingerprint(target),
    )


def model_fingerprint(target: Target) -> str:
    """Hex digest of the target, its backend and number format, as this program computes it."""
    spec = target.spec
    return hashlib.sha256(f"{spec.fingerprint} {spec.backend} {spec.weights} {KERNELS}".encode()).hexdigest()[:16]


def cost_path(target: Target, eagle3: Drafter | None = None) -> Path:
    """Where this machine's costs of this model, and of this head's drafts, are kept."""
    head = f"-eagle3-{eagle3.fingerprint}" if eagle3 is not None else ""
    return cache_root() / "cost" / f"{model_fingerprint(target)}-{hardware_fingerprint()}{head}.json"


def load_or_profile(target: Target, eagle3: Drafter | None = None, progress: Progress | None = None) -> CostModel:
    """The kept costs of this model on this machine; when none can be read, those of a quick profile, which are kept.

    Where they can't be, the log has a warning, and the next start measures again.
    """
    path = cost_path(target, eagle3)
    try:
        return CostModel.load(path, model=model_fingerprint(target), hardware=hardware_fingerprint())
    except PredictorError:  # made by ourselves in a cache folder: making it again is all there is to do
        cost = profile(target, eagle3, quick=True, progress=progress)
        try:
            cost.save(path)
        except ConfigError as error:
            _LOG.warning("can't keep the measured costs in %s (%s); set HVD_CACHE to another place", path.parent, error)
        return cost


def _measure_target(
    target: Target, widths: Sequence[int], contexts: Sequence[int], deadline: float | None, report: Progress
) -> Surface:
    cache = target.open()
    rows: list[Float64Array] = []
    try:
        for i, context in enumerate(contexts):
            report("profile", i, len(contexts))
            _fill(target, cache, context)
            share = None if deadline is None else (deadline - time.perf_counter()) / (len(contexts) - i)
            rows.append(_measure_widths(target, cache, widths, share))
        report("profile", len(contexts), len(contexts))
    finally:
        cache.close()
    return Surface(tuple(widths), tuple(contexts), np.array(rows))


def _tokens(target: Target, count: int) -> Int32Array:
    """Ids spread over the vocabulary, always the same."""
    return (np.arange(count, dtype=np.int64) * 7919 % target.spec.vocab_size).astype(np.int32)


def _fill(target: Target, cache: KVCache, length: int) -> None:
    while cache.length < length:
        count = min(_CHUNK, length - cache.length)
        target.forward([Span(cache, _tokens(target, count), rows="none")])
        cache.keep(range(count))


def _measure_widths(target: Target, cache: KVCache, widths: Sequence[int], seconds: float | None) -> Float64Array:
    """Least seconds at every width. Widths take turns, so that a busy moment doesn't fall on one of them alone."""
    end = None if seconds is None else time.perf_counter() + seconds
    best = np.full(len(widths), np.inf)
    _pass(target, cache, widths[0])  # first passes pay for memory and kernels
    for _ in range(FULL_REPEATS):
        for i, width in enumerate(widths):
            best[i] = min(best[i], _pass(target, cache, width))
        if end is not None and time.perf_counter() > end:
            break
    return best


def _pass(target: Target, cache: KVCache, width: int) -> float:
    tokens = _tokens(target, width)
    started = time.perf_counter()
    target.forward([Span(cache, tokens)])
    seconds = time.perf_counter() - started
    cache.keep(())
    return seconds


def _measure_head(target: Target, head: Drafter, context: int) -> tuple[Surface, float]:
    """Drafting by length with one token of backlog, and the seconds of each further token of it.

    As when decoding, a pass of the target comes before each draft: it leaves nothing of a head in the processor's
    caches, and a head that finds its weights there is several times as fast.
    """
    head, cache = head.unhesitating(), target.open()
    head.open(_KEY)
    try:
        _observe(target, head, context // 2, prompt=True)
        head.propose(_KEY, 1)
        lengths = [n for n in EAGLE3_LENGTHS if n <= head.limit(_KEY)] or [1]
        seconds = [_least_draft(target, cache, head, length, backlog=1) for length in lengths]
        backlog = max(2, min(BACKLOG, target.spec.context_limit // 8, head.context_limit // 8))
        slow = _least_draft(target, cache, head, 1, backlog)
    finally:
        head.close(_KEY, keep=False)
        cache.close()
    each = max(0.0, (slow - seconds[0]) / (backlog - 1))
    return Surface(tuple(lengths), (0,), np.array([seconds])), each


def _least_draft(target: Target, cache: KVCache, head: Drafter, length: int, backlog: int) -> float:
    least = np.inf
    for _ in range(3):
        _observe(target, head, backlog, prompt=False)
        _pass(target, cache, target.spec.min_width)
        started = time.perf_counter()
        head.propose(_KEY, length)
        least = min(least, time.perf_counter() - started)
    return float(least)


def _observe(target: Target, head: Drafter, count: int, *, prompt: bool) -> None:
    spec = target.spec
    hidden = np.zeros((count, len(spec.aux_layers) * spec.hidden_size), np.float32) if head.wants_hidden else None
    head.observe(_KEY, _tokens(target, count), hidden, prompt=prompt)
