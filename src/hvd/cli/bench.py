"""`hvd bench`: policies beside each other on prompt files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd.cli.common import ModelOptions, check_policies, model_options, read_conversations
from hvd.cli.console import note, progress_bar, stdout_console
from hvd.config import SamplingParams
from hvd.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from hvd.bench.file import BenchFile
    from hvd.bench.runner import Runner
    from hvd.traces.prompts import Prompt

DEFAULT_POLICIES = "plain,cache,match-len,hvd"


@click.command()
@click.option(
    "--data",
    "-d",
    multiple=True,
    required=True,
    metavar="FILE",
    help="Prompt file (JSONL); may be given several times.",
)
@click.option(
    "--policies",
    default=DEFAULT_POLICIES,
    help="Names with commas between; plain is always measured. name@arctic: with ArcticInference's drafts.",
)
@click.option("--split", type=click.Choice(["train", "dev", "test"]), help="Only prompts of this split.")
@click.option("--limit", type=click.IntRange(1), help="At most so many conversations of each file.")
@click.option("--turns", type=click.IntRange(1), help="At most so many turns of each conversation.")
@click.option("--max-tokens", type=int, default=256, help="Most tokens to generate for a turn.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--seed", type=int, default=0, help="Seed of sampling.")
@click.option(
    "--scope",
    default="none",
    help="What a request's cache holds: none (its own text), dataset or all (earlier answers too).",
)
@click.option("--repeat", is_flag=True, help="Measure plain decoding twice; the difference is noise.")
@click.option(
    "--json",
    "out",
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="Write records and summary here, and keep it up to date.",
)
@click.option("--resume", is_flag=True, help="Go on with what --json OUT holds already.")
@click.option("--overwrite", is_flag=True, help="Replace what --json OUT holds already.")
@model_options
def bench(
    data: tuple[str, ...],
    policies: str,
    split: str | None,
    limit: int | None,
    turns: int | None,
    max_tokens: int,
    temperature: float,
    seed: int,
    scope: str,
    repeat: bool,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    options: ModelOptions,
) -> None:
    """Measure policies on prompt files and check every output.

    Each prompt runs under all policies before the next, in an order that rotates, and their outputs are compared with
    plain decoding's; each policy has a suffix cache of its own. The table shows speed over plain decoding: tokens a
    second of a data set, and for categories and all the geometric mean over data sets. Exit code 1 when an output
    differs.

    \b
    Examples:
      hvd bench --model MODEL --data chat.jsonl --data edits.jsonl --policies match-len,hvd --limit 10
      hvd bench --model MODEL --data all.jsonl --split test --repeat --json results.json --resume
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise ConfigError("--policies names no policy; try plain,cache,match-len,hvd")
    if resume and out is None:
        raise ConfigError("--resume goes on with a file; name it with --json")
    if out is not None and out.exists() and not (resume or overwrite):
        raise ConfigError(f"{out} exists already; --resume goes on with it, --overwrite replaces it")
    predictors = check_policies([name.partition("@")[0] for name in names], options.predictor)
    prompts = read_conversations(data, split, limit, turns)

    from hvd.bench.file import BenchFile
    from hvd.bench.runner import Runner

    settings = {
        "policies": names,
        "sampling": asdict(params),
        "turns": turns,
        "scope": scope,
        "repeat": repeat,
        "predictors": list(options.predictor) or "shipped",
    }
    which = {"files": [Path(name).name for name in data], "split": split, "limit": limit}
    base = options.open()
    runner = Runner(base, names, params, predictors=predictors, scope=scope, repeat=repeat)
    file = BenchFile(out, _model(base.target.spec, options), settings, which, resume=resume)
    try:
        _run(runner, prompts, file)
    finally:
        if file.records:
            file.write()
        _report(file)
    if not file.records:
        raise RequestError("nothing was measured: no prompt could be run")
    if not all(record["identical"] for record in file.records):
        raise click.exceptions.Exit(1)


def _model(spec: Any, options: ModelOptions) -> dict[str, object]:
    return {
        "name": spec.name,
        "fingerprint": spec.fingerprint,
        "family": spec.family,
        "backend": spec.backend,
        "weights": spec.weights,
        "eagle3": options.eagle3,
        "threads": options.threads,
    }


def _run(runner: Runner, prompts: Sequence[Prompt], file: BenchFile) -> None:
    from hvd.bench.conversation import turn_ids

    todo = [prompt for prompt in prompts if not file.done(turn_ids(prompt))]
    total, done = sum(len(prompt.turns) for prompt in todo), 0
    if len(todo) < len(prompts):
        note(f"resuming: {len(prompts) - len(todo)} of {len(prompts)} conversations are there already")
    if todo:
        note(f"{total} prompts x {len(runner.policies)} policies: {', '.join(runner.policies)}")
        runner.warm_up()
    with progress_bar() as progress:

        def on_turn() -> None:
            nonlocal done
            done += 1
            progress("prompts", done, total)

        progress("prompts", 0, total)
        for prompt in todo:
            file.add(runner.run(prompt, on_turn))


def _report(file: BenchFile) -> None:
    """The table on stdout, what else there is to say on stderr."""

    from hvd.bench.report import summarize

    summary = summarize(file.records)
    console = stdout_console()
    for loops in (True, False):
        if summary["rows"] and (loops or summary["looped"]):
            console.print(_table([row for row in summary["rows"] if row["loops"] is loops], loops))
    if file.skipped:
        note(f"{len(file.skipped)} prompts were skipped, the first: {file.skipped[0]['id']}: {file.skipped[0]['why']}")
    for entry in summary["different"]:
        note(f"DIFFERENT OUTPUT: {entry['id']} under {entry['policy']}, from token {entry['differs_at']} on")
    if file.records:
        console.print(f"output identical: {'yes' if summary['identical'] else 'NO'} ({summary['prompts']} prompts)")


def _table(rows: Sequence[dict[str, Any]], loops: bool) -> Table:
    from rich.table import Table

    policies = list(dict.fromkeys(row["policy"] for row in rows))
    title = "speed over plain decoding, tokens per cycle in brackets" + ("" if loops else "; without prompts that loop")
    table = Table("group", "prompts", *policies, title=title)
    for level, group in dict.fromkeys((row["level"], row["group"]) for row in rows):
        cells = {row["policy"]: row for row in rows if (row["level"], row["group"]) == (level, group)}
        name = group if level == "dataset" else f"[bold]{group}[/bold]"
        first = next(iter(cells.values()))
        table.add_row(name, str(first["prompts"]), *(_cell(cells.get(policy), level) for policy in policies))
    return table


def _cell(row: dict[str, Any] | None, level: str) -> str:
    if row is None:
        return "-"
    speed = row["speedup_micro"] if level == "dataset" else row["speedup_macro"]
    return f"{speed:.2f} ({row['tokens_per_cycle']:.2f})"
