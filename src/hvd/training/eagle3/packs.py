"""Documents laid behind each other in packs, as the training loop takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hvd.training.eagle3.module import Pack
from hvd.training.eagle3.states import StateStore
from hvd.training.eagle3.text import Document
from hvd.types import BoolArray

STRETCH = 16
"""Tokens of a stretch of prompt that counts."""


def make_pack(
    store: StateStore,
    documents: Sequence[Document],
    indices: Sequence[int],
    device: torch.device,
    prompt_share: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Pack:
    """Lay documents behind each other, on the device. With `rng`, stretches of the prompts count too."""
    states, final = zip(*(store[i] for i in indices), strict=True)
    chosen = [documents[i] for i in indices]
    return Pack(
        tokens=torch.from_numpy(np.concatenate([d.tokens for d in chosen]).astype(np.int64)).to(device),
        states=torch.cat(states).to(device).float(),
        final=torch.cat(final).to(device).float(),
        counts=torch.from_numpy(np.concatenate([_counts(d, prompt_share, rng) for d in chosen])).to(device),
        ends=np.cumsum([len(d.tokens) for d in chosen]).tolist(),
    )


def _counts(document: Document, share: float, rng: np.random.Generator | None) -> BoolArray:
    """The answer, and stretches of the prompt that make up about `share` of it."""
    if rng is None or share == 0:
        return document.counts
    drawn = rng.random(-(-len(document.tokens) // STRETCH)) < share
    return document.counts | np.repeat(drawn, STRETCH)[: len(document.tokens)]


def packs_of(order: Sequence[int], documents: Sequence[Document], length: int) -> Iterator[list[int]]:
    """Documents in this order, as many at a time as `length` tokens hold."""
    pack: list[int] = []
    size = 0
    for i in order:
        if pack and size + len(documents[i].tokens) > length:
            yield pack
            pack, size = [], 0
        pack.append(i)
        size += len(documents[i].tokens)
    if pack:
        yield pack
