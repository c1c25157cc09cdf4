"""Reads traces back."""

from __future__ import annotations

import glob
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hvd.errors import TraceError
from hvd.traces.schema import Trace, classes_of, from_table

log = logging.getLogger(__name__)

SKIPPED = "; skipped"
"""How each warning about a part or a trace ends."""

PathLike = str | os.PathLike[str]


def read_traces(
    paths: PathLike | Iterable[PathLike],
    *,
    strict: bool = False,
    warn: Callable[[str], None] = log.warning,
) -> Iterator[Trace]:
    """The traces of files, directories (their `*.parquet`, in order of name) or glob patterns, part by part.

    A corrupt part is skipped whole: `warn` gets one line that names it, and at the end one with the count;
    when `strict`, it raises TraceError instead. A trace whose sampling parameters can't be read is skipped alone,
    named likewise. TraceError in any case for a path that names nothing and for a file of another schema version.
    """
    files, bad = trace_files(paths), 0
    for file in files:
        try:
            traces = _read_part(file)
        except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, zlib.error) as error:
            line = f"trace part {file} is corrupt: {_first_line(error)}"
            if strict:
                raise TraceError(line) from error
            warn(line + SKIPPED)
            bad += 1
        else:
            yield from _sound(traces, file, strict, warn)
    if bad:
        warn(f"{bad} of {len(files)} trace parts skipped")


def _sound(traces: Iterable[Trace], file: Path, strict: bool, warn: Callable[[str], None]) -> Iterator[Trace]:
    """The traces that can be replayed."""
    for trace in traces:
        try:
            trace.max_tokens  # noqa: B018 - reads the sampling parameters
        except TraceError as error:
            if strict:
                raise
            warn(f"{file}: {error}{SKIPPED}")
        else:
            yield trace


def trace_files(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    """The part files that `paths` name, without duplicates. TraceError for a path that names none."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    files: dict[Path, None] = {}
    for path in paths:
        if path == "":
            raise TraceError(
                "an empty text names no traces; give a .parquet file, a directory of them or a glob pattern"
            )
        found = _expand(Path(path))
        if not found:
            raise TraceError(f"no trace files at {path}; give a .parquet file, a directory of them or a glob pattern")
        files.update(dict.fromkeys(found))
    return list(files)


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*.parquet") if not file.name.startswith("."))
    if path.is_file():
        return [path]
    found = (Path(name) for name in sorted(glob.glob(str(path), recursive=True)))
    return [file for match in found for file in _expand(match)]


def _read_part(path: Path) -> list[Trace]:
    with pq.ParquetFile(path, page_checksum_verification=True) as part:
        classes = classes_of(part.schema_arrow.metadata, str(path))
        return from_table(part.read(), classes)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
