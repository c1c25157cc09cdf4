"""What the demo puts on the screen: text coloured by arm, and a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from hvd.types import Arm

if TYPE_CHECKING:
    from hvd.engine.llm import Completion
    from hvd.engine.text import Piece

STYLES = {Arm.CACHE: "black on green", Arm.EAGLE3: "black on cyan", Arm.PLAIN: ""}
MARKS = {Arm.CACHE: "«»", Arm.EAGLE3: "‹›", Arm.PLAIN: ""}
MEANING = {
    Arm.CACHE: "drafted by the cache",
    Arm.EAGLE3: "by the EAGLE3 head",
    Arm.PLAIN: "the model's own (plain, bonus)",
}
SHOWN = 3
COLUMNS = ("prompt", "policy", "tokens/s", "speed", "tokens per cycle", "cycles by arm")
NARROW = 76
"""Columns of a terminal below which the table has fewer of its own."""


class Stage:
    """Prints as decoding goes on. Colours on a terminal, marks around drafted text elsewhere (or with NO_COLOR)."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._colours = self._console.is_terminal and not self._console.no_color
        self._rows: list[tuple[str, Mapping[str, Completion]]] = []

    def announce(self, title: str, prompt: str) -> None:
        """A new prompt: its title, legend and beginning."""
        self._console.print(Rule(title))
        self._console.print(self._legend())
        lines = prompt.strip().splitlines()
        more = f" [.. {len(lines) - SHOWN} more lines]" if len(lines) > SHOWN else ""
        self._console.print(Text("\n".join(lines[:SHOWN]) + more, style="dim"))

    def stream(self, policy: str, pieces: Iterable[Piece]) -> None:
        """The text of one run, token by token."""
        self._console.print(Text(f"\n[{policy}]", style="bold"))
        try:
            if self._colours:
                for piece in pieces:
                    self._write(Text(piece.text, style=STYLES[piece.arm]))
            else:
                for arm, group in groupby(pieces, key=lambda piece: piece.arm):
                    self._write(Text(_marked("".join(piece.text for piece in group), arm)))
        finally:  # an interruption is told on a line of its own
            self._console.print()

    def close(self, title: str, completions: Mapping[str, Completion]) -> None:
        """A prompt is done under all policies."""
        self._rows.append((title, completions))
        self._console.print()

    def finish(self) -> None:
        """The table."""
        narrow = self._console.width < NARROW
        columns = ("policy", "tok/s", "speed", "tok/cycle") if narrow else COLUMNS
        table = Table(*(Column(name, no_wrap=name != "tokens per cycle") for name in columns), box=box.SIMPLE)
        for title, completions in self._rows:
            plain = next(iter(completions.values()))
            if narrow:
                table.add_row(f"[bold]{title}[/bold]")
            for policy, completion in completions.items():
                speed = f"{rate(completion) / rate(plain):.2f}x"
                per_cycle = f"{completion.stats.tokens_per_cycle:.2f}"
                cells = (policy, f"{rate(completion):.1f}", speed, per_cycle)
                table.add_row(*cells) if narrow else table.add_row(title, *cells, shares(completion))
        self._console.print(table)
        self._console.print(f"output identical: {self._identical()}", style="bold")

    def _identical(self) -> str:
        """Whether all policies gave the same tokens; if not, for which prompts they did not."""
        different = [title for title, done in self._rows if len({tuple(each.token_ids) for each in done.values()}) > 1]
        return f"NO ({', '.join(different)})" if different else "yes"

    def _write(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)

    def _legend(self) -> Text:
        text = Text()
        for arm, meaning in MEANING.items():
            text.append(meaning if self._colours else _marked(meaning, arm), style=STYLES[arm] if self._colours else "")
            text.append("   ")
        return text


def _marked(text: str, arm: Arm) -> str:
    """Drafted text between the marks of its arm."""
    return MARKS[arm][:1] + text + MARKS[arm][1:] if text else ""


def rate(completion: Completion) -> float:
    """Tokens a second while decoding."""
    seconds = completion.stats.decode_seconds
    return len(completion.token_ids) / seconds if seconds else 0.0


def shares(completion: Completion) -> str:
    """How many of the cycles each arm had."""
    stats = completion.stats
    return ", ".join(f"{arm.value} {of.cycles / stats.cycles:.0%}" for arm, of in stats.arms.items())
