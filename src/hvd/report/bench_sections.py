"""Sections of the benchmark's page about speed: how fast, where, what the time went into. "" where data are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd.report.bench_view import PLAIN, BenchView, Row
from hvd.report.html import NONE, Cell, Mark, bars, dots, figure, label, legend, table, ticks_to
from hvd.report.plots import steps

PHASES = ("propose", "gate", "forward", "walk")
ARMS = ("cache", "eagle3", "plain")
_CATEGORY = "category"


def section(title: str, *parts: str, note: str = "") -> str:
    """A heading with what is under it; "" when that is nothing."""
    body = "".join(parts)
    about = f'<p class="caption">{note}</p>' if note else ""
    return f"<section><h3>{title}</h3>{about}{body}</section>" if body else ""


def overview(view: BenchView) -> str:
    """Every method over all sets."""
    rows = [view.whole[name] for name in view.whole]
    if not rows:
        return ""
    marks = [
        (
            row["policy"],
            [Mark(row["speedup_macro"], row.get("macro_low"), row.get("macro_high"), _kind(view, row["policy"]))],
            f"{row['speedup_macro']:.2f}\u00d7",
        )
        for row in sorted(rows, key=lambda row: -float(row["speedup_macro"]))
    ]
    most = 1.05 * max(max(row["speedup_macro"], row.get("macro_high") or 0.0) for row in rows)
    columns = ("method", "macro", "95 %", "micro", "95 %", "median", "tokens/s", "tokens per cycle",
               "cycles per 1,000", "positions per token", "accepted")  # fmt: skip
    return section(
        "Over all sets",
        dots(marks, most, ticks_to(most)),
        table(columns, [_overview_row(view, row) for row in rows]),
        note="Speed over plain decoding. Macro: geometric mean over sets; micro: all tokens over all seconds; median: "
        "of the prompts' own ratios. The lines are 95 % bootstrap intervals over prompts.",
    )


def _overview_row(view: BenchView, row: Row) -> list[Cell]:
    return [
        label(row["policy"], _kind(view, row["policy"])),
        figure(row["speedup_macro"], unit="\u00d7"),
        interval(row.get("macro_low"), row.get("macro_high")),
        figure(row["speedup_micro"], unit="\u00d7"),
        interval(row.get("micro_low"), row.get("micro_high")),
        figure(row["speedup_median"], unit="\u00d7"),
        figure(row["tokens_per_second"], ".1f"),
        figure(row["tokens_per_cycle"]),
        figure(row.get("cycles_per_1000"), ".0f"),
        figure(row["positions_per_token"]),
        figure(row["acceptance"], ".0%") if row["acceptance"] else Cell(NONE),
    ]


def interval(low: float | None, high: float | None) -> Cell:
    """A cell with the ends of an interval."""
    return Cell(NONE) if low is None or high is None else Cell(f"{low:.2f}\u2009\u2013\u2009{high:.2f}", low, "muted")


def _kind(view: BenchView, method: str) -> str:
    return "ours" if method == view.main else "base" if method == PLAIN else "rival"


def by_set(view: BenchView) -> str:
    """Every set, then every category: speed of each method."""
    sets, main = view.groups("dataset"), view.main
    if not sets or main is None:
        return ""
    values = [row["speedup_micro"] for group in sets.values() for row in group.values()]
    values += [row.get("micro_high") or 0.0 for group in sets.values() for name, row in group.items() if name == main]
    most = 1.05 * max(values)
    ordered = sorted(sets, key=lambda name: -float(sets[name].get(main, {}).get("speedup_micro", 0.0)))
    picture = dots([_set_dots(view, name, sets[name], main) for name in ordered], most, ticks_to(most))
    keys = legend([("dot ours", main), ("dot rival", "other methods"), ("dot base", "plain decoding")])
    columns = ("set", "prompts", *view.methods)
    rows = [_speed_row(view, name, group, "speedup_micro") for name, group in sets.items()]
    categories = [_speed_row(view, name, g, "speedup_macro") for name, g in view.groups(_CATEGORY).items()]
    return section(
        "By set",
        keys,
        picture,
        table(columns, rows),
        "<h4>By category</h4>" + table(("category", "prompts", *view.methods), categories)
        if len(categories) > 1
        else "",
        note="Speed over plain decoding, tokens per cycle in brackets; the fastest method of a row is bold. "
        "Categories: geometric mean over their sets.",
    )


def _set_dots(view: BenchView, name: str, group: Mapping[str, Row], main: str) -> tuple[str, list[Mark], str]:
    others = [
        Mark(row["speedup_micro"], kind=_kind(view, method), title=f"{method}: {row['speedup_micro']:.2f}\u00d7")
        for method, row in group.items()
        if method != main
    ]
    mine = group.get(main)
    if mine is None:
        return name, others, NONE
    value = float(mine["speedup_micro"])
    mark = Mark(value, mine.get("micro_low"), mine.get("micro_high"), "ours", f"{main}: {value:.2f}\u00d7")
    return name, [*others, mark], f"{value:.2f}\u00d7"


def _speed_row(view: BenchView, name: str, group: Mapping[str, Row], key: str) -> list[Cell]:
    speeds = {method: float(row[key]) for method, row in group.items() if method != PLAIN}
    best = max(speeds.values(), default=0.0)
    cells = [label(name), figure(max((row["prompts"] for row in group.values()), default=0), "d")]
    for method in view.methods:
        row = group.get(method)
        if row is None:
            cells.append(Cell(NONE))
            continue
        per_cycle = f' <span class="muted">({row["tokens_per_cycle"]:.1f})</span>' if row["tokens_per_cycle"] else ""
        kind = "best" if speeds[method] == best else "slow" if speeds[method] < 0.98 else ""
        cells.append(Cell(f"{speeds[method]:.2f}\u00d7{per_cycle}", speeds[method], kind))
    return cells


def time(view: BenchView) -> str:
    """What a cycle's time goes into, and how long it is."""
    rows = [row for row in view.whole.values() if row["phase_share"]]
    if not rows:
        return ""
    longest = max(sum(row["cycle_ms"].values()) for row in rows) if "cycle_ms" in rows[0] else 0.0
    drawn = []
    for row in rows:
        each = row["cycle_ms"] if longest else row["phase_share"]
        total = sum(each.values())
        parts = [(phase, each.get(phase, 0.0) / (longest or 1.0)) for phase in ("forward", "propose", "gate", "walk")]
        drawn.append((row["policy"], parts, f"{total:.1f} ms" if longest else ""))
    cells = [
        [
            label(row["policy"], _kind(view, row["policy"])),
            *(figure(row["phase_share"].get(phase), ".1%") for phase in PHASES),
            *(figure(row.get("cycle_ms", {}).get(phase)) for phase in PHASES),
        ]
        for row in rows
    ]
    columns = ("method", *PHASES, *(f"{phase}, ms" for phase in PHASES))
    return section(
        "Time of a cycle",
        legend([(f"part {phase}", phase) for phase in ("forward", "propose", "gate", "walk")]),
        bars(drawn),
        table(columns, cells),
        note="Forward: the target's pass. Propose: drafting. Gate: prediction and choice. Walk: sampling and keeping.",
    )


