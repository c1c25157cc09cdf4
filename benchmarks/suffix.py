"""What the suffix cache costs: building, a step (append + propose), 32 requests at once; ArcticInference beside it.

    python benchmarks/suffix.py [--rounds 5] [--steps 200] [--json FILE]

All contenders take turns in every round on the same text, so a busy machine treats them alike; medians over the steps
of a round, then over the rounds.
ArcticInference (pip install --no-deps arctic-inference==0.3.0) is left out when it is not installed. Prints a table and
one JSON line. Times in microseconds unless said otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import platform
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvd.config import SuffixConfig
from hvd.drafters.suffix import SuffixDrafter
from hvd.types import Int32Array

LENGTHS = (1_000, 8_000, 100_000)
REQUESTS, REQUEST_LENGTH = 32, 8_000


class Contender(ABC):
    """A suffix cache under test: one live request a key."""

    name: str

    @abstractmethod
    def start(self, key: int, prompt: Int32Array) -> None:
        """Begin a request."""

    @abstractmethod
    def append(self, key: int, tokens: Int32Array) -> None:
        """Take in generated tokens."""

    @abstractmethod
    def propose(self, key: int, context: Int32Array) -> int:
        """Draft; returns the draft's length."""

    @abstractmethod
    def stop(self, key: int) -> None:
        """End a request."""


class Ours(Contender):
    def __init__(self, mode: str) -> None:
        self.name = f"hvd {mode}"
        self._drafter = SuffixDrafter(SuffixConfig(mode=mode), 1_000_000, "benchmark", print)

    def start(self, key: int, prompt: Int32Array) -> None:
        self._drafter.open(key)
        self._drafter.observe(key, prompt, None, prompt=True)

    def append(self, key: int, tokens: Int32Array) -> None:
        self._drafter.observe(key, tokens, None, prompt=False)

    def propose(self, key: int, context: Int32Array) -> int:
        draft = self._drafter.propose(key, 64)
        return 0 if draft is None else len(draft)

    def stop(self, key: int) -> None:
        self._drafter.close(key, keep=False)


class Arctic(Contender):
    name = "ArcticInference"

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache: Any = SuffixDecodingCache(64)

    def start(self, key: int, prompt: Int32Array) -> None:
        self._cache.start_request(key, prompt)

    def append(self, key: int, tokens: Int32Array) -> None:
        self._cache.add_active_response(key, tokens)

    def propose(self, key: int, context: Int32Array) -> int:
        return len(self._cache.speculate(key, context, max_spec_tokens=64).token_ids)

    def stop(self, key: int) -> None:
        self._cache.stop_request(key)
        self._cache.evict_cached_response(key)


def fibonacci(n: int) -> Int32Array:
    a, b = [1], [1, 2]
    while len(b) < n:
        a, b = b, b + a
    return np.array(b[:n], np.int32)


def source_code(n: int) -> Int32Array:
    """Words and marks of Python's own library, an id each: text that repeats itself as real text does."""
    files = sorted(Path(json.__file__).parents[1].glob("[a-h]*.py"))
    text = "\n".join(path.read_text("utf-8", "replace") for path in files)
    for mark in "()[]{}.,:=\"'":
        text = text.replace(mark, f" {mark} ")
    words = text.replace("\n", " \n ").replace("    ", " \t ").split(" ")
    ids = {word: i for i, word in enumerate(dict.fromkeys([*keyword.kwlist, *words]))}
    return np.array([ids[word] for word in words if word][:n], np.int32)


HISTORIES: dict[str, Callable[[int], Int32Array]] = {
    "source code": source_code,
    "random": lambda n: np.random.default_rng(0).integers(0, 50_000, n).astype(np.int32),
    "one id": lambda n: np.full(n, 7, np.int32),
    "a-b-a-b": lambda n: np.arange(n, dtype=np.int32) % 2,
    "fibonacci": fibonacci,
}


def measure(contender: Contender, key: int, text: Int32Array, steps: int) -> dict[str, float]:
    """Build a request from all but the last `steps` tokens, then take these one at a time, proposing behind each."""
    n = len(text) - steps
    begin = time.perf_counter()
    contender.start(key, text[:n])
    built = time.perf_counter()
    append, propose = np.zeros(steps), np.zeros(steps)
    for i in range(steps):
        t0 = time.perf_counter()
        contender.append(key, text[n + i : n + i + 1])
        t1 = time.perf_counter()
        contender.propose(key, text[max(0, n + i - 63) : n + i + 1])
        append[i], propose[i] = t1 - t0, time.perf_counter() - t1
    contender.stop(key)
    return {
        "build_us_per_token": 1e6 * (built - begin) / n,
        "append_us": 1e6 * float(np.median(append)),
        "propose_us": 1e6 * float(np.median(propose)),
        "step_us": 1e6 * float(np.median(append + propose)),
    }


def measure_many(contender: Contender, text: Int32Array) -> float:
    """Milliseconds to propose once for each of REQUESTS live requests."""
    for key in range(REQUESTS):
        contender.start(10_000 + key, np.roll(text, 97 * key))
    begin = time.perf_counter()
    for key in range(REQUESTS):
        contender.propose(10_000 + key, np.roll(text, 97 * key)[-64:])
    took = time.perf_counter() - begin
    for key in range(REQUESTS):
        contender.stop(10_000 + key)
    return 1e3 * took


def run(contenders: list[Contender], rounds: int, steps: int) -> list[dict[str, Any]]:
    """One row a contender, history and length: medians over the rounds."""
    rows = []
    for name, make in HISTORIES.items():
        for length in LENGTHS:
            text = make(length + steps)
            taken: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
            for key in range(rounds):
                for contender in contenders:
                    taken[contender.name].append(measure(contender, key, text, steps))
            for who, figures in taken.items():
                medians = {k: round(statistics.median(f[k] for f in figures), 2) for k in figures[0]}
                rows.append({"history": name, "tokens": length, "contender": who, **medians})
                print(format_row(rows[-1]), flush=True)
    return rows


def format_row(row: dict[str, Any]) -> str:
    figures = "".join(f"{row[k]:>10.2f}" for k in ("build_us_per_token", "append_us", "propose_us", "step_us"))
    return f"{row['history']:<12} {row['tokens']:>7} {row['contender']:<16}{figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    args = parser.parse_args()
    contenders: list[Contender] = [Ours("longest"), Ours("arctic")]
    if importlib.util.find_spec("arctic_inference"):
        contenders.append(Arctic())
    print(f"{'history':<12} {'tokens':>7} {'contender':<16}{'build/tok':>10}{'append':>10}{'propose':>10}{'step':>10}")
    rows = run(contenders, args.rounds, args.steps)
    text = source_code(REQUEST_LENGTH)
    many: dict[str, float] = {}
    for contender in contenders:
        many[contender.name] = round(statistics.median(measure_many(contender, text) for _ in range(3)), 3)
        print(f"{REQUESTS} x {REQUEST_LENGTH} tokens, a proposal each: {contender.name} {many[contender.name]} ms")
    line = json.dumps(
        {
            "benchmark": "suffix",
            "machine": platform.processor() or platform.machine(),
            "python": sys.version.split()[0],
            "rows": rows,
            "propose_32_requests_ms": many,
        }
    )
    print(line)
    if args.json:
        args.json.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
