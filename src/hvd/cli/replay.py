"""`hvd replay`: play policies on traces, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hvd.cli.console import emit_json, note, progress_bar, stdout_console
from hvd.errors import ConfigError

if TYPE_CHECKING:
    from hvd.training.replay import SimulatedHead
    from hvd.training.simulate import ReplayReport

DEFAULT_POLICIES = "plain,cache,match-len,hvd,oracle"


@click.command()
@click.argument("traces", nargs=-1, required=True)
@click.option(
    "--policies", default=DEFAULT_POLICIES, help="Names with commas between; plain and oracle are always there."
)
@click.option(
    "--cost",
    required=True,
    help="File of 'hvd profile', or an example: cpu-small, cpu-0.5b, gpu-8b or gpu-70b.",
)
@click.option("--predictor", "-p", multiple=True, help="Predictor file; give one of each kind that the policies take.")
@click.option(
    "--head",
    metavar="P[,LENGTH]",
    help="Simulate an EAGLE3 chain whose tokens are right with probability P (length 4).",
)
@click.option(
    "--shared/--alone", default=True, help="Whether answers serve later requests of their data set, as when decoding."
)
@click.option("--keep-loops", is_flag=True, help="Do not cut traces where they begin to loop.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    traces: tuple[str, ...],
    policies: str,
    cost: str,
    predictor: tuple[str, ...],
    head: str | None,
    shared: bool,
    keep_loops: bool,
    as_json: bool,
) -> None:
    """Simulate policies on traces, without a model.

    Prints tokens per cycle, tokens a second by the cost model, and regret: the time lost against the oracle. The oracle
    sees all payoffs beforehand and spends the least possible time; no policy can beat it.

    \b
    Examples:
      hvd replay traces/ --cost cost.json
      hvd replay traces/ --cost cost.json --policies match-len:4,match-len:8,hvd --predictor predictor.npz
      hvd replay traces/ --cost cost.json --policies eagle3,hvd --head 0.75
    """
    from hvd.analysis.costs import load_cost
    from hvd.payoff.shipped import gather_predictors
    from hvd.training.simulate import replay_report

    names = [name.strip() for name in policies.split(",") if name.strip()]
    simulated = simulated_head(head)
    with progress_bar() as progress:
        report = replay_report(
            traces,
            names,
            load_cost(cost)[0],
            predictors=list(gather_predictors(predictor).values()),
            head=simulated,
            shared=shared,
            keep_loops=keep_loops,
            progress=lambda done, total: progress("replay", done, total),
        )
    if as_json:
        emit_json(report.to_dict())
    else:
        _print(report)


def simulated_head(text: str | None) -> SimulatedHead | None:
    """The head that `--head P[,LENGTH]` describes. Raises ConfigError."""
    if text is None:
        return None
    from hvd.training.replay import SimulatedHead

    accept, _, length = text.partition(",")
    try:
        return SimulatedHead(float(accept), int(length or 4))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--head must be P or P,LENGTH such as 0.75,4, got {text!r}") from error


def _print(report: ReplayReport) -> None:
    from rich.table import Table

    table = Table(
        "policy", "tokens per cycle", "tokens/s", "speedup", "macro", "regret", "macro",
        title="by the cost model; macro: mean over data sets",
    )  # fmt: skip
    for policy in report.policies:
        total = policy.total
        table.add_row(
            policy.name,
            f"{total.tokens / total.cycles:.2f}",
            f"{total.tokens / total.seconds:.1f}",
            f"{policy.speedup_micro:.2f}",
            f"{policy.speedup_macro:.2f}",
            f"{policy.regret_micro:.1%}",
            f"{policy.regret_macro:.1%}",
        )
    stdout_console().print(table)
    note(f"{report.traces} traces, {report.tokens} tokens, {report.looped} traces cut at a loop")
