"""The page of one or more benchmark files: figures, then why, then every request (assets/bench.js sorts and opens)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd.bench.report import FEW_PROMPTS
from hvd.report import bench_findings, bench_sections
from hvd.report.bench_sections import section
from hvd.report.bench_view import AGAIN, PLAIN, BenchView
from hvd.report.html import NONE, Cell, facts, figure, label, table, text
from hvd.report.page import page

_SPEED = (
    bench_sections.overview, bench_sections.by_set, bench_sections.time, bench_sections.arms, bench_sections.lengths,
)  # fmt: skip
_PHASES = bench_sections.PHASES


def bench_page(
    contents: Sequence[Mapping[str, Any]], matrix: Mapping[str, Sequence[Mapping[str, Any]]], title: str = ""
) -> str:
    """The whole page.

    contents   files of the present format (`hvd.bench.file.read_bench`), at least one
    matrix     model x set of all of them (`hvd.bench.matrix.matrix`)
    """
    name = title or " and ".join(dict.fromkeys(str(content["model"]["name"]) for content in contents))
    parts = [_model(content, index, len(contents)) for index, content in enumerate(contents)]
    body = f"""<header class="top">
<p class="kicker">Hybrid Verified Decoding \u00b7 benchmark</p>
<h1>{text(name)}</h1>
{_toggle(contents)}
</header>
<main>
{_models(contents) + bench_sections.matrix(matrix, True) if len(contents) > 1 else ""}
{"".join(parts)}
{bench_sections.matrix(matrix, False) if len(contents) == 1 else ""}
{_requests(contents)}
</main>
<footer class="foot">Speed is tokens a second of decoding; every output was compared, token for token, with plain
decoding\u2019s.</footer>"""
    data = {"phases": _PHASES, "requests": [_details(content) for content in contents]}
    return page(f"Benchmark: {name}", body, assets=("base.css", "bench.css", "base.js", "bench.js"), data=data)


def _toggle(contents: Sequence[Mapping[str, Any]]) -> str:
    """All prompts, or those that don't loop: small models get stuck repeating themselves, which flatters caches."""
    looped = sum(content["summary"]["looped"] for content in contents)
    if not looped:
        return ""
    return (
        '<fieldset class="toggle"><legend class="muted">Prompts</legend>'
        '<label><input type="radio" name="loops" value="all" checked> all</label>'
        '<label><input type="radio" name="loops" value="straight"> '
        f"without the {looped} whose plain output loops</label></fieldset>"
    )


def _model(content: Mapping[str, Any], index: int, count: int) -> str:
    views = [BenchView(content, True)]
    if content["summary"]["looped"]:
        views.append(BenchView(content, False))
    name = f"<h2>{text(views[0].model)}</h2>" if count > 1 else ""
    variants = "".join(
        f'<div class="variant" data-loops="{"all" if view.loops else "straight"}">{_variant(view)}</div>'
        for view in views
    )
    return f'<article id="model-{index}">{name}{variants}{_conditions(content)}</article>'


def _models(contents: Sequence[Mapping[str, Any]]) -> str:
    """The models beside each other, each with the page's method."""
    rows = []
    for index, content in enumerate(contents):
        view = BenchView(content, True)
        if (main := view.main) is None:
            continue
        row, sets = view.whole[main], view.groups("dataset").values()
        speeds = [float(group[main]["speedup_micro"]) for group in sets if main in group]
        faster = sum(speed > 1 for speed in speeds)
        rows.append(
            [
                Cell(f'<a href="#model-{index}">{text(view.model)}</a>', view.model.lower()),
                label(main),
                figure(row["speedup_macro"], unit="\u00d7", kind="best"),
                bench_sections.interval(row.get("macro_low"), row.get("macro_high")),
                figure(min(speeds, default=None), unit="\u00d7"),
                Cell(f"{faster} of {len(speeds)}", faster),
                figure(row["tokens_per_cycle"]),
                label("yes" if content["summary"]["identical"] else "NO"),
            ]
        )
    columns = ("model", "method", "speed", "95 %", "lowest set", "faster in", "tokens per cycle", "outputs identical")
    return section("Models", table(columns, rows), note="Speed over plain decoding, geometric mean over sets.")


