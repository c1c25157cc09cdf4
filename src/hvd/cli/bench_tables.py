"""The tables of `hvd bench`, for terminals of any width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

NARROW = 76
"""Columns below which figures in brackets and intervals are left out."""
_GAP = 2

Rows = Sequence[Mapping[str, Any]]


def overview(summary: Mapping[str, Any], fastest: Mapping[str, int], width: int) -> Table:
    """One line a method, over all prompts."""
    whole = [row for row in summary["rows"] if row["level"] == "all"]
    straight = {row["policy"]: row for row in whole if not row["loops"]}
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "method": lambda row: row["policy"],
        "speed": lambda row: f"{row['speedup_macro']:.2f}",
        "95 %": lambda row: f"{row['macro_low']:.2f} - {row['macro_high']:.2f}",
        "no loops": lambda row: _number(straight.get(row["policy"], {}).get("speedup_macro")),
        "tok/pass": lambda row: _number(row["tokens_per_cycle"]),
        "first in": lambda row: str(fastest.get(row["policy"], "-")),
    }
    if width < NARROW:
        del columns["95 %"], columns["first in"]
    if not summary["looped"]:
        del columns["no loops"]
    title = "speed over plain decoding, geometric mean over sets"
    table = _table(title, list(columns))
    for row in whole:
        if row["loops"]:
            table.add_row(*(cell(row) for cell in columns.values()))
    return table


def by_group(rows: Rows, title: str, width: int) -> Iterator[Table]:
    """Sets and categories downwards, methods across; as many tables as the width needs.

    `plain` is 1 everywhere, and plain measured again has a line of its own: both are left out.
    """
    groups = list(dict.fromkeys((row["level"], row["group"]) for row in rows))
    cells = {(row["level"], row["group"], row["policy"]): row for row in rows}
    columns = {
        policy: [_cell(cells.get((*group, policy)), group[0], width) for group in groups]
        for policy in dict.fromkeys(row["policy"] for row in rows)
        if policy not in ("plain", "plain-again")
    }
    prompts = [str(max(row["prompts"] for row in rows if (row["level"], row["group"]) == group)) for group in groups]
    names = [group for _, group in groups]
    room = width - max(map(len, [*names, "group"])) - max(map(len, [*prompts, "n"])) - 3 * _GAP
    for part in _parts(columns, room):
        table = _table(title, ["group", "n", *part])
        for i, (level, name) in enumerate(groups):
            shown = name if level == "dataset" else f"[bold]{name}[/bold]"
            table.add_row(shown, prompts[i], *(columns[policy][i] for policy in part))
        yield table


def _parts(columns: Mapping[str, Sequence[str]], room: int) -> Iterator[list[str]]:
    """Cut the columns so that each part fits into the room; at least one a part."""
    part: list[str] = []
    left = room
    for name, cells in columns.items():
        need = max(map(len, [name, *cells])) + _GAP
        if part and need > left:
            yield part
            part, left = [], room
        part.append(name)
        left -= need
    if part:
        yield part


def _cell(row: Mapping[str, Any] | None, level: str, width: int) -> str:
    """Speed, and on wide terminals tokens a pass in brackets: micro for a data set, else macro."""
    if row is None:
        return "-"
    speed = f"{row['speedup_micro'] if level == 'dataset' else row['speedup_macro']:.2f}"
    if width < NARROW or row["tokens_per_cycle"] is None:
        return speed
    return f"{speed} ({row['tokens_per_cycle']:.2f})"


def _table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True, overflow="ellipsis")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
