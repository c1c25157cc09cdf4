"""Make tests/data/arctic_golden.npz: drafts of ArcticInference 0.3.0 over made texts, to hold the "arctic" mode to.

    pip install --no-deps arctic-inference==0.3.0      (builds in about two minutes; needs a C++ compiler)
    python scripts/make_arctic_golden.py

Texts: random ids over small and large vocabularies with copied stretches, one id only, a-b-a-b, the Fibonacci word, and
the words of this script and of README-like prose, as a code and a language sample. Every session has its own parameters
and a global tree; a request's response enters that tree when it has ended, as it does here (docs of `SuffixDrafter`).

Arrays of the file, S sessions, R requests, N states, T draft tokens in all:
    session_*      [S]     max_spec_tokens, factor, offset, min_prob
    request_*      [R]     session, prompt (tokens of the text that are prompt), tokens (length of the text)
    texts          int32   the texts, one after the other
    state_*        [N]     request, position (tokens of context), length, match_len, score, in order
    draft_tokens, draft_probs [T]   the drafts, one after the other; the probs are running products
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache
from numpy.typing import NDArray

OUT = Path(__file__).parents[1] / "tests" / "data" / "arctic_golden.npz"
VERSION = "0.3.0"
DEPTH = 64
STATES_PER_REQUEST = 60

Text = NDArray[np.int32]
Columns = defaultdict[str, list[Any]]


def random_text(rng: np.random.Generator, vocabulary: int) -> Text:
    """Random ids in which stretches were copied from elsewhere."""
    n = int(rng.integers(30, 420))
    text = rng.integers(0, vocabulary, n)
    for _ in range(int(rng.integers(0, 9))):
        length = int(rng.integers(1, n // 2))
        source, target = rng.integers(0, n - length, 2)
        text[target : target + length] = text[source : source + length].copy()
    return text.astype(np.int32)


def fibonacci(n: int) -> Text:
    """The first n letters of the Fibonacci word, as ids 1 and 2."""
    a, b = [1], [1, 2]
    while len(b) < n:
        a, b = b, b + a
    return np.array(b[:n], np.int32)


def words(rng: np.random.Generator) -> Text:
    """A stretch of this script, one id a word or mark."""
    source = Path(__file__).read_text(encoding="utf-8").replace("(", " ( ").replace(",", " , ").split()
    ids = {word: i for i, word in enumerate(dict.fromkeys(source))}
    start = int(rng.integers(0, len(source) - 300))
    return np.array([ids[word] for word in source[start : start + 300]], np.int32)


def session_texts(rng: np.random.Generator, index: int) -> list[Text]:
    """The texts of one session's requests."""
    regular = [np.full(200, 7, np.int32), np.tile(np.array([3, 4], np.int32), 110), fibonacci(250)]
    if index % 4 == 0:
        return [*regular, regular[index // 4 % 3]]
    if index % 4 == 1:
        return [words(rng) for _ in range(4)]
    return [random_text(rng, int(rng.choice([2, 3, 6, 30, 500]))) for _ in range(4)]


def run_session(rng: np.random.Generator, index: int, columns: Columns) -> None:
    """Run one session's requests through ArcticInference and note what it drafts."""
    rules = {
        "max_spec_tokens": int(rng.choice([64, 64, 16, 5])),
        "factor": float(rng.choice([1.0, 1.0, 2.0, 0.5, 4.0])),
        "offset": float(rng.choice([0.0, 0.0, -1.0, 3.0])),
        "min_prob": float(rng.choice([0.1, 0.1, 0.0, 0.4])),
    }
    for name, value in rules.items():
        columns[f"session_{name}"].append(value)
    cache = SuffixDecodingCache(DEPTH)
    for number, text in enumerate(session_texts(rng, index)):
        prompt = int(rng.integers(1, len(text)))
        columns["request_session"].append(index)
        columns["request_prompt"].append(prompt)
        columns["request_tokens"].append(len(text))
        columns["texts"].extend(text)
        run_request(cache, number, text, prompt, rules, columns)


def run_request(
    cache: SuffixDecodingCache,
    number: int,
    text: Text,
    prompt: int,
    rules: dict[str, float],
    columns: Columns,
) -> None:
    """Draft at evenly spaced positions of the response; then let the response enter the global tree."""
    cache.start_request(("live", number), text[:prompt])
    cache.evict_cached_response(("live", number))  # from now on only its own tree grows
    step = max(1, (len(text) - prompt) // STATES_PER_REQUEST)
    for position in range(prompt, len(text) + 1):
        if position > prompt:
            cache.add_active_response(("live", number), text[position - 1 : position])
        if (position - prompt) % step:
            continue
        draft = cache.speculate(
            ("live", number),
            text[:position],
            max_spec_tokens=rules["max_spec_tokens"],
            max_spec_factor=rules["factor"],
            max_spec_offset=rules["offset"],
            min_token_prob=rules["min_prob"],
        )
        columns["state_request"].append(len(columns["request_session"]) - 1)
        columns["state_position"].append(position)
        columns["state_length"].append(len(draft.token_ids))
        columns["state_match_len"].append(draft.match_len)
        columns["state_score"].append(draft.score)
        columns["draft_tokens"].extend(draft.token_ids)
        columns["draft_probs"].extend(draft.probs)
    cache.stop_request(("live", number))
    cache.start_request(("done", number), np.zeros(0, np.int32))
    cache.add_active_response(("done", number), text[prompt:])
    cache.stop_request(("done", number))


def main() -> None:
    """Write the file."""
    if importlib.metadata.version("arctic-inference") != VERSION:
        raise SystemExit(f"needs arctic-inference {VERSION}")
    rng = np.random.default_rng(20260101)
    columns: Columns = defaultdict(list)
    for index in range(60):
        run_session(rng, index, columns)
    floats = ("factor", "offset", "min_prob", "score", "probs")
    arrays: dict[str, Any] = {
        name: np.array(values, np.float32 if name.endswith(floats) else np.int32) for name, values in columns.items()
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT}: {len(columns['state_length'])} states, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