def arms(view: BenchView) -> str:
    """Whose drafts were verified."""
    rows = [row for row in view.whole.values() if row["cycle_share"]]
    drawn = [
        (
            row["policy"],
            [(arm, float(row["cycle_share"].get(arm, 0.0))) for arm in ARMS],
            f"{1.0 - row['cycle_share'].get('plain', 0.0):.0%}",
        )
        for row in rows
        if row["policy"] != PLAIN
    ]
    keys = [("part cache", "suffix cache"), ("part eagle3", "EAGLE3 head"), ("part plain", "no draft")]
    return section(
        "Share of arms",
        *([legend(keys), bars(drawn)] if drawn else []),
        note="Share of cycles; the figure is that with a draft.",
    )


def lengths(view: BenchView) -> str:
    """By tokens of prompt, and by tokens generated before a cycle."""
    prompts = _by_range(view, "by_prompt_length", "tokens of prompt")
    positions = _by_range(view, "by_position", "tokens generated before")
    return section(
        "By length", f'<div class="pair">{prompts}{positions}</div>' if prompts or positions else "",
        note="Speed over plain decoding, by length of the prompt and by place in the answer. The coloured line is the "
        "page\u2019s method.",
    )  # fmt: skip


def _by_range(view: BenchView, name: str, what: str) -> str:
    rows, main = view.table(name), view.main
    ranges = list(dict.fromkeys((row["from"], row["to"]) for row in rows))
    if not ranges:
        return ""
    names = [_range(*each) for each in ranges]
    speeds = {(row["from"], row["to"], row["policy"]): row.get("speedup_micro") for row in rows}
    kinds = [*((method, "rival") for method in view.methods if method != main), (main, "ours")]
    series = [(kind, [speeds.get((*each, method)) for each in ranges]) for method, kind in kinds]
    columns = (what, *view.methods)
    cells = [
        [Cell(shown, float(each[0])), *(figure(speeds.get((*each, method)), unit="\u00d7") for method in view.methods)]
        for shown, each in zip(names, ranges, strict=True)
    ]
    return f"<div><h4>{what.capitalize()}</h4>{steps(names, series, '.1f', what)}{table(columns, cells)}</div>"


def _range(start: int, end: int | None) -> str:
    return f"{_brief(start)}+" if end is None else f"{_brief(start)}\u2013{_brief(end)}"


def _brief(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def matrix(found: Mapping[str, Sequence[Mapping[str, object]]], several: bool) -> str:
    """Model x set against each baseline (`hvd.bench.matrix`); `several`: of more than one model."""
    parts = []
    for against in found.get("against", ()):
        rows: Sequence[Row] = against["rows"]  # type: ignore[assignment]
        sets = list(dict.fromkeys(name for row in rows for name in row["sets"]))
        cells = [
            [
                label(row["method"]),
                *([label(row["model"], "muted")] if several else []),
                figure(row["macro"], unit="\u00d7"),
                Cell(f"{row['wins']} of {len(row['sets'])}", row["wins"]),
                *(_matrix_cell(row["sets"].get(name)) for name in sets),
            ]
            for row in rows
        ]
        base = str(against["baseline"])
        shown = " open" if base == PLAIN else ""
        body = table(("method", *(["model"] if several else []), "macro", "faster in", *sets), cells)
        parts.append(f"<details{shown}><summary>Against {label(base).html}</summary>{body}</details>" if rows else "")
    return section("Against each baseline", *parts, note="Tokens a second over the baseline\u2019s, set by set.")


def _matrix_cell(value: float | None) -> Cell:
    kind = "" if value is None else "slow" if value < 0.98 else "fast" if value > 1.02 else ""
    return figure(value, kind=kind)
