"""`hvd train predictor`: fit the payoff predictor to traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd.cli.common import SEED
from hvd.cli.console import emit_json, note, progress_bar, stdout_console
from hvd.cli.train_eagle3 import eagle3

if TYPE_CHECKING:
    from rich.table import Table

    from hvd.training.report import StatesReport


@click.group()
def train() -> None:
    """Train payoff predictors and EAGLE3 heads."""


train.add_command(eagle3)


@train.command()
@click.argument("traces", nargs=-1, required=True)
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Predictor file to write (.npz).")
@click.option(
    "--kind", default="survival", help="survival, scalar (as in the paper) or both (OUT.survival.npz, OUT.scalar.npz)."
)
@click.option(
    "--test", multiple=True, metavar="TRACES", help="Traces to judge by, instead of a tenth held out of TRACES."
)
@click.option(
    "--shared/--alone", default=True, help="Whether answers serve later requests of their data set, as when decoding."
)
@click.option("--keep-loops", is_flag=True, help="Do not cut traces where they begin to loop.")
@click.option("--max-states", type=click.IntRange(1), default=200_000, help="Bound on memory: states of each kind.")
@click.option("--seed", type=SEED, default=0, help="Seed of initial weights and drawing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def predictor(
    traces: tuple[str, ...],
    out: Path,
    kind: str,
    test: tuple[str, ...],
    shared: bool,
    keep_loops: bool,
    max_states: int,
    seed: int,
    as_json: bool,
) -> None:
    """Train the payoff predictor by trace replay. Needs no model, and minutes on two cores.

    TRACES are files, directories or glob patterns made by 'hvd trace'. Whole requests are held out; on them the
    predictor is judged beside the fixed rules: does a draft pay, that is, are at least 6 of its tokens accepted? Once
    over all positions and once over cycle boundaries, which are the states that the gate meets live.

    \b
    Examples:
      hvd train predictor traces/ --out predictor.npz
      hvd train predictor traces/ --kind both --out predictor.npz --json
    """
    from hvd.training.fit import TrainOptions, train_predictor

    options = TrainOptions(most_states=max_states, keep_loops=keep_loops, shared=shared, seed=seed)
    with progress_bar() as progress:
        report = train_predictor(
            traces, out, kind, test_paths=test or None, options=options, progress=progress, collected=_warn_of_few
        )
    if as_json:
        emit_json(report.to_dict())
        return
    for fit in report.fits:
        click.echo(fit.file)
    _print(report.judged)
    note(f"{report.traces} traces ({report.looped} cut at a loop), {report.groups} groups, {report.states} states "
         f"({report.test_states} held out, {report.censored} left out as cut off)")  # fmt: skip


FEW_STATES = 200
"""Held-out states below which the judgement comes with a warning."""


def _warn_of_few(states: int) -> None:
    if states < FEW_STATES:
        note(f"WARNING: only {states} states to judge by, so the figures say little, and some do not exist (-); "
             "collect more traces, or give --test")  # fmt: skip


def _print(judged: tuple[StatesReport, ...]) -> None:
    for report in judged:
        stdout_console().print(_table(report))


def _table(report: StatesReport) -> Table:
    from rich.table import Table

    paying = "-" if math.isnan(report.paying) else f"{report.paying:.1%}"
    title = f"payoff >= 6, {report.kind}: {report.states} states, {paying} pay; macro over data sets in brackets"
    table = Table("gate", "precision", "recall", "F1", "AUC", "calibration error", title=title)
    for gate in report.gates:
        pairs = [
            (getattr(gate.micro, name), getattr(gate.macro, name)) for name in ("precision", "recall", "f1", "auc")
        ]
        table.add_row(gate.name, *(f"{_figure(micro)} ({_figure(macro)})" for micro, macro in pairs), _figure(gate.ece))
    return table


def _figure(value: float) -> str:
    """ "-" where a figure does not exist."""
    return "-" if math.isnan(value) else f"{value:.3f}"
