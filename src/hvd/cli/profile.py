"""`hvd profile`: measure what passes and drafts cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd.cli.common import ModelOptions, model_options
from hvd.cli.console import emit_json, note, progress_bar, stderr_console

if TYPE_CHECKING:
    from hvd.payoff.cost import CostModel

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (32, 512, 2048, 4096)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Cost file to write (the one kept for this machine and model when not given).",
)
@click.option("--quick", is_flag=True, help="About two seconds, short contexts only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@model_options
def profile(out: Path | None, quick: bool, as_json: bool, options: ModelOptions) -> None:
    """Measure what passes and drafts cost on this machine.

    The time of a pass by width and context, and of drafting, is kept in a cost file; the gate weighs drafts against it.
    Without one a quick profile is made at start-up; this one takes a minute or more and knows long contexts. Leave the
    machine alone meanwhile.

    \b
    Examples:
      hvd profile --model SmolLM2-135M-Instruct.Q4_1.gguf
      hvd profile --model MODEL --eagle3 HEAD --out cost.json
    """
    from hvd.payoff.profile import cost_path
    from hvd.payoff.profile import profile as measure
    from hvd.types import Arm

    llm = options.open()
    head = llm.drafters.get(Arm.EAGLE3)
    with progress_bar() as progress:
        cost = measure(llm.target, head, quick=quick, progress=progress)
    path = out or cost_path(llm.target, head)
    cost.save(path)
    limit = llm.target.spec.context_limit
    table = _milliseconds(cost, [context for context in CONTEXTS if context < limit])
    beyond = [context for context in table if int(context) > cost.measured_context]
    if as_json:
        found = {"file": str(path), "hardware": cost.hardware, "model": cost.model, "milliseconds": table}
        emit_json({**found, "extrapolated": beyond})
        return
    click.echo(str(path))
    _print(table, beyond)
    note("milliseconds of a pass by verify width (across) and context (down)")
    if beyond:
        note(
            f"* extrapolated: measured up to a context of {cost.measured_context}; without --quick longer ones are too"
        )


def _milliseconds(cost: CostModel, contexts: list[int]) -> dict[str, dict[str, float]]:
    return {str(c): {str(w): round(cost.verify(w, c) * 1e3, 3) for w in WIDTHS} for c in contexts}


def _print(rows: dict[str, dict[str, float]], beyond: list[str]) -> None:
    from rich.table import Table

    table = Table("context", *map(str, WIDTHS))
    for context, row in rows.items():
        mark = "*" if context in beyond else ""
        table.add_row(context + mark, *(f"{value:.1f}{mark}" for value in row.values()))
    stderr_console().print(table)