def _variant(view: BenchView) -> str:
    parts = [_headline(view), *(make(view) for make in _SPEED), *(make(view) for make in bench_findings.SECTIONS)]
    return "".join(parts) if view.whole else '<p class="caption">No prompts are left.</p>'


def _headline(view: BenchView) -> str:
    """The figure of the page, and what must stand beside it."""
    main = view.main
    if main is None:
        return ""
    row, summary = view.whole[main], view.content["summary"]
    low, high = row.get("macro_low"), row.get("macro_high")
    sets = {name: group[main]["speedup_micro"] for name, group in view.groups("dataset").items() if main in group}
    worst = min(sets, key=lambda name: float(sets[name]), default=None)
    noise = summary.get("noise")
    between = "" if low is None else f", 95\u2009% interval {low:.2f} to {high:.2f}"
    tiles = [
        (
            f"{row['speedup_macro']:.2f}\u00d7",
            f"plain decoding\u2019s speed with {main}, over {_counted(len(sets), 'set')}{between}",
            "hero",
        ),
        (f"{row['tokens_per_cycle']:.2f}", "tokens per cycle", ""),
        *([(f"{sets[worst]:.2f}\u00d7", f"lowest: {worst}", "")] if worst is not None else []),
        ("yes" if summary["identical"] else "NO", "all outputs identical", "" if summary["identical"] else "bad"),
        (f"{row['prompts']}", "prompt" if row["prompts"] == 1 else "prompts", ""),
        *([(f"{abs(noise['micro'] - 1):.1%}", "noise, plain measured twice", "")] if noise else []),
    ]
    shown = "".join(
        f'<div class="tile {kind}"><span class="value">{text(value)}</span> <span class="label">{text(what)}</span>'
        "</div>"
        for value, what, kind in tiles
    )
    few = ""
    if row["prompts"] < FEW_PROMPTS:
        few = f'<p class="caption">Only {_counted(row["prompts"], "prompt")}: too few to conclude anything from.</p>'
    return f'<div class="tiles">{shown}</div>{few}{_different(view)}'


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _different(view: BenchView) -> str:
    rows = [
        [label(entry["id"]), label(entry["policy"]), figure(entry["differs_at"], "d")]
        for entry in view.content["summary"]["different"]
    ]
    return (
        table(("request", "method", "differs from token"), rows, "Outputs that are not plain decoding's")
        if rows
        else ""
    )


def _conditions(content: Mapping[str, Any]) -> str:
    """How and where it was measured; what is missing."""
    model, settings, where = content["model"], content["settings"], content["environment"]
    sampling = settings["sampling"]
    cores = where.get("cores") or {}
    pairs = [
        ("model", f"{model['name']}, {model['weights']} on {model['backend']}"),
        ("EAGLE3 head", str(model.get("eagle3") or "none")),
        ("sampling", f"at most {sampling['max_tokens']} tokens, temperature {sampling['temperature']:g}"),
        ("suffix cache holds", str(settings["scope"])),
        ("data", ", ".join(map(str, content["data"].get("sets") or content["data"].get("files") or [])) or NONE),
        ("processor", f"{where['cpu']}, {cores.get('usable', NONE)} cores, {where['memory_gib']} GiB"),
        ("versions", ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)),
        ("commit", str(where.get("commit") or NONE)),
        ("measured", str(content["created"])),
    ]
    missing = [
        *((f"peer {name}", str(why)) for name, why in content["peers"]["missing"].items()),
        *((f"set {entry['name']}", str(entry["why"])) for entry in _entries(content["data"].get("missing"))),
        *((entry["id"], entry["why"]) for entry in content["skipped"]),
        *((f"{entry['id']}, {entry['method']}", entry["why"]) for entry in content.get("failed", ())),
    ]
    lost = f"<h4>Missing</h4>{facts(missing)}" if missing else ""
    how = facts((name, str(how)) for name, how in content["peers"]["methods"].items())
    peers = f"<h4>Peers, and how they are timed</h4>{how}{_agreement(content)}" if content["peers"]["methods"] else ""
    return f"<details><summary>How and where it was measured</summary>{facts(pairs)}{peers}{lost}</details>"


