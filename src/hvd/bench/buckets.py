"""Speed by how long the prompt is, and by how far the answer has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hvd.bench import ratios
from hvd.bench.ratios import PLAIN, Record
from hvd.bench.record import POSITION_EDGES
from hvd.bench.tallies import bin_of

PROMPT_EDGES = (0, 128, 512, 1024, 2048, 4096, 8192)
"""Tokens at which buckets of prompts begin; the last one has no end."""


def by_prompt_length(records: Sequence[Record], loops: bool) -> list[dict[str, Any]]:
    """One entry a bucket and method: micro speed over plain decoding with its interval."""
    found = []
    for i, edge in enumerate(PROMPT_EDGES):
        here = [record for record in records if bin_of(record["prompt_tokens"], PROMPT_EDGES) == i]
        for policy in _methods(here):
            pairs = ratios.pairs(here, policy)
            if len(pairs):
                speed = ratios.micro(pairs)
                more = {"prompts": len(pairs), "tokens": int(pairs.tokens.sum()), "speedup_micro": speed.value}
                found.append(_head(loops, edge, PROMPT_EDGES, policy) | more | {"low": speed.low, "high": speed.high})
    return found


def by_position(records: Sequence[Record], loops: bool) -> list[dict[str, Any]]:
    """One entry a stretch of the answers and method; the cycles that began there. Peers have none."""
    found = []
    for edge in POSITION_EDGES:
        base = _sums(records, PLAIN, edge)
        for policy in _methods(records):
            tokens, cycles, seconds = _sums(records, policy, edge)
            if seconds and base[2]:
                speed = (tokens / seconds) / (base[0] / base[2])
                more = {"tokens": int(tokens), "tokens_per_cycle": tokens / cycles, "speedup_micro": speed}
                found.append(_head(loops, edge, POSITION_EDGES, policy) | more)
    return found


def _methods(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record["policy"] for record in records))


def _head(loops: bool, edge: int, edges: Sequence[int], policy: str) -> dict[str, Any]:
    """`to` is exclusive, None = no end."""
    after = edges.index(edge) + 1
    return {"loops": loops, "from": edge, "to": edges[after] if after < len(edges) else None, "policy": policy}


def _sums(records: Iterable[Record], policy: str, edge: int) -> np.ndarray:
    """Tokens, cycles, seconds of a method in one stretch, float64 [3]."""
    rows = [s[1:] for record in records if record["policy"] == policy for s in record["stretches"] if s[0] == edge]
    return np.asarray(np.array(rows, np.float64).reshape(-1, 3).sum(0))
