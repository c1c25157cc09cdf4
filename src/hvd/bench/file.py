"""The file of `hvd bench --json` (docs/bench.md): written whole every time, so that a kill loses at most the last
conversations; and how to read one, of this format or an older one."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvd.bench.analysis import analyse
from hvd.bench.environment import environment
from hvd.bench.report import summarize
from hvd.bench.runner import Outcome
from hvd.errors import ConfigError
from hvd.payoff.files import write_whole

FORMAT = 2
_SPARE = 20
"""Writing, which adds everything up anew, takes at most one part in so many of the time."""
_DIGITS = 20
"""Of the largest integer, a seed of 64 bits."""
_LISTS = ("records", "findings", "skipped", "failed")


class BenchFile:
    """Collects outcomes and writes them to a path (or nowhere, for None).

    model, settings   what is measured, and how; a file to be resumed must say the same
    data              which prompts; a file may be resumed with more of them
    peers             which peers took part and how they are timed; which are missing, and why
    every             conversations between two writes, or more where adding up has come to take long
    """

    def __init__(
        self,
        path: Path | None,
        model: Mapping[str, Any],
        settings: Mapping[str, Any],
        data: Mapping[str, Any],
        *,
        peers: Mapping[str, Any] | None = None,
        resume: bool = False,
        every: int = 5,
    ) -> None:
        """Raises ConfigError when the path can't be written, or holds something that can't be resumed."""
        self._path, self._every, self._unwritten = path, every, 0
        self._not_before = 0.0
        self._data, self._peers = data, peers or {"methods": {}, "missing": {}}
        self._head: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, "model": model, "settings": settings}))
        self.records: list[dict[str, Any]] = []
        self.findings: list[dict[str, Any]] = []
        self.skipped: list[dict[str, str]] = []
        self.failed: list[dict[str, str]] = []
        if path is not None and resume and path.exists():
            self._resume(path)
        if path is not None:
            _check_writable(path)

    def done(self, ids: list[str]) -> bool:
        """Whether all turns of a conversation are there already."""
        known = {record["id"] for record in self.records} | {entry["id"] for entry in self.skipped}
        return all(id_ in known for id_ in ids)

    def add(self, outcome: Outcome) -> None:
        """Take a conversation's records; write when it is time."""
        self.records += [record.as_json() for record in outcome.records]
        self.findings += outcome.findings
        self.skipped += [{"id": id_, "why": why} for id_, why in outcome.skipped]
        self.failed += [{"id": id_, "method": method, "why": why} for id_, method, why in outcome.failed]
        self._unwritten += 1
        if self._unwritten >= self._every and time.monotonic() >= self._not_before:
            self.write()

    def content(self) -> dict[str, Any]:
        """Everything, as it is written."""
        return {
            **self._head,
            "data": self._data,
            "peers": self._peers,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": environment(),
            "summary": summarize(self.records),
            "analysis": analyse(self._head["model"], self.records, self.findings),
            **{name: getattr(self, name) for name in reversed(_LISTS)},
        }

    def write(self) -> None:
        """Write the file under a temporary name, flush, rename. Raises ConfigError when the disk refuses."""
        self._unwritten = 0
        if self._path is None:
            return
        started = time.monotonic()
        try:
            write_whole(self._path, outline(self.content(), 3).encode())
        except OSError as error:
            raise ConfigError(f"can't write {self._path}: {error.strerror or error}") from error
        ended = time.monotonic()
        self._not_before = ended + _SPARE * (ended - started)

    def _resume(self, path: Path) -> None:
        try:
            old = _parsed(path.read_text("utf-8"))
            head = {key: old[key] for key in self._head}
            lists = {name: list(old.get(name, [])) if head["format"] < FORMAT else list(old[name]) for name in _LISTS}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} can't be resumed: it is no complete file of 'hvd bench --json'") from error
        for part, want in self._head.items():
            if head[part] != want:
                raise ConfigError(f"{path} can't be resumed: it was made with {_difference(part, head[part], want)}")
        for name, entries in lists.items():
            setattr(self, name, entries)


def outline(value: Any, depth: int) -> str:
    """A JSON value in lines that people and diffs can read: one for each entry of its upper levels, no more."""
    if depth and value and isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {outline(item, depth - 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    if depth and value and isinstance(value, list | tuple):
        return "[\n" + ",\n".join(outline(item, depth - 1) for item in value) + "\n]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_bench(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A benchmark file as a dictionary of the present format.

    One of format 1 is brought up to it: what it never held (findings, peers, stretches of an answer) is empty, and its
    summary is made anew. Raises ConfigError for anything else.
    """
    path = Path(path)
    try:
        content: dict[str, Any] = _parsed(path.read_text("utf-8"))
        if content["format"] not in (1, FORMAT):
            raise ConfigError(f"{path} has format {content['format']!r}; this hvd reads 1 to {FORMAT}")
        content = content if content["format"] == FORMAT else _upgraded(content)
        if wrong := [name for name in _LISTS if not isinstance(content[name], list)]:
            raise TypeError(f"{wrong[0]} is no list")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no complete file of 'hvd bench --json' ({_brief(error)})") from error
    return content


def _parsed(text: str) -> Any:
    """A JSON value whose numbers are those that `outline` writes: finite, integers of 64 bits. ValueError else."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_integer)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number is {text[:20]}")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _brief(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)[:120]


def _upgraded(old: dict[str, Any]) -> dict[str, Any]:
    records = [{**record, "peer": None, "decoded": record["tokens"], "stretches": []} for record in old["records"]]
    return {
        **old,
        "format": FORMAT,
        "peers": {"methods": {}, "missing": {}},
        "summary": summarize(records),
        "analysis": analyse(old["model"], records, []),
        "failed": [],
        "findings": [],
        "records": records,
    }


def _difference(part: str, old: Any, new: Any) -> str:
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{part} {old!r}, now {new!r}"
    key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return f"{part} {key} {old.get(key)!r}, now {new.get(key)!r}"


def _check_writable(path: Path) -> None:
    """Find out now, not after hours of measuring."""
    if path.is_dir():
        raise ConfigError(f"can't write {path}: it is a directory")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"can't write {path}: {folder} is no directory, or read-only")
