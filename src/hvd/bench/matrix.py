"""Model x data set: how much faster each method is than each baseline, and how often it wins. Of one run or of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd.bench import ratios
from hvd.bench.ratios import Record

BASELINES = ("plain", "cache", "cache@arctic", "eagle3")
"""What the paper compares with: no speculation, SuffixDecoding (@arctic: with its own draft lengths), EAGLE3."""
AGAIN = "plain-again"


def matrix(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`against`: one table a baseline that was measured, peers' methods among them; `fastest`: cells that each method
    is the fastest in.

    contents   benchmark files as `hvd.bench.file.read_bench` gives them, or anything with `model` and `records`
    """
    cells = {(c["model"]["name"], name): part for c in contents for name, part in _sets(c["records"]).items()}
    methods = list(dict.fromkeys(r["policy"] for part in cells.values() for r in part if r["policy"] != AGAIN))
    peers = [name for name in methods if any(r["peer"] for part in cells.values() for r in part if r["policy"] == name)]
    baselines = [name for name in (*BASELINES, *peers) if name in methods]
    return {
        "against": [{"baseline": base, "rows": _rows(cells, methods, base)} for base in baselines],
        "fastest": _fastest(cells, methods),
    }


def _sets(records: Sequence[Record]) -> dict[str, list[Record]]:
    sets: dict[str, list[Record]] = {}
    for record in records:
        if record["decoded"] > 0 and record["decode_seconds"] > 0:
            sets.setdefault(record["dataset"], []).append(record)
    return sets


def _rows(cells: Mapping[tuple[str, str], Sequence[Record]], methods: Sequence[str], base: str) -> list[dict[str, Any]]:
    """A row a model and method: ratio by data set, their geometric mean, wins (ratio > 1) and losses."""
    rows = []
    for model in dict.fromkeys(model for model, _ in cells):
        for method in methods:
            if method == base:
                continue
            sets = {name: _ratio(part, method, base) for (of, name), part in cells.items() if of == model}
            known = {name: value for name, value in sets.items() if value is not None}
            if known:
                values = np.array(list(known.values()))
                rows.append(
                    {
                        "model": model,
                        "method": method,
                        "sets": known,
                        "macro": float(np.exp(np.log(values).mean())),
                        "wins": int((values > 1.0).sum()),
                        "losses": int((values < 1.0).sum()),
                    }
                )
    return rows


def _ratio(records: Sequence[Record], method: str, base: str) -> float | None:
    pairs = ratios.pairs(records, method, base)
    if not len(pairs):
        return None
    ours, theirs = pairs.tokens.sum() / pairs.seconds.sum(), pairs.base_tokens.sum() / pairs.base_seconds.sum()
    return float(ours / theirs)


def _fastest(cells: Mapping[tuple[str, str], Sequence[Record]], methods: Sequence[str]) -> dict[str, int]:
    wins = dict.fromkeys(methods, 0)
    for part in cells.values():
        speeds = {name: _ratio(part, name, "plain") or 0.0 for name in methods}
        if any(speeds.values()):
            wins[max(speeds, key=lambda name: speeds[name])] += 1
    return wins
