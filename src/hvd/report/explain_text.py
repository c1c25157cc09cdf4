"""The terminal's view of one request: its text by arm, its cycles in a table, one cycle in full."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd.report.explain import ExplainedCycle, ExplainedRequest, accepted_nodes, lengths_shown
from hvd.report.page import visible
from hvd.types import Arm, Draft, StepRecord

STYLES = {Arm.CACHE: "black on #e8b04b", Arm.EAGLE3: "black on #7db8ea", Arm.PLAIN: ""}
MARKS = {Arm.CACHE: ("\u00ab", "\u00bb"), Arm.EAGLE3: ("\u2039", "\u203a"), Arm.PLAIN: ("", "")}
MEANING = {
    Arm.CACHE: "drafted by the cache",
    Arm.EAGLE3: "by the EAGLE3 head",
    Arm.PLAIN: "the model's own (plain, bonus)",
}
MOST_ROWS = 60
_BAR = 12


class ExplainView:
    """Prints on a console. Colours on a terminal, marks around drafted text elsewhere (or with NO_COLOR)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours = console.is_terminal and not console.no_color

    def overview(self, request: ExplainedRequest) -> None:
        """Legend, text, totals, table of cycles."""
        self._console.print(self._legend())
        self._console.print(self._answer(request), soft_wrap=True)
        self._console.print()
        self._console.print(_totals(request), style="bold")
        self._console.print(_table(request))
        if len(request.cycles) > MOST_ROWS:
            more = len(request.cycles) - MOST_ROWS
            self._console.print(f".. {more} more cycles: --cycle N shows one, --html and --json have all", style="dim")

    def cycle(self, request: ExplainedRequest, number: int) -> None:
        """One cycle in full; `number` counts from 1."""
        cycle = request.cycles[number - 1]
        record = cycle.record
        at = f"tokens {record.position + 1} to {record.position + record.committed} of {len(request.output)}"
        self._console.print(f"cycle {number} of {len(request.cycles)}, {at}", style="bold")
        self._console.print(f"choice: {_choice(record)}", markup=False)
        foreseen = "" if math.isnan(record.expected) else f" ({record.expected:.2f} expected)"
        self._console.print(f"accepted: {record.accepted} of {record.drafted}{foreseen}, and one of the model's own")
        for line in self._drafts(request, cycle):
            self._console.print(line, soft_wrap=True)
        if cycle.cache is not None:
            self._console.print(_found(request, cycle, cycle.cache), soft_wrap=True, markup=False)
        self._console.print(_costs(cycle))
        if cycle.explanation.features:
            self._console.print(_features(cycle, self._console.width))

    def _legend(self) -> Text:
        text = Text()
        for arm, meaning in MEANING.items():
            text.append_text(self._drafted(meaning, arm)).append("   ")
        return text

    def _drafted(self, text: str, arm: Arm) -> Text:
        if self._colours:
            return Text(text, style=STYLES[arm])
        before, behind = MARKS[arm]
        return Text(before + text + behind if text else "")

    def _answer(self, request: ExplainedRequest) -> Text:
        pieces = [visible(piece) for piece in request.texts(request.output, request.prompt)]
        text = Text()
        for cycle in request.cycles:
            start, record = cycle.record.position, cycle.record
            text.append_text(self._drafted("".join(pieces[start : start + record.accepted]), record.arm))
            text.append("".join(pieces[start + record.accepted : start + record.committed]))
        return text

    def _drafts(self, request: ExplainedRequest, cycle: ExplainedCycle) -> Iterator[Text]:
        cache, draft = cycle.cache, cycle.draft
        if cache is not None:
            chosen = cycle.record.arm is Arm.CACHE
            yield Text("cache draft: " if chosen else "cache draft, not taken: ").append_text(
                self._fates(request, cycle, cache, cycle.record.drafted if chosen else 0)
            )
        if draft is not None and draft.arm is not Arm.CACHE:
            yield Text(f"{draft.arm} draft: ").append_text(self._fates(request, cycle, draft, len(draft)))

    def _fates(self, request: ExplainedRequest, cycle: ExplainedCycle, draft: Draft, verified: int) -> Text:
        """A draft's tokens: accepted, refused (struck out), not verified (dim)."""
        record = cycle.record
        before = request.text_at(record.position)
        committed = request.output[record.position : record.position + record.accepted]
        path = set(accepted_nodes(draft, committed)) if verified else set()
        text = Text()
        for i, piece in enumerate(request.texts(draft.tokens, before)):
            shown = visible(piece).replace("\n", "\u21b5") or "\u25cc"
            if i in path:
                text.append_text(self._drafted(shown, draft.arm))
            elif i < verified:
                text.append(shown if self._colours else f"[-{shown}-]", style="strike red" if self._colours else "")
            else:
                text.append(shown, style="dim")
        return text


