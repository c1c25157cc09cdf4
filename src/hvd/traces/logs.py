"""Reads logs of many formats as recorded answers: each file once, line by line, in bounded memory.

    chat          JSON Lines or Parquet with `messages` (or `conversations` with from and value)      logs_chat.py
    requests      JSON Lines with a request's messages and its response                               logs_chat.py
    completions   JSON Lines with a prompt and its completion                                         logs_chat.py
    vllm          the text log of a vLLM server                                                       logs_vllm.py
    traces        our own traces, Parquet                                                             reader.py

Files may be gzipped. A broken line costs that line.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from hvd.errors import ConfigError, TraceError
from hvd.traces.logs_chat import FORMS, Conversations, NoAnswerError, form_of
from hvd.traces.logs_record import Recorded
from hvd.traces.logs_vllm import ABOUT, VLLM, VLLMLog, looks_like_vllm
from hvd.traces.reader import SKIPPED, read_traces
from hvd.traces.schema import VERSION_KEY, Trace

TRACES = "traces"
FORMATS = {**FORMS, VLLM: ABOUT, TRACES: "our own traces (Parquet); one answer a trace"}
"""Formats by name, and what they are."""

STDIN = "-"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".log", ".txt", ".parquet", ".jsonl.gz", ".ndjson.gz", ".log.gz", ".txt.gz")
"""Files that are taken from a directory."""

LINE_LIMIT = 64 * 1024 * 1024
NAMED = 5
_HEAD_LINES, _HEAD_BYTES = 1000, 1024 * 1024
_BATCH = 64
GZIP = b"\x1f\x8b"

Progress = Callable[[int, int], None]
"""(bytes read, bytes of all files)"""


class NoLogError(ConfigError):
    """A file that holds no log: empty, of no known format, or torn from the start."""


class BadLineError(ValueError):
    """Stands in the place of a line that can't be taken."""


@dataclass(slots=True)
class FileTally:
    """What came of one file.

    format       one of `FORMATS`
    lines        lines, or rows of a Parquet file
    answers      recorded answers, repeats left out
    repeats      assistant messages that an earlier line had already
    unanswered   sound records without an answer (or, in a vLLM log, without the prompt)
    broken       lines that could not be read; `faults` names the first few as "file:line: why"
    """

    path: str
    format: str
    lines: int = 0
    answers: int = 0
    repeats: int = 0
    unanswered: int = 0
    broken: int = 0
    faults: list[str] = field(default_factory=list)

    def fault(self, line: int, why: str) -> None:
        """Count a broken line; 0 where `why` says itself what is broken."""
        self.broken += 1
        if len(self.faults) < NAMED:
            self.faults.append(f"{self.path}:{line}: {why}" if line else why)