def _entries(missing: object) -> list[Mapping[str, Any]]:
    return (
        [each for each in missing if isinstance(each, Mapping) and "name" in each] if isinstance(missing, list) else []
    )


def _agreement(content: Mapping[str, Any]) -> str:
    rows = [
        [
            label(name),
            figure(of["prompts"], "d"),
            figure(of["identical"], "d"),
            figure(of["tokens_before_difference"], ".0%"),
        ]
        for name, of in (content["summary"].get("agreement") or {}).items()
    ]
    return table(("peer", "prompts", "identical", "our tokens before they differ"), rows) if rows else ""


# -- requests -----------------------------------------------------------------------------------------------------


def _by_request(content: Mapping[str, Any]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Request -> method -> record."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in content["records"]:
        found.setdefault(record["id"], {})[record["policy"]] = record
    return found


def _requests(contents: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for index, content in enumerate(contents):
        main = BenchView(content, True).main
        for number, (id_, records) in enumerate(_by_request(content).items()):
            rows.append(_request_row(content, id_, records, main, f"{index}-{number}", len(contents) > 1))
    if not rows:
        return ""
    columns = (
        "request",
        "set",
        "category",
        "prompt",
        "tokens",
        "plain tok/s",
        "speed",
        "tokens per cycle",
        "fastest",
        "loops",
    )
    search = '<input type="search" id="filter" placeholder="filter by name" aria-label="Filter requests by name">'
    return section(
        "Requests", search, f'<div id="requests">{table(columns, rows)}</div>',
        note="Open one to see what every method did with it. Speed and tokens per cycle: the page\u2019s method.",
    )  # fmt: skip


def _request_row(
    content: Mapping[str, Any],
    id_: str,
    records: Mapping[str, Mapping[str, Any]],
    main: str | None,
    key: str,
    named: bool,
) -> list[Cell]:
    rates = {name: _rate(record) for name, record in records.items() if name != AGAIN}
    first, plain = next(iter(records.values())), rates.get(PLAIN)
    mine = records.get(main) if main is not None else None
    speed = rates[main] / plain if main is not None and mine is not None and plain else None
    opener = f'<button type="button" class="open" data-key="{key}" aria-expanded="false">{text(id_)}</button>'
    model = f' <span class="muted">{text(content["model"]["name"])}</span>' if named else ""
    return [
        Cell(opener + model, id_.lower()),
        label(first["dataset"]),
        label(first["category"]),
        figure(first["prompt_tokens"], ",d"),
        figure(first["tokens"], ",d"),
        figure(plain, ".1f"),
        figure(speed, unit="\u00d7"),
        figure(mine["tokens"] / mine["cycles"] if mine is not None and mine["cycles"] else None),
        label(max(rates, key=lambda name: rates[name], default=NONE)),
        label("yes" if first.get("loop_onset") is not None else ""),
    ]


def _rate(record: Mapping[str, Any]) -> float:
    seconds = record["decode_seconds"]
    return float(record.get("decoded", record["tokens"]) / seconds) if seconds else 0.0


def _details(content: Mapping[str, Any]) -> list[list[list[Any]]]:
    """By request, in the order of the table: one list a method, as assets/bench.js reads it."""
    return [
        [
            [
                record["policy"], record["tokens"], round(_rate(record), 2), round(record["prefill_seconds"], 3),
                record["cycles"], record["drafted"], record["accepted"], record["positions"],
                {arm: of["cycles"] for arm, of in record["arms"].items()},
                [round(1e3 * record["phases"].get(phase, 0.0), 1) for phase in _PHASES],
                record["finish_reason"], record["differs_at"], int(record.get("peer") is not None),
            ]
            for record in records.values()
        ]
        for records in _by_request(content).values()
    ]  # fmt: skip
