"""Data sets of the Hugging Face hub, row by row, with huggingface_hub and pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hvd.errors import HVDError

CONVERTED = "refs/convert/parquet"
"""The branch on which the hub keeps its own Parquet conversion of a data set, as CONFIG/SPLIT/NNNN.parquet."""
REVISIONS = ("main", CONVERTED)
TIMEOUT = 10.0
"""Seconds to wait for the hub's answer."""
_BATCH = 16

Row = dict[str, Any]


class UnreachableError(HVDError):
    """A data set can't be had: no network and not cached, not there, or not free to all."""


class Hub:
    """Finds and reads files of data sets. Downloads go into huggingface_hub's own cache; HF_HUB_OFFLINE is respected.

    Once there was no answer at all, it is not asked again.
    """

    def __init__(self) -> None:
        self._silent: str | None = None

    def rows(self, repo: str, patterns: Sequence[str], *, stream: bool = False) -> Iterator[Row]:
        """The rows of the first file, in order of patterns, that matches one (fnmatch; .parquet, .jsonl or .json).

        repo     a data set's id
        stream   do not download a Parquet file, which may be gigabytes, but read of it what is asked for
        Raises UnreachableError in one line.
        """
        failures: tuple[type[BaseException], ...] = (*_failures(), UnreachableError, OSError, ValueError, RuntimeError)
        try:
            revision, name = self._find(repo, patterns)
            if stream and name.endswith(".parquet"):
                yield from _parquet_rows(self.open(repo, revision, name), f"{repo}: {name}")
                return
            path = self.download(repo, revision, name)
        except failures as error:
            cached = _cached(repo, patterns)
            if cached is None:
                raise UnreachableError(f"{repo} can't be had ({self._reason(error)})") from error
            path = cached
        yield from _parquet_rows(path, str(path)) if path.suffix == ".parquet" else _json_rows(path)

    def _find(self, repo: str, patterns: Sequence[str]) -> tuple[str, str]:
        """(revision, name) of that file. Raises UnreachableError when there is none, and what huggingface_hub does."""
        if self._silent is not None:
            raise UnreachableError(self._silent)
        for revision in REVISIONS:
            found = _first_match(self.names(repo, revision), patterns)
            if found is not None:
                return revision, found
        raise UnreachableError(f"no file like {' or '.join(patterns)}")

    def _reason(self, error: BaseException) -> str:
        from huggingface_hub.errors import HfHubHTTPError

        reason = _line(error)
        if not isinstance(error, HfHubHTTPError | UnreachableError):
            self._silent = reason
        return reason

    def names(self, repo: str, revision: str) -> list[str]:
        """Names of a data set's files."""
        from huggingface_hub import HfApi

        found = HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT).siblings
        return [file.rfilename for file in found or ()]

    def download(self, repo: str, revision: str, name: str) -> Path:
        """A local copy of a file."""
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision))

    def open(self, repo: str, revision: str, name: str) -> Any:
        """A file to be read over the network, as a Python file object."""
        from huggingface_hub import HfFileSystem

        return HfFileSystem().open(f"datasets/{repo}@{revision}/{name}", "rb")


def _failures() -> tuple[type[BaseException], ...]:
    """What huggingface_hub raises: its own error, and that of the HTTP library that it builds on, which has changed."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError, *HfHubHTTPError.__bases__


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _first_match(names: Sequence[str], patterns: Sequence[str]) -> str | None:
    """The first name, in alphabetical order, that matches the earliest pattern."""
    return next((name for pattern in patterns for name in sorted(names) if fnmatch(name, pattern)), None)


def _cached(repo: str, patterns: Sequence[str]) -> Path | None:
    """A copy from an earlier download: which file it was can't be asked without a network, so any that fits will do."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"datasets--{repo.replace('/', '--')}" / "snapshots"
    for snapshot in sorted(folder.glob("*"), reverse=True):
        names = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
        found = _first_match(names, patterns)
        if found is not None:
            return snapshot / found
    return None


def _parquet_rows(source: Any, name: str) -> Iterator[Row]:
    """Rows of a path or file object in small batches: only the first ones of a large file are wanted."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UnreachableError(f"{name} can't be read as Parquet ({_line(error)})") from error


def _json_rows(path: Path) -> Iterator[Row]:
    """One object a line, or one array of objects."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            if first.lstrip().startswith("["):
                yield from json.loads(first + file.read())
                return
            for line in (first, *file):
                if line.strip():
                    yield json.loads(line)
    except (OSError, ValueError) as error:
        raise UnreachableError(f"{path} can't be read as JSON ({_line(error)})") from error