class LogReader:
    """Yields what the files hold. `tallies` has one entry for each file begun, `skipped` why others were left out."""

    def __init__(self, paths: Sequence[str], form: str | None = None, progress: Progress | None = None) -> None:
        """
        paths   files, directories (their files with one of `SUFFIXES`) or "-" for stdin
        form    one of `FORMATS`; None = see for each file

        ConfigError for a path that names nothing and for an unknown format.
        """
        if form is not None and form not in FORMATS:
            raise ConfigError(f"unknown format {form!r}, known are {', '.join(FORMATS)}")
        self._files = log_files(paths)
        self._form = form
        self._progress = progress or (lambda done, total: None)
        self._total = sum(os.path.getsize(path) for path in self._files if path != STDIN)
        self._done = 0
        self._conversations = Conversations()
        self.tallies: list[FileTally] = []
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[Recorded | Trace]:
        """All answers, in order. A file that holds no log is left out; ConfigError when it is the only one."""
        for path in self._files:
            try:
                yield from (self._parquet if path != STDIN and _magic(path) == b"PAR1" else self._lines)(path)
            except NoLogError as error:
                if len(self._files) == 1:
                    raise
                self.skipped.append(str(error))
            self._done += 0 if path == STDIN else os.path.getsize(path)

    # -- text ---------------------------------------------------------------------------------------------------------

    def _lines(self, path: str) -> Iterator[Recorded]:
        with _opened(path) as raw:
            lines = _whole_lines(cast("IO[bytes]", gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == GZIP else raw))
            head = _head(lines, path)
            tally = FileTally(_shown(path), self._form or _detect(head, path))
            self.tallies.append(tally)
            if tally.format == TRACES:
                raise ConfigError(f"{path} is no Parquet file, so it holds no traces")
            reader = self._vllm if tally.format == VLLM else self._json
            yield from reader(self._numbered(chain(head, lines), raw, tally), tally)

    def _numbered(
        self, lines: Iterable[bytes | BadLineError], raw: IO[bytes], tally: FileTally
    ) -> Iterator[tuple[int, bytes]]:
        for line in lines:
            tally.lines += 1
            if tally.lines % 128 == 0 and raw.seekable():
                self._progress(self._done + raw.tell(), self._total)
            if isinstance(line, bytes):
                yield tally.lines, line
            else:
                tally.fault(tally.lines, str(line))

    def _json(self, lines: Iterable[tuple[int, bytes]], tally: FileTally) -> Iterator[Recorded]:
        for number, line in lines:
            if line.strip():
                yield from self._record(partial(json.loads, line), number, tally)

    def _record(self, load: Callable[[], Any], number: int, tally: FileTally) -> Iterator[Recorded]:
        """The answers of one record; or it is broken, or has none."""
        before = self._conversations.repeats
        found: list[Recorded] = []
        dataset = _dataset(tally.path)
        try:
            for answer in self._conversations.answers(load(), f"{tally.path}:{number}", dataset, tally.format):
                found.append(answer)
        except NoAnswerError:
            tally.unanswered += 1
        except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
            tally.fault(number, _why(error))
            return
        tally.repeats += self._conversations.repeats - before
        tally.answers += len(found)
        yield from found

    def _vllm(self, lines: Iterable[tuple[int, bytes]], tally: FileTally) -> Iterator[Recorded]:
        log = VLLMLog(_dataset(tally.path))
        for number, line in lines:
            try:
                answer = log.line(line.decode("utf-8", "replace"), f"{tally.path}:{number}")
            except ValueError as error:
                tally.fault(number, str(error))
                continue
            if answer is not None:
                tally.answers += 1
                yield answer
        tally.unanswered = log.unprompted + max(0, log.requests - tally.answers - log.unprompted)

    # -- Parquet ------------------------------------------------------------------------------------------------------

    def _parquet(self, path: str) -> Iterator[Recorded | Trace]:
        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
                ours = VERSION_KEY in (schema.metadata or {})
                tally = FileTally(_shown(path), self._form or (TRACES if ours else _form_of_rows(file, path)))
                self.tallies.append(tally)
                if ours != (tally.format == TRACES):
                    raise ConfigError(f"{path} {'holds traces' if ours else 'is no trace file'}; leave --format out")
                yield from (self._traces(path, tally) if ours else self._rows(file, tally))
        except (pa.ArrowException, OSError) as error:
            raise NoLogError(f"{path}: a Parquet file that can't be read ({str(error).splitlines()[0]})") from error

    def _traces(self, path: str, tally: FileTally) -> Iterator[Trace]:
        def skipped(line: str) -> None:
            if line.endswith(SKIPPED):  # else a sum of those that came before
                tally.fault(0, line.removesuffix(SKIPPED))

        try:
            for trace in read_traces(path, warn=skipped):
                tally.lines += 1
                tally.answers += len(trace.response) > 0
                yield trace
        except TraceError as error:
            raise NoLogError(str(error)) from error

    def _rows(self, file: Any, tally: FileTally) -> Iterator[Recorded]:
        for batch in file.iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                tally.lines += 1
                filled = {key: value for key, value in row.items() if value is not None}
                yield from self._record(partial(_without_none, filled), tally.lines, tally)


