"""The EAGLE3 head on ONNX Runtime: what drafts on a CPU. Rounding its weights is safe: drafts are only proposals.

A head is converted once, into `<cache>/eagle3/<digest of its files and its target>-<weights>-<format>/`:

    fuse/  step/  eat/                               the graphs (eagle3_graph.py)
    embedding.npy  target_ids.npy  rope.npy  spec.json    the rest of the head

Committed pairs are eaten in passes of two rows at least, as in target.py: then a draft depends on the committed
text alone, bit for bit, however that was cut into passes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd.errors import CheckpointError, ConfigError
from hvd.models.config import RopeConfig
from hvd.models.eagle3 import FIRST_CAPACITY, Eagle3Head, HeadCache, HeadOutput, NumpyHead
from hvd.models.eagle3_checkpoint import HeadWeights, find_eagle3, load_eagle3
from hvd.models.eagle3_tensors import HeadSpec
from hvd.models.onnx.api import Binding
from hvd.models.onnx.attention import Attention, BlockedStore
from hvd.models.onnx.cache import FORMATS, ROPE_FILE, WEIGHTS_FILE, cache_root
from hvd.models.onnx.linear import PACKED
from hvd.models.onnx.session import open_session
from hvd.models.target import TargetSpec
from hvd.types import BoolArray, Float32Array, Int32Array

FORMAT = 6
HEAD_DIM_STEP = 16
"""The runtime's attention takes heads of a multiple of this."""
ONE_THREAD_BYTES = 16 * 1024 * 1024
"""A head of fewer bytes of weights is done on one core before several have agreed."""


class OnnxHeadCache(HeadCache):
    """Keys and values of one request, where the attention kernel finds them."""

    def __init__(self, spec: HeadSpec) -> None:
        self.length = 0
        self.store = BlockedStore(spec.num_layers, spec.num_kv_heads, spec.head_dim)

    @property
    def capacity(self) -> int:
        """See `HeadCache.capacity`."""
        return int(self.store.array.shape[2])

    def reserve(self, slots: int) -> None:
        """See `HeadCache.reserve`."""
        if slots > self.capacity:
            self.store.grow(max(slots, 2 * self.capacity, FIRST_CAPACITY), self.capacity)


class OnnxHead(Eagle3Head):
    """A converted head. threads: None = one for a small head, else all cores. CheckpointError if it can't be read."""

    def __init__(self, directory: Path, threads: int | None = None) -> None:
        spec, embedding, target_ids, rope = _read(directory)
        super().__init__(spec, embedding, target_ids)
        small = (directory / "step" / WEIGHTS_FILE).stat().st_size < ONE_THREAD_BYTES
        threads = 1 if small else threads
        self._attention = Attention(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, rope)
        self._fuse = open_session(directory / "fuse", 1).binding()
        self._step = open_session(directory / "step", threads, [self._attention.operator()]).binding()
        self._eat: Binding | None = None
        if (directory / "eat").exists():
            self._eat = open_session(directory / "eat", threads, [self._attention.operator()]).binding()

    def open(self) -> OnnxHeadCache:
        """See `Eagle3Head.open`."""
        return OnnxHeadCache(self.spec)

    def fuse(self, states: Float32Array) -> Float32Array:
        """See `Eagle3Head.fuse`."""
        padded = _not_alone(states)
        fused = np.empty((len(padded), self.spec.hidden_size), np.float32)
        self._fuse.input("states", np.ascontiguousarray(padded)[None])
        self._fuse.output("fused", fused, (1, *fused.shape))
        self._fuse.run()
        return fused[: len(states)]

    def eat(self, tokens: Int32Array, states: Float32Array, cache: HeadCache) -> None:
        """See `Eagle3Head.eat`. Of a single layer, keys and values are all that remains of a pair: a third of the work,
        and no attention."""
        if self._eat is None:
            super().eat(tokens, states, cache)
            return
        count, start = len(tokens), cache.length
        tokens, states = _not_alone(tokens), _not_alone(states)
        self._eat.input("states", np.ascontiguousarray(states)[None])
        self._eat.input("embeds", self.embed(tokens)[None])
        self._eat.output("kept", np.empty((1, len(tokens), 0), np.float32))
        cache.reserve(start + len(tokens))
        self._attention.begin(_own(cache).store, start, len(tokens))
        self._eat.run()
        cache.length += count

    def forward(
        self,
        tokens: Int32Array,
        features: Float32Array,
        cache: HeadCache,
        *,
        start: int | None = None,
        depth: int = 0,
        mask: BoolArray | None = None,
        last: bool = True,
    ) -> HeadOutput:
        """See `Eagle3Head.forward`."""
        count = len(tokens)
        rows = np.array([count - 1]) if last else np.arange(count)
        if start is None:
            tokens, features = _not_alone(tokens), _not_alone(features)
        start = cache.length if start is None else start
        width = len(tokens)
        cache.reserve(start + width)
        store = _own(cache).store
        if mask is None:
            self._attention.begin(store, start, width)
        else:
            position, seen = cache.length + depth, np.ascontiguousarray(mask)
            self._attention.begin(store, start, width, position=position, step=0, mask=seen, masked_from=cache.length)
        self._step.input("embeds", self.embed(tokens)[None])
        self._step.input("features", np.ascontiguousarray(features)[None])
        self._step.input("rows", rows)
        output = HeadOutput(
            np.empty((width, self.spec.hidden_size), np.float32),
            np.empty((len(rows), self.spec.draft_vocab_size), np.float32),
        )
        self._step.output("fed_back", output.features, (1, *output.features.shape))
        self._step.output("logits", output.logits, (1, *output.logits.shape))
        self._step.run()
        return HeadOutput(output.features[:count], output.logits)


