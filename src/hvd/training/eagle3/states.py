"""The target's hidden states along the training text: computed once and kept on disk, as far as the disk may be used.

A shard is a float16 array [tokens, (A+1)*H] of some documents behind each other: the states entering the auxiliary
layers, then the one behind the final norm. A digest of the file stands behind it. Its name is a digest of everything
that it depends on, so a run that was killed, or one with other settings, finds what fits and ignores the rest.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd.errors import TrainingError
from hvd.models.torch_target import TorchTarget
from hvd.training.eagle3.text import Document

SHARD_TOKENS = 32768
PASS_TOKENS = 4096
"""Tokens of a target pass."""
SPARE_BYTES = 1 << 30
"""Room that is left on the disk."""
DIGEST = 32
"""Bytes of the digest behind a shard; one that does not agree with its shard is computed anew."""
LARGEST = float(np.finfo(np.float16).max)


class StateStore:
    """States by document: `store[i]` is (states [n, A*H], final [n, H]), float16 on the CPU.

    Documents beyond the bound are read by the target anew each time.
    """

    def __init__(self, target: TorchTarget, documents: Sequence[Document], folder: Path, max_bytes: int) -> None:
        """folder: where shards lie; max_bytes: bound on what this store keeps there. Nothing is computed yet."""
        spec = target.spec
        self._target, self._documents, self._folder = target, documents, folder
        self._split = len(spec.aux_layers) * spec.hidden_size
        self._width = self._split + spec.hidden_size
        self._shards = _shards(documents)
        row = 2 * self._width
        sizes = np.cumsum([sum(len(documents[i].tokens) for i in shard) * row for shard in self._shards])
        self._kept = int(np.searchsorted(sizes, max_bytes, side="right"))
        self.bytes = int(sizes[self._kept - 1]) if self._kept else 0
        self._where: dict[int, tuple[int, int]] = {}
        self._open: dict[int, NDArray[np.float16]] = {}
        for number, shard in enumerate(self._shards[: self._kept]):
            ends = np.cumsum([len(documents[i].tokens) for i in shard])
            for i, end in zip(shard, ends.tolist(), strict=True):
                self._where[i] = (number, end - len(documents[i].tokens))

    @property
    def stored(self) -> float:
        """Share of the documents whose states are kept."""
        return len(self._where) / max(1, len(self._documents))

    def compute(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Make the shards that are not there yet. `progress` is given tokens done and in all.

        Raises TrainingError when the disk has no room for them, or refuses.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        missing = [number for number in range(self._kept) if not _intact(self._path(number))]
        tokens = {number: sum(len(self._documents[i].tokens) for i in self._shards[number]) for number in missing}
        total, done = sum(tokens.values()), 0
        self._check_room(total * 2 * self._width)
        for number in missing:
            self._write(number)
            done += tokens[number]
            progress(done, total)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The states of a document."""
        if index not in self._where:
            return _as_half(*self._target.read([self._documents[index].tokens])[0])
        number, start = self._where[index]
        if number not in self._open:
            self._open[number] = np.load(self._path(number), mmap_mode="r")
        rows = np.array(self._open[number][start : start + len(self._documents[index].tokens)])
        both = torch.from_numpy(rows)
        return both[:, : self._split], both[:, self._split :]

    def _write(self, number: int) -> None:
        path = self._path(number)
        content = io.BytesIO()
        np.save(content, np.concatenate([self._read(batch) for batch in self._passes(self._shards[number])]))
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with fresh.open("xb") as file:
                file.write(content.getbuffer())
                file.write(hashlib.blake2b(content.getbuffer(), digest_size=DIGEST).digest())
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        except OSError as error:
            raise TrainingError(f"can't write {path}: {error.strerror or error}") from error
        finally:
            fresh.unlink(missing_ok=True)

    def _read(self, batch: Sequence[int]) -> NDArray[np.float16]:
        read = self._target.read([self._documents[i].tokens for i in batch])
        return torch.cat([torch.cat(_as_half(*one), dim=-1) for one in read]).numpy()

    def _passes(self, shard: Sequence[int]) -> list[list[int]]:
        """A shard's documents, as many at a time as a pass takes."""
        passes: list[list[int]] = [[]]
        for i in shard:
            if passes[-1] and sum(len(self._documents[j].tokens) for j in [*passes[-1], i]) > PASS_TOKENS:
                passes.append([])
            passes[-1].append(i)
        return passes

    def _path(self, number: int) -> Path:
        spec = self._target.spec
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{spec.fingerprint} {spec.weights} {spec.aux_layers}".encode())
        for i in self._shards[number]:
            digest.update(self._documents[i].tokens.tobytes() + b"|")
        return self._folder / f"states-{digest.hexdigest()}.npy"

    def _check_room(self, need: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if need + SPARE_BYTES > free:
            raise TrainingError(
                f"no room for the hidden states: they take {need / 1e9:.1f} GB in {self._folder}, where "
                f"{free / 1e9:.1f} GB are free; give less with --states-gb (0 = compute them anew each time)"
            )


def _intact(path: Path) -> bool:
    """Whether a shard is there as it was written. TrainingError when it can't be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TrainingError(f"can't read {path}: {error.strerror or error}; move it out of the way") from error
    return hashlib.blake2b(memoryview(content)[:-DIGEST], digest_size=DIGEST).digest() == content[-DIGEST:]


def _shards(documents: Sequence[Document]) -> list[list[int]]:
    """Documents in order, SHARD_TOKENS or a little more at a time."""
    shards: list[list[int]] = []
    size = SHARD_TOKENS
    for index, document in enumerate(documents):
        if size >= SHARD_TOKENS:
            shards.append([])
            size = 0
        shards[-1].append(index)
        size += len(document.tokens)
    return shards


def _as_half(states: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    """float16 on the CPU; the few states of a model's first tokens that pass its range are clipped."""
    return (
        states.float().clamp(-LARGEST, LARGEST).half().cpu(),
        final.float().clamp(-LARGEST, LARGEST).half().cpu(),
    )