def _totals(request: ExplainedRequest) -> str:
    tokens, cycles = len(request.output), len(request.cycles)
    shares = ", ".join(f"{arm} {count / tokens:.0%}" for arm, count in request.tokens_by_arm().items() if count)
    return f"{tokens} tokens in {cycles} cycles: {request.tokens_per_cycle:.2f} a cycle ({shares})"


def _choice(record: StepRecord) -> str:
    """What was chosen and why; most reasons begin with what was chosen."""
    if record.reason.startswith(record.arm.value):
        return record.reason
    chosen = f"{record.arm} {record.drafted}" if record.drafted else record.arm.value
    return f"{chosen}: {record.reason or 'no reason given'}"


def _table(request: ExplainedRequest) -> Table:
    names = ("cycle", "token", "arm", "offered", "match", "drafted", "accepted", "expected")
    table = Table(*names, box=box.SIMPLE)
    for number, cycle in enumerate(request.cycles[:MOST_ROWS], start=1):
        record = cycle.record
        table.add_row(
            str(number),
            str(record.position + 1),
            record.arm.value,
            str(record.offered or "-"),
            str(record.match_len or "-"),
            str(record.drafted or "-"),
            str(record.accepted if record.drafted else "-"),
            "-" if math.isnan(record.expected) else f"{record.expected:.1f}",
        )
    return table


def _found(request: ExplainedRequest, cycle: ExplainedCycle, cache: Draft) -> str:
    match = (
        f"match: {cache.match_len} tokens, score {cache.score:.1f}, seen {cache.counts[0]} of {cache.parent_counts[0]}"
    )
    if cache.age:
        match += f", resumed {cache.age} tokens after the text left the copy"
    source = cycle.source
    if source is None:
        return match + (", place not known" if cache.local else ", in an earlier answer")
    start = source.start - len(request.prompt)
    place = f"token {source.start + 1} of the prompt" if start < 0 else f"token {start + 1} of the answer"
    return f"{match}, copied from {place} on"


def _costs(cycle: ExplainedCycle) -> Table:
    why, record = cycle.explanation, cycle.record
    table = Table("verify", "ms", "P(accepted >= k)", " " * _BAR, "tokens", "tokens/s", box=box.SIMPLE)
    table.add_row("plain", f"{why.plain_seconds * 1e3:.1f}", "", "", "1.00", f"{1 / why.plain_seconds:.1f}")
    for prospect in why.prospects:
        survival, rates = prospect.survival, prospect.rates
        for length in lengths_shown(len(prospect.seconds), record.drafted):
            chosen = prospect.arm is record.arm and length == record.drafted
            cells = ["", "", "-", "-"]
            if survival is not None and rates is not None:
                share, gain = float(survival[length - 1]), 1.0 + float(survival[:length].sum())
                cells = [f"{share:.0%}", _bar(share), f"{gain:.2f}", f"{rates[length - 1]:.1f}"]
            name = f"{prospect.arm} {length}{' <' if chosen else ''}"
            table.add_row(name, f"{prospect.seconds[length - 1] * 1e3:.1f}", *cells, style="bold" if chosen else "")
    return table


def _bar(share: float) -> str:
    return "\u2588" * round(share * _BAR)


def _features(cycle: ExplainedCycle, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    items = [f"{name} {value:.3g}" for name, value in cycle.explanation.features.items() if value]
    across = max(1, min(4, width // (max(map(len, items), default=0) + 2)))
    for i in range(0, len(items), across):
        table.add_row(*items[i : i + across])
    return table
