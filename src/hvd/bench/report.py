"""Adds up benchmark records: how much faster than plain decoding, by data set, by category and over all.

`hvd.bench.ratios` says what micro, macro and median are. Loops flatter every cache, so all is given twice: with all
prompts, and without those whose plain output loops (they are left out whole; what stays is not cut).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd.bench import ratios
from hvd.bench.buckets import by_position, by_prompt_length
from hvd.bench.ratios import PLAIN, Record
from hvd.training.report import without_nan

AGAIN = "plain-again"
FEW_PROMPTS = 10
"""Prompts below which figures say next to nothing."""
LEVELS = ("dataset", "category", "all")


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one group of prompts.

    loops       True: all prompts; False: those whose plain output loops are left out
    level       "dataset", "category" or "all"
    peer        the peer whose method it is; None for ours
    .._low, .._high           95 % bootstrap intervals
    tokens_per_cycle, positions_per_token, cycles_per_1000   None for peers, which do not tell
    positions_per_token       positions computed for each token emitted: the price of verification, without a clock
    cycle_share               share of cycles by arm
    phase_share               share of the decode time by phase
    cycle_ms                  milliseconds of a cycle by phase
    """

    loops: bool
    level: str
    group: str
    policy: str
    peer: str | None
    prompts: int
    tokens: int
    tokens_per_second: float
    speedup_micro: float
    micro_low: float
    micro_high: float
    speedup_macro: float
    macro_low: float
    macro_high: float
    speedup_median: float
    median_low: float
    median_high: float
    tokens_per_cycle: float | None
    cycles_per_1000: float | None
    positions_per_token: float | None
    acceptance: float
    cycle_share: dict[str, float]
    phase_share: dict[str, float]
    cycle_ms: dict[str, float]


def summarize(records: Sequence[Record]) -> dict[str, Any]:
    """The `summary` of `hvd bench --json`: `rows`, buckets, and whether every output of ours was plain decoding's."""
    looped = {record["id"] for record in records if record["policy"] == PLAIN and record["loop_onset"] is not None}
    straight = [record for record in records if record["id"] not in looped]
    different = [record for record in records if not record["identical"] and record["peer"] is None]
    rows = [*_rows(records, True), *_rows(straight, False)]
    tree: dict[str, Any] = without_nan(
        {
            "identical": not different,
            "different": [{key: record[key] for key in ("id", "policy", "differs_at")} for record in different],
            "prompts": len({record["id"] for record in records}),
            "looped": len(looped),
            "noise": _noise(rows),
            "agreement": _agreement(records),
            "rows": [asdict(row) for row in rows],
            "by_prompt_length": [*by_prompt_length(_timed(records), True), *by_prompt_length(_timed(straight), False)],
            "by_position": [*by_position(_timed(records), True), *by_position(_timed(straight), False)],
        }
    )
    return tree


def _timed(records: Iterable[Record]) -> list[Record]:
    """Those that a speed can be had from."""
    return [record for record in records if record["decoded"] > 0 and record["decode_seconds"] > 0]


def _rows(records: Sequence[Record], loops: bool) -> list[Row]:
    """Rows of every group, data sets first, the whole last."""
    keep = _timed(records)
    policies = list(dict.fromkeys(record["policy"] for record in keep))
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in keep:
        for level, group in zip(LEVELS, (record["dataset"], record["category"], "all"), strict=True):
            groups.setdefault((level, group), []).append(record)
    ordered = sorted(groups, key=lambda key: (LEVELS.index(key[0]), key[1]))
    return [
        _row(groups[key], loops, *key, policy)
        for key in ordered
        for policy in policies
        if len(ratios.pairs(groups[key], policy))
    ]


def _row(records: Sequence[Record], loops: bool, level: str, group: str, policy: str) -> Row:
    own = [record for record in records if record["policy"] == policy]
    tokens, cycles, positions = (_total(own, key) for key in ("tokens", "cycles", "positions"))
    pairs = ratios.pairs(records, policy)
    micro, macro, median = ratios.micro(pairs), ratios.macro(pairs), ratios.median(pairs.ratios())
    return Row(
        loops=loops,
        level=level,
        group=group,
        policy=policy,
        peer=own[0]["peer"],
        prompts=len(own),
        tokens=int(tokens),
        tokens_per_second=_total(own, "decoded") / _total(own, "decode_seconds"),
        speedup_micro=micro.value,
        micro_low=micro.low,
        micro_high=micro.high,
        speedup_macro=macro.value,
        macro_low=macro.low,
        macro_high=macro.high,
        speedup_median=median.value,
        median_low=median.low,
        median_high=median.high,
        tokens_per_cycle=tokens / cycles if cycles else None,
        cycles_per_1000=1000.0 * cycles / tokens if cycles else None,
        positions_per_token=positions / tokens if positions else None,
        acceptance=_total(own, "accepted") / max(1.0, _total(own, "drafted")),
        cycle_share=_cycle_share(own),
        phase_share={name: spent / _total(own, "decode_seconds") for name, spent in _phases(own).items()},
        cycle_ms={name: 1e3 * spent / cycles for name, spent in _phases(own).items()},
    )


def _total(records: Iterable[Record], key: str) -> float:
    return float(sum(record[key] for record in records))


def _cycle_share(records: Sequence[Record]) -> dict[str, float]:
    counts: dict[str, int] = {}
    for record in records:
        for arm, of in record["arms"].items():
            counts[arm] = counts.get(arm, 0) + of["cycles"]
    return {arm: count / sum(counts.values()) for arm, count in counts.items()}


def _phases(records: Sequence[Record]) -> dict[str, float]:
    """Seconds by phase; nothing for peers."""
    return {phase: sum(record["phases"][phase] for record in records) for phase in records[0]["phases"]}


def _noise(rows: Sequence[Row]) -> Mapping[str, Any] | None:
    """Plain decoding measured again, over plain: how far the figures can be trusted. None when that was not asked."""
    again = [row for row in rows if row.policy == AGAIN and row.loops]
    if not again:
        return None
    whole = again[-1]
    sets = [row.speedup_micro for row in again if row.level == "dataset"]
    return {
        "micro": whole.speedup_micro,
        "median": whole.speedup_median,
        "low": whole.median_low,
        "high": whole.median_high,
        "lowest_set": min(sets),
        "highest_set": max(sets),
    }


def _agreement(records: Sequence[Record]) -> dict[str, Any]:
    """Of each peer's method: prompts, how many texts are ours, the share of our tokens before the first difference."""
    plain = {record["id"]: record["tokens"] for record in records if record["policy"] == PLAIN}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(record["policy"] for record in records if record["peer"] is not None):
        own = [record for record in records if record["policy"] == name and plain.get(record["id"])]
        shared = [plain[r["id"]] if r["identical"] else min(r["differs_at"], plain[r["id"]]) for r in own]
        found[name] = {
            "prompts": len(own),
            "identical": sum(bool(record["identical"]) for record in own),
            "tokens_before_difference": sum(shared) / max(1, sum(plain[record["id"]] for record in own)),
        }
    return found
