"""What rounding the weights costs: perplexity of each weight format on the same text, llama.cpp beside it.

    python benchmarks/perplexity.py --data DIR [--model FILE] [--weights fp32,int8,int4] [--tokens 20480] [--json FILE]

The text is conversations of the `dev` split of DIR's sets, in the model's chat template, set by set in turn, cut to
windows of 1,024 tokens of which the first is given. `fp32` is the file's weights, dequantized and not rounded again.
llama.cpp (llama-cpp-python) reads the same GGUF file; it is left out when it isn't installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvd.bench.environment import environment
from hvd.errors import RequestError
from hvd.models.loader import load_target
from hvd.models.target import Span, Target
from hvd.tokenizer import Tokenizer
from hvd.traces.prompts import read_prompts
from hvd.types import Float64Array, Int32Array

DEFAULT_MODEL = Path("~/.cache/hvd/models/SmolLM2-135M-Instruct.Q4_1.gguf")
WINDOW = 1024
CHUNK = 128


def main() -> None:
    options = _options()
    formats = options.weights.split(",")
    _, tokenizer = load_target(options.model, weights=formats[0], threads=options.threads)
    windows = text(options.data, tokenizer, options.tokens)
    print(f"{len(windows)} windows of {WINDOW} tokens", file=sys.stderr)
    found = {}
    for weights in formats:
        target, _ = load_target(options.model, weights=weights, threads=options.threads)
        found[weights] = perplexity(np.concatenate([losses(target, window) for window in windows]))
        print(f"{weights:10} {found[weights]:.3f}", flush=True)
    if importlib.util.find_spec("llama_cpp") and options.model.suffix == ".gguf":
        found["llama.cpp"] = perplexity(llama_losses(options.model, windows, options.threads))
        print(f"llama.cpp  {found['llama.cpp']:.3f}")
    line = json.dumps(
        {
            "model": options.model.name,
            "tokens": len(windows) * (WINDOW - 1),
            "perplexity": {name: round(value, 4) for name, value in found.items()},
            "environment": environment(),
        }
    )
    print(line)
    if options.json:
        options.json.write_text(line + "\n")


def text(folder: Path, tokenizer: Tokenizer, tokens: int) -> list[Int32Array]:
    """Windows of WINDOW tokens, at least `tokens` in all if the data has them, from all sets in turn."""
    sources = [_conversations(file, tokenizer) for file in sorted(folder.glob("*.jsonl"))]
    ids: list[int] = []
    for conversation in itertools.chain.from_iterable(itertools.zip_longest(*sources, fillvalue=())):
        if len(ids) >= tokens:
            break
        ids += conversation[:WINDOW]
    count = len(ids) // WINDOW
    return list(np.asarray(ids[: count * WINDOW], np.int32).reshape(count, WINDOW))


def _conversations(file: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    for prompt in read_prompts(file, split="dev"):
        messages = list(prompt.turns[0].messages)
        if prompt.turns[0].recorded is not None:
            messages.append({"role": "assistant", "content": prompt.turns[0].recorded})
        try:
            yield tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        except RequestError as error:
            print(f"{prompt.id}: {error}; skipped", file=sys.stderr)


def losses(target: Target, window: Int32Array) -> Float64Array:
    """Negative log-likelihood of every token but the first, float64 [n - 1]."""
    cache, found = target.open(), []
    for start in range(0, len(window), CHUNK):
        piece = window[start : start + CHUNK]
        [output] = target.forward([Span(cache, piece, rows="all")])
        cache.keep(range(len(piece)))
        following = window[start + 1 : start + 1 + len(piece)]
        found.append(cross_entropy(output.logits[: len(following)], following))
    cache.close()
    return np.concatenate(found)


def cross_entropy(logits: Any, tokens: Int32Array) -> Float64Array:
    """-log softmax(logits)[token], float64 [n]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    total = np.log(np.exp(wide - top).sum(axis=-1)) + top[:, 0]
    return np.asarray(total - wide[np.arange(len(tokens)), tokens])


def llama_losses(model: Path, windows: list[Int32Array], threads: int | None) -> Float64Array:
    """The same from llama.cpp."""
    import llama_cpp

    llm = llama_cpp.Llama(str(model), n_ctx=WINDOW, n_batch=CHUNK, logits_all=True, n_threads=threads, verbose=False)
    found = []
    for window in windows:
        llm.reset()
        llm.eval(window.tolist())
        found.append(cross_entropy(llm.scores[: len(window) - 1], window[1:]))
    return np.concatenate(found)


def perplexity(nll: Float64Array) -> float:
    """exp of the mean negative log-likelihood."""
    return float(np.exp(nll.mean()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of prompt files")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL.expanduser())
    parser.add_argument("--weights", default="fp32,int8,int4")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
