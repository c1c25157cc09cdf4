"""Pieces of pages that several sections share: escaped text, tables that can be sorted, rows of bars and of dots.

Nothing here uses a `style` attribute: the pages' content security policy would not let it through. Places within a row
are percentages of its SVG, so text keeps its size however narrow the window is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from hvd.report.page import visible

NONE = "\u2013"
"""Shown where there is no figure."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: escaped HTML, and what it is sorted by (None: behind all others)."""

    html: str
    value: float | str | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A figure on an axis, with the ends of its interval where it has one."""

    value: float
    low: float | None = None
    high: float | None = None
    kind: str = ""
    title: str = ""


def text(value: object) -> str:
    """Any text, made visible and escaped."""
    return escape(visible(str(value)))


def label(value: object, kind: str = "") -> Cell:
    """A cell of text."""
    return Cell(text(value), str(value).lower(), kind)


def figure(value: float | None, form: str = ".2f", kind: str = "", unit: str = "") -> Cell:
    """A cell with a number; None and NaN are shown as missing."""
    if value is None or math.isnan(value):
        return Cell(NONE, None, kind)
    return Cell(f"{value:{form}}{unit}", value, kind)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> str:
    """A table whose columns can be sorted (assets/bench.js); the first column names the rows."""
    rows = list(rows)
    worded = [any(isinstance(row[i].value, str) for row in rows) for i in range(len(columns))]
    head = "".join(
        f'<th scope="col"{" class=words" if words else ""}><button type="button" class="sort">{text(name)}</button>'
        "</th>"
        for name, words in zip(columns, worded, strict=True)
    )
    body = "\n".join(f"<tr>{''.join(_cell(cell, not i, worded[i]) for i, cell in enumerate(row))}</tr>" for row in rows)
    title = f"<caption>{text(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="sortable">{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _cell(cell: Cell, first: bool, words: bool) -> str:
    classes = " ".join(filter(None, (cell.kind, "words" if words else "")))
    kind = f' class="{classes}"' if classes else ""
    value = "" if cell.value is None else f' data-v="{escape(visible(str(cell.value)))}"'
    return f'<th scope="row"{kind}{value}>{cell.html}</th>' if first else f"<td{kind}{value}>{cell.html}</td>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, both plain text."""
    return '<dl class="facts-grid">' + "".join(f"<dt>{text(n)}</dt><dd>{text(v)}</dd>" for n, v in pairs) + "</dl>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(class, meaning) of colours."""
    keys = "".join(f'<li><span class="key {kind}"></span>{text(meaning)}</li>' for kind, meaning in entries)
    return f'<ul class="legend">{keys}</ul>'


def bars(rows: Iterable[tuple[str, Sequence[tuple[str, float]], str]]) -> str:
    """Rows of a label, parts one behind the other (class, share of the row's width in [0, 1]) and a figure."""
    return _rows((name, "".join(_parts(parts)), value, 18) for name, parts, value in rows)


def _parts(parts: Sequence[tuple[str, float]]) -> Iterable[str]:
    left = 0.0
    for kind, share in parts:
        if share > 0:
            yield f'<rect class="part {kind}" x="{left:.2%}" width="{share:.2%}" y="2" height="14"/>'
        left += share


def dots(rows: Iterable[tuple[str, Sequence[Mark], str]], most: float, ticks: Sequence[float]) -> str:
    """Rows of a label, marks on an axis from 0 to `most`, and a figure; below them the axis, its ticks as "2x"."""
    grid = "".join(f'<line class="grid{_one(t)}" x1="{t / most:.2%}" x2="{t / most:.2%}" y2="100%"/>' for t in ticks)
    drawn = [(name, grid + "".join(_mark(mark, most) for mark in marks), value, 22) for name, marks, value in rows]
    axis = "".join(f'<text x="{tick / most:.2%}" y="12" text-anchor="middle">{tick:g}\u00d7</text>' for tick in ticks)
    return _rows([*drawn, ("", axis, "", 16)])


def _one(tick: float) -> str:
    return " one" if tick == 1 else ""


def _mark(mark: Mark, most: float) -> str:
    x = f"{min(1.0, mark.value / most):.2%}"
    out = ""
    if mark.low is not None and mark.high is not None:
        low, high = f"{min(1.0, mark.low / most):.2%}", f"{min(1.0, mark.high / most):.2%}"
        out = f'<line class="interval {mark.kind}" x1="{low}" x2="{high}" y1="11" y2="11"/>'
    title = f"<title>{text(mark.title)}</title>" if mark.title else ""
    return f'{out}<circle class="mark {mark.kind}" cx="{x}" cy="11" r="4.5">{title}</circle>'


def _rows(rows: Iterable[tuple[str, str, str, int]]) -> str:
    cells = "".join(
        f'<span class="name">{text(name)}</span><svg class="row" height="{height}" aria-hidden="true">{drawn}</svg>'
        f'<span class="num">{text(value)}</span>'
        for name, drawn, value, height in rows
    )
    return f'<div class="rows">{cells}</div>'


def ticks_to(most: float) -> list[float]:
    """Places on an axis from 0 on, five to eight of them, 1 always among them."""
    step = next((s for s in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0) if most / s <= 7), most / 5)
    ticks = [i * step for i in range(int(most / step) + 1)]
    return ticks if 1.0 in ticks else sorted([*ticks, 1.0])