def log_files(paths: Sequence[str]) -> list[str]:
    """The files that the arguments name. ConfigError for one that names none."""
    files: dict[str, None] = {}
    for path in paths:
        if not path:
            raise ConfigError("an empty text names no logs; give files, directories, or - for stdin")
        found = [path] if path == STDIN or Path(path).is_file() else _inside(Path(path))
        if not found:
            raise ConfigError(
                f"no logs at {path}; give files, directories with {', '.join(SUFFIXES[:6])}, or - for stdin"
            )
        files.update(dict.fromkeys(found))
    return list(files)


def _inside(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(
        str(f) for f in path.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES) and not f.name.startswith(".")
    )


@contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file; stdin stays open."""
    if path == STDIN:
        yield cast("io.BufferedReader", sys.stdin.buffer)
        return
    with open(path, "rb") as file:
        yield file


def _magic(path: str) -> bytes:
    with _opened(path) as file:
        return file.read(4)


def _whole_lines(stream: IO[bytes]) -> Iterator[bytes | BadLineError]:
    """The lines of a stream; in place of one that can't be taken whole, why."""
    try:
        while line := stream.readline(LINE_LIMIT):
            whole = len(line) < LINE_LIMIT
            yield line if whole else BadLineError(f"longer than {LINE_LIMIT} bytes")
            while not whole and line and not line.endswith(b"\n"):
                line = stream.readline(LINE_LIMIT)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield BadLineError(f"the compressed file is torn here ({error})")


def _head(lines: Iterator[bytes | BadLineError], path: str) -> list[bytes | BadLineError]:
    """The first lines, to find the format by. NoLogError when there is nothing in them."""
    head: list[bytes | BadLineError] = []
    size = 0
    for line in lines:
        head.append(line)
        size += len(line) if isinstance(line, bytes) else 0
        if len(head) >= _HEAD_LINES or size >= _HEAD_BYTES:
            break
    if not any(isinstance(line, bytes) and line.strip() for line in head):
        why = next((str(line) for line in head if isinstance(line, BadLineError)), None)
        raise NoLogError(f"{path} is empty" if why is None else f"{path} can't be read: {why}")
    return head


def _detect(head: Iterable[bytes | BadLineError], path: str) -> str:
    """The format by the first lines. NoLogError when it is none."""
    lines = [line for line in head if isinstance(line, bytes) and line.strip()]
    if lines[0].lstrip().startswith(b"["):
        raise NoLogError(f"{path} begins with a JSON array; give one record a line (jq -c '.[]' {path} > {path}l)")
    seen = 0
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            seen += 1
            if (form := form_of(record)) is not None:
                return form
    if looks_like_vllm(b"".join(lines).decode("utf-8", "replace")):
        return VLLM
    what = "JSON without messages, prompts or responses" if seen else "neither JSON Lines nor a vLLM log nor Parquet"
    raise NoLogError(
        f"{path}: the format is not known ({what}); known are {', '.join(FORMATS)}: force one with --format"
    )


def _form_of_rows(file: Any, path: str) -> str:
    for batch in file.iter_batches(batch_size=1):
        if (form := form_of(_without_none(batch.to_pylist()[0]))) is not None:
            return form
        break
    names = ", ".join(file.schema_arrow.names[:8])
    raise NoLogError(f"{path}: no column of messages, or of prompts and completions, or no rows (columns: {names})")


def _without_none(value: Any) -> Any:
    """Parquet fills up the fields that a message does not have."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _shown(path: str) -> str:
    return "stdin" if path == STDIN else path


def _dataset(path: str) -> str:
    return Path(path).name.split(".")[0]


def _why(error: Exception) -> str:
    """Why a line is broken, without any of its text."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error) or type(error).__name__