def _not_alone(rows: NDArray[Any]) -> NDArray[Any]:
    """A row that would stand alone, twice."""
    return np.concatenate([rows, rows]) if len(rows) == 1 else rows


def _own(cache: HeadCache) -> OnnxHeadCache:
    if not isinstance(cache, OnnxHeadCache):
        raise TypeError(f"this head needs a cache that it opened itself, got {type(cache).__name__}")
    return cache


def load_head(
    source: str | Path,
    target: TargetSpec,
    target_tensor: Callable[[str], NDArray[Any]],
    *,
    weights: str = "int4",
    threads: int | None = None,
    any_target: bool = False,
) -> Eagle3Head:
    """Open a head for drafting on a CPU, converting it unless that was done before.

    weights   "int4", "int8" or "fp32"
    threads   most threads; None = all cores

    Other parameters, and errors, as `load_eagle3`; ConfigError for an unknown weight format. A head whose head_dim is
    no multiple of 16 can't be converted and runs in NumPy.
    """
    if weights not in FORMATS:
        raise ConfigError(f"weights of an EAGLE3 head must be one of {', '.join(FORMATS)}, got {weights!r}")
    folder = find_eagle3(source)
    final = cache_root() / "eagle3" / f"{_digest(folder, target, any_target)}-{weights}-{FORMAT}{'' if PACKED else 'r'}"
    if not final.exists():
        head = load_eagle3(folder, target, target_tensor, any_target=any_target)
        if head.spec.head_dim % HEAD_DIM_STEP:
            return NumpyHead(head)
        _convert(head, weights, final)
    return OnnxHead(final, threads)


# -- conversion -------------------------------------------------------------------------------------------------------


def write_head(directory: Path, head: HeadWeights, weights: str) -> None:
    """Write the files of a converted head into a new directory."""
    from hvd.models.onnx.eagle3_graph import (  # needs onnx and Numba, which decoding can do without
        rope_table,
        write_graphs,
    )

    write_graphs(directory, head, weights)
    np.save(directory / "embedding.npy", head.embedding)
    np.save(directory / "target_ids.npy", head.target_ids)
    np.save(directory / ROPE_FILE, rope_table(head.spec))
    (directory / "spec.json").write_text(json.dumps(asdict(head.spec), indent=2), "utf-8")


def _read(directory: Path) -> tuple[HeadSpec, NDArray[Any], Int32Array, Float32Array]:
    try:
        facts = json.loads((directory / "spec.json").read_text("utf-8"))
        facts |= {"aux_layers": tuple(facts["aux_layers"]), "rope": RopeConfig(**facts["rope"])}
        embedding = np.asarray(np.load(directory / "embedding.npy", mmap_mode="r"))
        rope = np.load(directory / ROPE_FILE, mmap_mode="r")
        return HeadSpec(**facts), embedding, np.load(directory / "target_ids.npy"), rope
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"can't open the converted EAGLE3 head in {directory} ({error}); remove it") from error


def _digest(folder: Path, target: TargetSpec, any_target: bool) -> str:
    """Of all that a conversion depends on: the head's files, and the facts of the target that it was checked for."""
    digest = hashlib.blake2b(digest_size=20)
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        path = folder / name
        if path.exists():
            with path.open("rb") as file:
                digest.update(name.encode() + hashlib.file_digest(file, "blake2b").digest())
    facts = (target.fingerprint, target.aux_layers, target.vocab_size, target.hidden_size, target.num_layers)
    digest.update(repr((*facts, any_target)).encode())
    return digest.hexdigest()


def _convert(head: HeadWeights, weights: str, final: Path) -> None:
    """Write all files under a temporary name, flush and rename. Whoever comes second keeps the first one's."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as parent:
            fresh = Path(parent) / "head"
            write_head(fresh, head, weights)
            for path in (path for path in fresh.rglob("*") if path.is_file()):
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            if not final.exists():
                fresh.rename(final)
    except OSError as error:
        if final.exists():
            return
        raise CheckpointError(
            f"can't write the converted EAGLE3 head to {final.parent} ({error}); set HVD_CACHE to another place"
        ) from error
