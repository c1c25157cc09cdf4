"""The directory that a head is made in: one run at a time, and nothing of others is touched."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvd.errors import TrainingError

HEAD_FILES = ("model.safetensors", "config.json", "training_args.json", "curve.json", "README.md")
_LEFTOVERS = (".checkpoint.pt.*", ".head.*", "states/.states-*", "text/*/.part-*.tmp")
"""Temporary names of writers here; whatever bears one when a run begins was left by a kill."""


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Hold the directory for this run, clear what killed ones left half-written.

    Raises TrainingError when another run holds it, when it can't be made, or when `out`/head holds files that a head
    has not: the finished head takes that directory's place.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as error:
        raise TrainingError(f"can't train in {out}: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TrainingError(f"another run is at work in {out}; wait for it, or give another --out") from error
        _check_head(out / "head")
        for pattern in _LEFTOVERS:
            for path in out.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        yield


def _check_head(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise TrainingError(f"{folder} is in the way: the head is going to be a directory of that name")
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in HEAD_FILES)
    if foreign:
        raise TrainingError(f"{folder} holds what is not part of a head ({', '.join(foreign[:3])}); move it elsewhere")
