"""Benchmark sets by name: prompt files of a directory, or the paper's sixteen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd.bench.hub import Hub, UnreachableError
from hvd.bench.paper_sets import PAPER_SETS, PaperSet
from hvd.errors import ConfigError
from hvd.traces.prompts import Prompt, read_prompts

SUITES = ("local", "paper")
PAPER_LIMIT = 80
"""Conversations of each of the paper's sets when no limit is given; some have tens of thousands."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A set that could not be had: why, what stands in for it, and whether that was read in its place."""

    name: str
    why: str
    stand_ins: tuple[str, ...]
    read: bool

    def __str__(self) -> str:
        return f"{self.name} ({'in its place' if self.read else 'stands in for it'}: {', '.join(self.stand_ins)})"


@dataclass(frozen=True, slots=True)
class Found:
    """What a suite gave.

    prompts   in the order of the sets
    sets      names of those that were read
    missing   those that could not be had
    """

    prompts: list[Prompt]
    sets: list[str]
    missing: list[Missing] = field(default_factory=list)


def local_sets(
    directory: Path, names: Sequence[str], split: str | None, limit: int | None, warn: Callable[[str], None]
) -> Found:
    """`directory`/NAME.jsonl for each name, or all there are. ConfigError naming the known ones for an unknown name."""
    known = {path.stem: path for path in sorted(directory.glob("*.jsonl"))}
    if not known:
        raise ConfigError(f"no prompt files (NAME.jsonl) in {directory}")
    _check_names(names, list(known), f"in {directory}")
    chosen = list(names) or list(known)
    files = [known[name] for name in chosen]
    return Found(list(read_prompts(files, split=split, limit=limit, warn=warn)), chosen)


def paper_sets(
    hub: Hub,
    names: Sequence[str],
    split: str | None,
    limit: int | None,
    warn: Callable[[str], None],
    stand_ins: Path | None = None,
) -> Found:
    """The paper's sets from the hub; where one can't be had, its stand-ins out of a local directory, if given.

    Raises ConfigError for an unknown name, or when not one set could be had.
    """
    _check_names(names, list(PAPER_SETS), "among the paper's")
    found = Found([], [])
    for name in names or PAPER_SETS:
        paper = PAPER_SETS[name]
        try:
            found.prompts.extend(_of_split(hub, paper, split, limit or PAPER_LIMIT, warn))
            found.sets.append(name)
        except UnreachableError as error:
            local = _stand_ins(paper, stand_ins)
            there = tuple(path.stem for path in local)
            found.missing.append(Missing(name, str(error), there or paper.stand_ins, bool(local)))
            found.prompts.extend(read_prompts(local, split=split, limit=limit or PAPER_LIMIT, warn=warn))
            found.sets.extend(there)
    if not found.sets:
        raise ConfigError(
            f"none of the sets could be had: {describe(found.missing)}; --data-dir DIR takes them from there"
        )
    return found


def _of_split(hub: Hub, paper: PaperSet, split: str | None, limit: int, warn: Callable[[str], None]) -> list[Prompt]:
    prompts: list[Prompt] = []
    for prompt in paper.prompts(hub, warn):
        if len(prompts) >= limit:
            break
        if split is None or prompt.split == split:
            prompts.append(prompt)
    return prompts


def _stand_ins(paper: PaperSet, directory: Path | None) -> list[Path]:
    if directory is None:
        return []
    return [path for name in paper.stand_ins if (path := directory / f"{name}.jsonl").is_file()]


def describe(missing: Sequence[Missing]) -> str:
    """One line: which sets could not be had, what stands in for them, and the first reason."""
    return f"{', '.join(map(str, missing))}; the first because {missing[0].why}"


def _check_names(names: Sequence[str], known: Sequence[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"no set {name!r} {where}; there are {', '.join(known)}")
