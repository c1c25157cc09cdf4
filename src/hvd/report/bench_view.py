"""One benchmark file as its page looks at it: all prompts, or those that don't loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AGAIN = "plain-again"
PLAIN = "plain"
OURS = "hvd"
WHOLE = "all"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BenchView:
    """A file of the present format (`hvd.bench.file.read_bench`) with one of its two sets of figures.

    loops   True: all prompts; False: without those that loop
    """

    content: Mapping[str, Any]
    loops: bool

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.content["model"]["name"])

    def rows(self, level: str) -> list[Row]:
        """The summary's rows of one level, without plain decoding's second measurement."""
        rows = self.content["summary"]["rows"]
        return [r for r in rows if r["loops"] == self.loops and r["level"] == level and r["policy"] != AGAIN]

    def groups(self, level: str) -> dict[str, dict[str, Row]]:
        """Group -> method -> row."""
        found: dict[str, dict[str, Row]] = {}
        for row in self.rows(level):
            found.setdefault(row["group"], {})[row["policy"]] = row
        return found

    @property
    def whole(self) -> dict[str, Row]:
        """Method -> row over all sets."""
        return self.groups(WHOLE).get(WHOLE, {})

    @property
    def methods(self) -> list[str]:
        """Everything measured but plain decoding, in the file's order."""
        return [name for name in self.whole if name != PLAIN]

    @property
    def main(self) -> str | None:
        """The method that the page is about: ours, or the fastest where ours was not measured."""
        if OURS in self.whole:
            return OURS
        return max(self.methods, key=lambda name: float(self.whole[name]["speedup_macro"]), default=None)

    def table(self, name: str) -> list[Row]:
        """`by_prompt_length` or `by_position`, with these figures."""
        rows: Sequence[Row] = self.content["summary"].get(name, ())
        return [row for row in rows if row["loops"] == self.loops and row["policy"] != AGAIN]

    def analysis(self, part: str, level: str = WHOLE) -> dict[str, Mapping[str, Any]]:
        """Group -> one part of its analysis, groups without that part left out."""
        groups = self.content.get("analysis", {}).get("groups", ())
        mine = (g for g in groups if g["loops"] == self.loops and g["level"] == level)
        return {g["group"]: g[part] for g in mine if g.get(part)}

    def finding(self, part: str) -> Mapping[str, Any]:
        """One part of the analysis of all sets together; empty when there is none."""
        return self.analysis(part).get(WHOLE, {})
