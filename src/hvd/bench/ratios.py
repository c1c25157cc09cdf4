"""How much faster than plain decoding, and how sure that is. All ratios are of tokens a second.

    micro     (tokens / decode seconds, added up over the group) divided by plain decoding's
    macro     geometric mean of the micro figures of the group's data sets: each data set counts once
    median    of the prompts' own ratios

Each with a 95 % interval by the percentile bootstrap over prompts (for macro: within each data set; over data sets
where one of them has a single prompt, which says nothing of its spread). The same records give the same intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd.types import Float64Array

Record = Mapping[str, Any]
"""A record of `hvd bench --json` (`hvd.bench.record.BenchRecord.as_json`)."""

PLAIN = "plain"
RESAMPLES = 1000
_TAILS = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Prompts that a method and the base both have. All float64 [n] but `dataset`, int [n], numbered from 0."""

    tokens: Float64Array
    seconds: Float64Array
    base_tokens: Float64Array
    base_seconds: Float64Array
    dataset: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def ratios(self) -> Float64Array:
        """One speed ratio a prompt."""
        return (self.tokens / self.seconds) / (self.base_tokens / self.base_seconds)


def pairs(records: Iterable[Record], policy: str, base: str = PLAIN) -> Pairs:
    """A method's records beside the base's."""
    records = list(records)
    against = {record["id"]: record for record in records if record["policy"] == base}
    both = [(r, against[r["id"]]) for r in records if r["policy"] == policy and r["id"] in against]
    names = list(dict.fromkeys(own["dataset"] for own, _ in both))
    columns = [
        (own["decoded"], own["decode_seconds"], other["decoded"], other["decode_seconds"]) for own, other in both
    ]
    table = np.array(columns, np.float64).reshape(-1, 4)
    return Pairs(
        table[:, 0],
        table[:, 1],
        table[:, 2],
        table[:, 3],
        np.array([names.index(own["dataset"]) for own, _ in both], np.int64),
    )


def micro(of: Pairs) -> Interval:
    """See the module's docstring. NaN without pairs."""
    if not len(of):
        return Interval(np.nan, np.nan, np.nan)
    draws = np.random.default_rng(0).integers(0, len(of), (RESAMPLES, len(of)))
    return _interval(_micro(of, np.arange(len(of))[None])[0], _micro(of, draws))


def macro(of: Pairs) -> Interval:
    """See the module's docstring; of one data set it is micro. NaN without pairs."""
    if not len(of) or not of.dataset.any():
        return micro(of)
    rng = np.random.default_rng(0)
    sets = [np.flatnonzero(of.dataset == dataset) for dataset in range(int(of.dataset.max()) + 1)]
    logs = np.array([np.log(_micro(of, here[None])[0]) for here in sets])
    if min(map(len, sets)) == 1:
        drawn = rng.choice(logs, (RESAMPLES, len(logs))).mean(axis=1)
    else:
        drawn = np.mean([np.log(_micro(of, rng.choice(here, (RESAMPLES, len(here))))) for here in sets], axis=0)
    return _interval(float(np.exp(logs.mean())), np.exp(drawn))


def median(values: Float64Array) -> Interval:
    """Median of values, float64 [n]."""
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    return _interval(float(np.median(values)), np.median(draws, axis=1))


def _micro(of: Pairs, rows: np.ndarray) -> Float64Array:
    """Micro ratios of draws of prompts, int [draws, n] -> float64 [draws]."""
    ours = of.tokens[rows].sum(1) / of.seconds[rows].sum(1)
    base = of.base_tokens[rows].sum(1) / of.base_seconds[rows].sum(1)
    return np.asarray(ours / base)


def _interval(value: float, drawn: Float64Array) -> Interval:
    low, high = np.percentile(drawn, _TAILS)
    return Interval(float(value), float(low), float(high))
