"""Turns findings, added up by data set, by category and over all, into the figures that the paper shows, and more.

Every group is given twice, as the rows of the summary are: with all prompts, and without those that loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd.bench.matrix import matrix
from hvd.bench.tallies import CONTEXT_EDGES, PAYOFF_EDGES, Tree, total
from hvd.training.dataset import PAYOFF
from hvd.training.report import without_nan

Finding = Mapping[str, Any]
_NAN = float("nan")


def analyse(
    model: Mapping[str, Any], records: Sequence[Mapping[str, Any]], findings: Sequence[Finding]
) -> dict[str, Any]:
    """The `analysis` of `hvd bench --json` (docs/bench.md describes it)."""
    groups = [*_groups(findings, True), *_groups([f for f in findings if not f["loops"]], False)]
    tree: dict[str, Any] = without_nan(
        {"matrix": matrix([{"model": model, "records": records}]), "payoff_edges": PAYOFF_EDGES, "groups": groups}
    )
    return tree


def _groups(findings: Sequence[Finding], loops: bool) -> list[dict[str, Any]]:
    parts: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        for key in (("dataset", finding["dataset"]), ("category", finding["category"]), ("all", "all")):
            parts.setdefault(key, []).append(finding)
    order = ("dataset", "category", "all")
    return [_group(parts[key], loops, *key) for key in sorted(parts, key=lambda key: (order.index(key[0]), key[1]))]


def _group(findings: Sequence[Finding], loops: bool, level: str, group: str) -> dict[str, Any]:
    counts = total(finding["counts"] for finding in findings)
    return {
        "loops": loops,
        "level": level,
        "group": group,
        "prompts": len(findings),
        "tokens": sum(finding["tokens"] for finding in findings),
        "payoff": {name: _payoff(of) for name, of in counts["payoff"].items()},
        "gates": {name: _gates(of) for name, of in counts["gates"].items()},
        "calibration": {name: _calibration(of) for name, of in counts["curves"].items()},
        "sources": {name: _sources(of) for name, of in counts["sources"].items()},
        "wrong_guesses": {name: _guesses(of) for name, of in counts["guesses"].items()},
        "regret": _regret(counts["seconds"]),
        "eagle3_by_context": {name: _head(of) for name, of in counts["head"].items()},
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else _NAN


def _payoff(of: Tree) -> dict[str, Any]:
    """Shares are of states with a draft whose payoff is known."""
    paying = sum(of["histogram"][PAYOFF_EDGES.index(PAYOFF) :])
    return {
        "states": of["states"],
        "bare": of["bare"],
        "censored": of["censored"],
        "unlike": of["unlike"],
        "mean": _share(of["paid"], of["states"]),
        "mean_length": _share(of["drafted"], of["states"]),
        "paying": _share(paying, of["states"]),
        "histogram": of["histogram"],
    }


def _gates(of: Tree) -> dict[str, Any]:
    return {name: _gate(*cells) for name, cells in of.items()}


def _gate(hits: int, false: int, missed: int, no: int) -> dict[str, float]:
    precision, recall = _share(hits, hits + false), _share(hits, hits + missed)
    return {
        "states": hits + false + missed + no,
        "precision": precision,
        "recall": recall,
        "f1": _share(2 * hits, 2 * hits + false + missed),
    }


def _calibration(of: Tree) -> dict[str, Any]:
    """By model and length k: the non-empty bins of the prediction, and the expected calibration error."""
    return {model: {length: _curve(bins) for length, bins in lengths.items()} for model, lengths in of.items()}


def _curve(bins: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    rows = [{"states": n, "predicted": told / n, "observed": came / n} for _, (n, told, came) in sorted(bins.items())]
    states = sum(row["states"] for row in rows)
    error = sum(row["states"] * abs(row["predicted"] - row["observed"]) for row in rows)
    return {"states": states, "error": _share(error, states), "bins": rows}


def _sources(of: Tree) -> dict[str, Any]:
    tokens = sum(of["tokens"].values())
    return {"tokens": tokens, "share": {name: n / tokens for name, n in of["tokens"].items()}, "tenths": of["tenths"]}


def _guesses(of: Tree) -> dict[str, Any]:
    """Per 1,000 tokens emitted."""
    per = 1000.0 / of["tokens"] if of["tokens"] else _NAN
    return {
        "cycles": of["cycles"] * per,
        "drafted": of["drafted"] * per,
        "rejected": of["rejected"] * per,
        "wasted_cycles": of["wasted"] * per,
        "seconds_lost": of["seconds"] * per,
        "forgone": of["forgone"] * per,
    }


def _regret(seconds: Tree) -> dict[str, Any]:
    """By policy, under the run's cost model: seconds, plain's over its own, and how far above the oracle's."""
    plain, best = seconds["plain"], seconds["oracle"]
    return {
        name: {"seconds": own, "speedup": _share(plain, own), "regret": _share(own, best) - 1.0}
        for name, own in seconds.items()
    }


def _head(rows: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    ends = (*CONTEXT_EDGES[1:], None)
    return [
        {
            "from": start,
            "to": end,
            "cycles": cycles,
            "accepted": accepted / cycles,
            "acceptance": _share(accepted, drafted),
        }
        for start, end, (cycles, drafted, accepted) in zip(CONTEXT_EDGES, ends, rows, strict=True)
        if cycles
    ]
