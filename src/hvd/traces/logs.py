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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from hvd.errors import ConfigError, TraceError
from hvd.traces.logs_chat import FORMS, MESSAGE_KEYS, Conversations, NoAnswerError, form_of
from hvd.traces.logs_record import Recorded
from hvd.traces.logs_vllm import ABOUT, VLLM, VLLMLog, looks_like_vllm
from hvd.traces.reader import read_traces
from hvd.traces.schema import VERSION_KEY, Trace

TRACES = "traces"
FORMATS = {**FORMS, VLLM: ABOUT, TRACES: "our own traces (Parquet); one answer a trace"}
"""Formats by name, and what they are."""

STDIN = "-"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".log", ".txt", ".parquet", ".jsonl.gz", ".ndjson.gz", ".log.gz", ".txt.gz")
"""Files that are taken from a directory."""

LINE_LIMIT = 64 * 1024 * 1024
NAMED = 5
_HEAD = 256 * 1024
_BATCH = 64

Progress = Callable[[int, int], None]
"""(bytes read, bytes of all files)"""


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
        """Count a broken line."""
        self.broken += 1
        if len(self.faults) < NAMED:
            self.faults.append(f"{self.path}:{line}: {why}")


class LogReader:
    """Yields what the files hold. `tallies` has one entry for each file begun."""

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

    def __iter__(self) -> Iterator[Recorded | Trace]:
        """All answers, in order. ConfigError for a file that can't be opened or is of no known format."""
        for path in self._files:
            if path != STDIN and _magic(path) == b"PAR1":
                yield from self._parquet(path)
            else:
                yield from self._lines(path)
            self._done += 0 if path == STDIN else os.path.getsize(path)

    # -- text ---------------------------------------------------------------------------------------------------------

    def _lines(self, path: str) -> Iterator[Recorded]:
        with _open(path) as raw:
            stream = _unzipped(raw)
            head = _peek(stream, path)
            tally = FileTally(_shown(path), self._form or _detect(head, path))
            self.tallies.append(tally)
            if tally.format == TRACES:
                raise ConfigError(f"{path} is no Parquet file, so it holds no traces")
            reader = self._vllm if tally.format == VLLM else self._json
            yield from reader(self._numbered(stream, raw, tally), tally)

    def _numbered(self, stream: IO[bytes], raw: IO[bytes], tally: FileTally) -> Iterator[tuple[int, bytes]]:
        try:
            while line := stream.readline(LINE_LIMIT):
                tally.lines += 1
                if len(line) >= LINE_LIMIT:
                    tally.fault(tally.lines, f"longer than {LINE_LIMIT} bytes")
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(LINE_LIMIT)
                    continue
                if tally.lines % 128 == 0 and raw.seekable():
                    self._progress(self._done + raw.tell(), self._total)
                yield tally.lines, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            tally.fault(tally.lines + 1, f"the compressed file is torn here ({error})")

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
                tally = FileTally(_shown(path), self._form or (TRACES if ours else _form_of_columns(schema, path)))
                self.tallies.append(tally)
                if ours != (tally.format == TRACES):
                    raise ConfigError(f"{path} {'holds traces' if ours else 'is no trace file'}; leave --format out")
                yield from self._traces(path, tally) if ours else self._rows(file, tally)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: a Parquet file that can't be read ({str(error).splitlines()[0]})") from error

    def _traces(self, path: str, tally: FileTally) -> Iterator[Trace]:
        try:
            for trace in read_traces(path, warn=lambda line: tally.fault(0, line)):
                tally.lines += 1
                tally.answers += len(trace.response) > 0
                yield trace
        except TraceError as error:
            raise ConfigError(str(error)) from error

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


def _open(path: str) -> io.BufferedReader:
    if path == STDIN:
        return io.BufferedReader(_Rest(sys.stdin.buffer), _HEAD)
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from error


def _magic(path: str) -> bytes:
    with _open(path) as file:
        return file.read(4)


def _unzipped(raw: io.BufferedReader) -> io.BufferedReader:
    """The text of a file, gzipped or not, with a beginning that can be looked at without taking it."""
    if raw.peek(2)[:2] != b"\x1f\x8b":
        return io.BufferedReader(_Rest(raw), _HEAD)
    return io.BufferedReader(gzip.GzipFile(fileobj=raw), _HEAD)


class _Rest(io.RawIOBase):
    """A stream as a raw one, so that a larger buffer can stand on it."""

    def __init__(self, inner: IO[bytes]) -> None:
        self._inner = inner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._inner.readinto(buffer)  # type: ignore[attr-defined, no-any-return]


def _peek(stream: io.BufferedReader, path: str) -> bytes:
    try:
        head = stream.peek(_HEAD)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path}: a gzip file that can't be read ({error})") from error
    if not head.strip():
        raise ConfigError(f"{path} is empty")
    return head


def _detect(head: bytes, path: str) -> str:
    """The format by the first lines. ConfigError when it is none."""
    lines = [line for line in head.split(b"\n") if line.strip()]
    if lines[0].lstrip().startswith(b"["):
        raise ConfigError(f"{path} begins with a JSON array; give one record a line (jq -c '.[]' {path} > {path}l)")
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
    if looks_like_vllm(head.decode("utf-8", "replace")):
        return VLLM
    if (form := _torn_form(head)) is not None:
        return form
    what = "JSON without messages, prompts or responses" if seen else "neither JSON Lines nor a vLLM log nor Parquet"
    raise ConfigError(
        f"{path}: the format is not known ({what}); known are {', '.join(FORMATS)}: force one with --format"
    )


def _torn_form(head: bytes) -> str | None:
    """A first record longer than what was looked at: go by the keys that it shows."""
    if not head.lstrip().startswith(b"{"):
        return None
    shown = head.decode("utf-8", "replace")
    asks = any(f'"{key}"' in shown for key in MESSAGE_KEYS)
    if '"request"' in shown[:4096] or '"body"' in shown[:4096]:
        return "requests"
    return "chat" if asks else "completions" if '"prompt"' in shown else None


def _form_of_columns(schema: Any, path: str) -> str:
    form = form_of({name: [{}] if name in MESSAGE_KEYS else "x" for name in schema.names})
    if form is None:
        raise ConfigError(f"{path}: no column of messages or of prompts ({', '.join(schema.names[:8])} are there)")
    return form


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
