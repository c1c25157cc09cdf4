"""Writes traces: a directory of Parquet parts, each complete or absent."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hvd.errors import TraceError
from hvd.traces.schema import Trace, to_table


class TraceWriter:
    """Appends traces to a directory, in parts of at most `every` requests or `seconds` of waiting.

    A part is written under a temporary name, flushed to the disk and renamed, so that a kill loses at most
    what is pending. Use it in a `with` block: leaving it, by Ctrl-C too, writes the rest. Parts are
    readable by the owner only (0600), and so is the directory when it is made here (0700).
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        token_classes: NDArray[np.uint8],
        *,
        every: int = 32,
        seconds: float = 10.0,
    ) -> None:
        """`token_classes` is uint8 [V], the class of every token id (`hvd.tokenizer`).

        Raises TraceError when the directory can't be made or is a file.
        """
        self.directory = Path(directory)
        self.written = 0
        self._classes = np.asarray(token_classes, np.uint8)
        self._every, self._seconds = every, seconds
        self._pending: list[Trace] = []
        self._since = time.monotonic()
        self._run, self._part = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(4).hex()}", 0
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"can't make the trace directory {self.directory}: {error.strerror}") from error

    def add(self, trace: Trace) -> None:
        """Take one trace; write a part when one is due. TraceError for a negative token id."""
        self._check(trace)
        if not self._pending:
            self._since = time.monotonic()
        self._pending.append(trace)
        if len(self._pending) >= self._every or time.monotonic() - self._since >= self._seconds:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one part. TraceError when the disk refuses; it stays pending then."""
        if not self._pending:
            return
        path = self.directory / f"part-{self._run}-{self._part:05d}.parquet"
        try:
            self._write(path)
        except OSError as error:
            raise TraceError(f"can't write the trace part {path}: {error.strerror or error}") from error
        # The name changes only here: interrupted before, the next flush writes the same part again.
        written, self._pending, self._part = len(self._pending), [], self._part + 1
        self.written += written

    def close(self) -> None:
        """Write the rest."""
        self.flush()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, trace: Trace) -> None:
        for name, tokens in (("prompt", trace.prompt), ("response", trace.response)):
            if len(tokens) and int(tokens.min()) < 0:
                raise TraceError(f"trace {trace.id}: its {name} has a negative token id")

    def _write(self, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                table = to_table(self._pending, self._classes)
                pq.write_table(table, file, compression="zstd", write_page_checksum=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
