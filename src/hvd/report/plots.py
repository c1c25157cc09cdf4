"""Small plots as SVG: lines over an axis, columns of a histogram, predicted against observed. No library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd.report.html import text

WIDTH, HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 12, 10, 34

Point = tuple[float, float]


def histogram(heights: Sequence[Sequence[float]], names: Sequence[str], kinds: Sequence[str], title: str) -> str:
    """Columns side by side: `heights[series][bin]` in [0, 1]; names of the bins, a class for each series."""
    most = max((height for series in heights for height in series), default=0.0) or 1.0
    slot = (WIDTH - _LEFT - _RIGHT) / max(1, len(names))
    width = slot * 0.8 / max(1, len(heights))
    out = [_grid(most)]
    for index, (series, kind) in enumerate(zip(heights, kinds, strict=True)):
        for at, height in enumerate(series):
            x, tall = _LEFT + at * slot + slot * 0.1 + index * width, _tall(height / most)
            out.append(
                f'<rect class="part {kind}" x="{x:.1f}" y="{HEIGHT - _BOTTOM - tall:.1f}" width="{width:.1f}" '
                f'height="{tall:.1f}"><title>{text(names[at])}: {height:.1%}</title></rect>'
            )
    every = max(1, math.ceil(len(names) / 10))
    for at in range(0, len(names), every):
        out.append(_below(_LEFT + (at + 0.5) * slot, names[at]))
    return _svg("".join(out), title)


def diagonal(series: Sequence[tuple[str, Sequence[tuple[float, float, float]]]], title: str) -> str:
    """Predicted (x) against observed (y) shares; each point has a weight in [0, 1], shown as its size."""
    out = [_grid(1.0), f'<path class="line plain" d="M{_x(0):.1f} {_y(0):.1f}L{_x(1):.1f} {_y(1):.1f}"/>']
    for kind, points in series:
        path = "L".join(f"{_x(x):.1f} {_y(y):.1f}" for x, y, _ in points)
        out.append(f'<path class="line {kind}" d="M{path}"/>' if points else "")
        out += [
            f'<circle class="mark {kind}" cx="{_x(x):.1f}" cy="{_y(y):.1f}" r="{2 + 6 * math.sqrt(weight):.1f}">'
            f"<title>foretold {x:.0%}, came {y:.0%}</title></circle>"
            for x, y, weight in points
        ]
    out += [_below(_x(share), f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _svg("".join(out), title)


def steps(names: Sequence[str], series: Sequence[tuple[str, Sequence[float | None]]], form: str, title: str) -> str:
    """Lines over named places, from 0 up; a place may be missing."""
    most = 1.1 * max((value for _, values in series for value in values if value is not None), default=1.0)
    out = [_grid(most, form)]
    slot = (WIDTH - _LEFT - _RIGHT) / max(1, len(names))
    for kind, values in series:
        points = [(_LEFT + (i + 0.5) * slot, _y(v / most), v, names[i]) for i, v in enumerate(values) if v is not None]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in points)
        out.append(f'<path class="line {kind}" d="M{path}"/>' if points else "")
        out += [
            f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            f"<title>{text(at)}: {v:{form}}</title></circle>"
            for x, y, v, at in points
        ]
    out += [_below(_LEFT + (i + 0.5) * slot, name) for i, name in enumerate(names)]
    return _svg("".join(out), title)


def _x(share: float) -> float:
    return _LEFT + share * (WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return HEIGHT - _BOTTOM - _tall(share)


def _tall(share: float) -> float:
    return share * (HEIGHT - _TOP - _BOTTOM)


def _grid(most: float, form: str = ".0%") -> str:
    lines = "".join(
        f'<path class="axis" d="M{_LEFT} {_y(share):.1f}H{WIDTH - _RIGHT}"/>'
        f'<text x="{_LEFT - 6}" y="{_y(share) + 4:.1f}" text-anchor="end">{most * share:{form}}</text>'
        for share in (0.0, 0.5, 1.0)
    )
    return lines


def _below(x: float, name: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{text(name)}</text>'


def _svg(content: str, title: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}">'
        f"<title>{text(title)}</title>{content}</svg>"
    )
