"""What a pass of the target costs, by width and context: our ONNX backend, transformers and llama.cpp beside it.

    python benchmarks/engine.py [--model FILE] [--weights int4,int8] [--threads N] [--repeats 10] [--json FILE]

All engines take turns on the same text, a few passes each, so a busy machine treats them alike. Every pass returns the
logits of all its positions, and is rolled back. Width 1 is plain decoding. transformers and
llama.cpp (llama-cpp-python) are left out when they are not installed; both read GGUF files, transformers in float32.
Prints a table (milliseconds: minimum, median, quarter spread) and one JSON line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd.models.loader import load_target
from hvd.models.target import Span
from hvd.types import Int32Array

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (512, 4096)
PAUSE = 0.1
TIMED = 3
"""Passes of a turn that count."""
DEFAULT_MODEL = Path("~/.cache/hvd/models/SmolLM2-135M-Instruct.Q4_1.gguf")
TEXT = "In the year the river froze, the mill stood still and {} men walked to the town of {} to ask for bread. "


class Contender(ABC):
    """An engine that holds a context and computes passes behind it, rolling each back."""

    name: str

    @abstractmethod
    def fill(self, tokens: Int32Array) -> None:
        """Make `tokens` the context."""

    @abstractmethod
    def run(self, tokens: Int32Array) -> None:
        """One pass over `tokens`, all logits computed."""

    @abstractmethod
    def undo(self) -> None:
        """Forget what `run` added; not timed."""


class Ours(Contender):
    """The ONNX backend."""

    def __init__(self, model: Path, weights: str, threads: int) -> None:
        self.name = f"hvd {weights}"
        self.target, self.tokenizer = load_target(model, backend="onnx", weights=weights, threads=threads)
        self.cache = self.target.open()

    def fill(self, tokens: Int32Array) -> None:
        self.cache.rollback(0)
        self.target.forward([Span(self.cache, tokens, rows="none")])
        self.cache.keep(range(len(tokens)))

    def run(self, tokens: Int32Array) -> None:
        self.target.forward([Span(self.cache, tokens)])

    def undo(self) -> None:
        self.cache.keep(())


class Transformers(Contender):
    """transformers in float32, with its default attention."""

    name = "transformers fp32"

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        place = {"pretrained_model_name_or_path": str(model)}
        if model.is_file():
            place = {"pretrained_model_name_or_path": str(model.parent), "gguf_file": model.name}
        self.model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
        self.new_cache, self.tensor = DynamicCache, torch.from_numpy

    def fill(self, tokens: Int32Array) -> None:
        self.cache = self.new_cache()
        ids = self.tensor(tokens[None].astype(np.int64))
        self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def run(self, tokens: Int32Array) -> None:
        self.width = len(tokens)
        self.model(self.tensor(tokens[None].astype(np.int64)), past_key_values=self.cache, use_cache=True)

    def undo(self) -> None:
        self.cache.crop(-self.width)


class LlamaCpp(Contender):
    """llama.cpp on the file's own blocks; its batches are set and decoded without copying logits to Python."""

    name = "llama.cpp"

    def __init__(self, model: Path, threads: int) -> None:
        import llama_cpp

        self.llama = llama_cpp.Llama(
            str(model),
            n_ctx=max(CONTEXTS) + 256,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            verbose=False,
        )

    def fill(self, tokens: Int32Array) -> None:
        self.llama.reset()
        self.llama.eval(tokens.tolist())
        self.length = len(tokens)

    def run(self, tokens: Int32Array) -> None:
        self.llama._batch.set_batch(tokens.tolist(), self.length, True)
        self.llama._ctx.decode(self.llama._batch)
        self.llama._ctx.get_logits()

    def undo(self) -> None:
        self.llama._ctx.kv_cache_seq_rm(-1, self.length, -1)


def contenders(model: Path, weights: list[str], threads: int) -> Iterator[Contender]:
    """Every engine that is installed and can open the model."""
    for each in weights:
        yield Ours(model, each, threads)
    if importlib.util.find_spec("llama_cpp") and model.suffix == ".gguf":
        yield LlamaCpp(model, threads)
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"):
        yield Transformers(model, threads)


def measure(engines: list[Contender], text: Int32Array, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of every pass, engines taking turns."""
    results = []
    for context in CONTEXTS:
        times: dict[tuple[str, int], list[float]] = {}
        for engine in engines:
            engine.fill(text[:context])
        for _ in range(repeats):
            for width in WIDTHS:
                for engine in engines:
                    taken = turn(engine, text[context : context + width])
                    times.setdefault((engine.name, width), []).extend(taken)
        results += [
            {"engine": name, "context": context, "width": width, **summary(values)}
            for (name, width), values in times.items()
        ]
    return results


def turn(engine: Contender, tokens: Int32Array) -> list[float]:
    """Milliseconds of a few passes, once the others' threads have stopped to spin. The first does not count: caches are
    cold."""
    taken = []
    time.sleep(PAUSE)
    for _ in range(1 + TIMED):
        start = time.perf_counter()
        engine.run(tokens)
        taken.append(1e3 * (time.perf_counter() - start))
        engine.undo()
    return taken[1:]


def summary(values: list[float]) -> dict[str, float]:
    """Minimum, median and the distance between the quarters."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"min": round(min(values), 2), "median": round(median, 2), "spread": round(high - low, 2)}


def show(results: list[dict[str, Any]]) -> None:
    """The table."""
    names = list(dict.fromkeys(result["engine"] for result in results))
    for context in CONTEXTS:
        print(f"\ncontext {context}, ms a pass: min / median / spread")
        print("width".ljust(6) + "".join(name.rjust(26) for name in names))
        for width in WIDTHS:
            found = {r["engine"]: r for r in results if (r["context"], r["width"]) == (context, width)}
            cells = [f"{found[n]['min']} / {found[n]['median']} / {found[n]['spread']}" for n in names]
            print(str(width).ljust(6) + "".join(cell.rjust(26) for cell in cells))


def hardware() -> dict[str, Any]:
    """What the figures were measured on, and with which versions."""
    versions = {}
    for package in ("onnxruntime", "numpy", "transformers", "torch", "llama_cpp_python"):
        if importlib.util.find_spec(package.replace("_python", "")):
            versions[package] = importlib.metadata.version(package)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--weights", default="int4,int8")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the JSON line to this file too")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    model = options.model.expanduser()
    engines = list(contenders(model, options.weights.split(","), options.threads))
    ours = engines[0]
    assert isinstance(ours, Ours)
    words = "".join(TEXT.format(n, chr(65 + n % 26)) for n in range(400))
    text = np.array(ours.tokenizer.encode(words), np.int32)[: max(CONTEXTS) + max(WIDTHS)]
    results = measure(engines, text, options.repeats)
    show(results)
    record = {"model": model.name, "threads": options.threads, "repeats": options.repeats, **hardware()}
    line = json.dumps({**record, "results": results})
    print(line)
    if options.json:
        options.json.write_text(line + "\n", "utf-8")


if __name__ == "__main__":
    main()
