"""Adds up benchmark records: how much faster than plain decoding, by data set, by category and over all.

    micro     (tokens / decode seconds, added up over the group) divided by plain decoding's
    macro     geometric mean of the micro figures of the group's data sets: each data set counts once
    median    of the prompts' own ratios, with a 95 % bootstrap interval

Loops flatter every cache, so all is given twice: with all prompts, and without those whose plain output loops (they are
left out whole; what stays is not cut).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hvd.types import Float64Array

Record = Mapping[str, Any]
"""A record of `hvd bench --json` (`runner.BenchRecord.as_json`)."""

PLAIN = "plain"
RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one group of prompts.

    loops       True: all prompts; False: those whose plain output loops are left out
    level       "dataset", "category" or "all"
    median_low, median_high   95 % bootstrap interval of the median
    positions_per_token       positions computed for each token emitted: the price of verification, without a clock
    cycle_share               share of cycles by arm
    phase_share               share of the decode time by phase
    """

    loops: bool
    level: str
    group: str
    policy: str
    prompts: int
    tokens: int
    tokens_per_second: float
    speedup_micro: float
    speedup_macro: float
    speedup_median: float
    median_low: float
    median_high: float
    tokens_per_cycle: float
    positions_per_token: float
    acceptance: float
    cycle_share: dict[str, float]
    phase_share: dict[str, float]


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """The `summary` of `hvd bench --json`: `rows`, and whether every output was plain decoding's."""
    looped = {record["id"] for record in records if record["policy"] == PLAIN and record["loop_onset"] is not None}
    rows = [*_rows(records, True), *_rows([record for record in records if record["id"] not in looped], False)]
    different = [record for record in records if not record["identical"]]
    return {
        "identical": not different,
        "different": [{key: record[key] for key in ("id", "policy", "differs_at")} for record in different],
        "prompts": len({record["id"] for record in records}),
        "looped": len(looped),
        "rows": [asdict(row) for row in rows],
    }


def _rows(records: Sequence[Record], loops: bool) -> list[Row]:
    """Rows of every group, data sets first, the whole last."""
    keep = [record for record in records if record["tokens"] > 0 and record["decode_seconds"] > 0]
    policies = list(dict.fromkeys(record["policy"] for record in keep))
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in keep:
        for level, group in (("dataset", record["dataset"]), ("category", record["category"]), ("all", "all")):
            groups.setdefault((level, group), []).append(record)
    ordered = sorted(groups, key=lambda key: (("dataset", "category", "all").index(key[0]), key[1]))
    return [
        _row(groups[key], loops, *key, policy) for key in ordered for policy in policies if _has(groups[key], policy)
    ]


def _has(records: Iterable[Record], policy: str) -> bool:
    return any(record["policy"] == policy for record in records)


def _row(records: Sequence[Record], loops: bool, level: str, group: str, policy: str) -> Row:
    own = [record for record in records if record["policy"] == policy]
    tokens, cycles = _total(own, "tokens"), _total(own, "cycles")
    median, low, high = median_interval(_ratios(records, policy))
    return Row(
        loops=loops,
        level=level,
        group=group,
        policy=policy,
        prompts=len(own),
        tokens=int(tokens),
        tokens_per_second=tokens / _total(own, "decode_seconds"),
        speedup_micro=micro(records, policy),
        speedup_macro=macro(records, policy),
        speedup_median=median,
        median_low=low,
        median_high=high,
        tokens_per_cycle=tokens / cycles,
        positions_per_token=_total(own, "positions") / tokens,
        acceptance=_total(own, "accepted") / max(1.0, _total(own, "drafted")),
        cycle_share=_cycle_share(own),
        phase_share=_phase_share(own),
    )


def _total(records: Iterable[Record], key: str) -> float:
    return float(sum(record[key] for record in records))


def micro(records: Iterable[Record], policy: str) -> float:
    """Tokens a second of a policy over plain decoding's, on the prompts that both have."""
    pairs = _pairs(records, policy)
    ours = _total((own for own, _ in pairs), "tokens") / _total((own for own, _ in pairs), "decode_seconds")
    plain = _total((base for _, base in pairs), "tokens") / _total((base for _, base in pairs), "decode_seconds")
    return ours / plain


def macro(records: Sequence[Record], policy: str) -> float:
    """Geometric mean of `micro` over data sets."""
    datasets = dict.fromkeys(record["dataset"] for record in records if record["policy"] == policy)
    each = [micro([record for record in records if record["dataset"] == name], policy) for name in datasets]
    return float(np.exp(np.mean(np.log(each))))


def _ratios(records: Iterable[Record], policy: str) -> Float64Array:
    """One speed ratio a prompt."""
    pairs = _pairs(records, policy)
    rate = np.asarray([[r["tokens"] / r["decode_seconds"] for r in pair] for pair in pairs], np.float64)
    return np.asarray(rate[:, 0] / rate[:, 1])


def _pairs(records: Iterable[Record], policy: str) -> list[tuple[Record, Record]]:
    """(the policy's record, plain decoding's) of each prompt."""
    records = list(records)
    plain = {record["id"]: record for record in records if record["policy"] == PLAIN}
    own = (record for record in records if record["policy"] == policy)
    return [(record, plain[record["id"]]) for record in own if record["id"] in plain]


def median_interval(values: Float64Array) -> tuple[float, float, float]:
    """Median and its 95 % interval by the percentile bootstrap; the same values give the same interval."""
    draws = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def _cycle_share(records: Sequence[Record]) -> dict[str, float]:
    counts: dict[str, int] = {}
    for record in records:
        for arm, of in record["arms"].items():
            counts[arm] = counts.get(arm, 0) + of["cycles"]
    return {arm: count / sum(counts.values()) for arm, count in counts.items()}


def _phase_share(records: Sequence[Record]) -> dict[str, float]:
    seconds = _total(records, "decode_seconds")
    return {phase: sum(record["phases"][phase] for record in records) / seconds for phase in records[0]["phases"]}
