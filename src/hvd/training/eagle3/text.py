"""The text that an EAGLE3 head is trained on: documents of token ids, and which of them count."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hvd.traces.schema import Trace
from hvd.training.loops import loop_onset
from hvd.types import BoolArray, Int32Array, Int64Array

LOOP_KEPT = 32
"""Tokens of a loop that are kept: a head should know how to go round, but not learn little else."""
FEWEST = 4
"""Documents with fewer tokens to learn from are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text.

    tokens   int32 [n], prompt and answer
    answer   where the answer begins; from here on predictions count
    id       of the trace; the part in front of the first '#' is its group
    dataset  of the prompt
    """

    tokens: Int32Array
    answer: int
    id: str
    dataset: str

    @property
    def counts(self) -> BoolArray:
        """bool [n], whether the prediction of a token counts."""
        return np.arange(len(self.tokens)) >= self.answer

    @property
    def group(self) -> str:
        """What must not be split between training and holding out."""
        return self.id.partition("#")[0]


def documents_of(traces: Iterable[Trace], length: int) -> list[Document]:
    """One document a trace, cut soon after a loop begins and at `length` tokens; those with too little left go."""
    found = []
    for trace in traces:
        onset = loop_onset(trace.response)
        response = trace.response if onset is None else trace.response[: onset + LOOP_KEPT]
        tokens = np.concatenate((trace.prompt, response)).astype(np.int32)[:length]
        if len(tokens) - len(trace.prompt) >= FEWEST:
            found.append(Document(tokens, len(trace.prompt), trace.id, trace.dataset))
    return found


def hold_out(documents: Iterable[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """(to train on, held out): whole groups, drawn by a hash of their name, so that the draw outlives new data.

    Of two groups or more at least one is held out, and one is not.
    """
    documents = list(documents)
    ranked = sorted({document.group for document in documents}, key=lambda group: _draw(group, seed))
    drawn = sum(_draw(group, seed) < share for group in ranked)
    held = set(ranked[: min(max(drawn, 1), len(ranked) - 1)])
    return [d for d in documents if d.group not in held], [d for d in documents if d.group in held]


def _draw(group: str, seed: int) -> float:
    """A number in [0, 1) that a group's name and the seed alone decide."""
    digest = hashlib.blake2b(f"{seed}:{group}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def draft_vocabulary(documents: Iterable[Document], size: int, vocab_size: int) -> Int64Array:
    """The `size` most frequent tokens of the answers, ascending int64; prompts break ties, low ids what is left."""
    answers, prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for document in documents:
        answers += np.bincount(document.tokens[document.answer :], minlength=vocab_size)
        prompts += np.bincount(document.tokens[: document.answer], minlength=vocab_size)
    ranked = np.lexsort((np.arange(vocab_size), -prompts, -answers))
    return np.sort(ranked[: min(size, vocab_size)]).astype(np.int64)


def coverage(documents: Iterable[Document], draft_ids: Int64Array) -> float:
    """Share of the answers' tokens that the draft vocabulary holds; NaN without any."""
    inside = total = 0
    for document in documents:
        answer = document.tokens[document.answer :]
        inside += int(np.isin(answer, draft_ids).sum())
        total += len(answer)
    return inside / total if total else float("nan")
