"""`hvd trace`: collect, import and look at traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd.cli.common import ModelOptions, check_policies, model_options, read_conversations, sampling_options
from hvd.cli.console import emit_json, note, progress_bar, stdout_console
from hvd.config import EngineConfig, SamplingParams
from hvd.errors import ConfigError

if TYPE_CHECKING:
    from hvd.traces.schema import Trace

_SPLIT = click.option("--split", type=click.Choice(["train", "dev", "test"]), help="Only prompts of this split.")
_LIMIT = click.option("--limit", type=click.IntRange(1), help="At most so many conversations of each file.")
_TURNS = click.option("--turns", type=click.IntRange(1), help="At most so many turns of each conversation.")
_OUT = click.option(
    "--out",
    "-o",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory to write to, made if missing, for its owner only.",
)


@click.group()
def trace() -> None:
    """Traces: what requests did, token by token. The predictor is trained on them."""


@trace.command()
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPTS...")
@_OUT
@_SPLIT
@_LIMIT
@_TURNS
@click.option("--policy", default="hvd", help="Policy to decode with; it changes the time, not the text.")
@click.option("--batch", type=click.IntRange(1), default=1, help="Conversations decoded side by side.")
@click.option("--restart", is_flag=True, help="Collect again what the directory holds already.")
@sampling_options
@model_options
def collect(
    prompts: tuple[str, ...],
    out: Path,
    split: str | None,
    limit: int | None,
    turns: int | None,
    policy: str,
    batch: int,
    restart: bool,
    params: SamplingParams,
    options: ModelOptions,
) -> None:
    """Run the model over prompt files and write what it did as Parquet, for 'hvd train' and 'hvd replay'.

    A prompt file is JSONL: {"messages": [...]} or {"prompt": "..."} a line. Questions of a conversation are sent one by
    one, each behind the model's answer to the one before; recorded answers are generated anew, each from the recorded
    text before it. Run it again after an interruption, and it goes on where it was.

    \b
    Examples:
      hvd trace collect prompts.jsonl --out traces --model MODEL
      hvd trace collect chat.jsonl edits.jsonl --out traces --split train --limit 50 --max-tokens 512 --model MODEL
    """
    check_policies([policy], options.predictor)
    todo = read_conversations(prompts, split, limit, turns)
    llm = options.open(EngineConfig(policy=policy, record=True))

    from hvd.traces.collect import collect_traces
    from hvd.traces.writer import TraceWriter

    if llm.tokenizer is None:
        raise ConfigError("this model has no tokenizer")
    known = set() if restart else _known_ids(out, llm.target.spec.fingerprint)
    with TraceWriter(out, llm.tokenizer.token_classes()) as writer, progress_bar() as progress:
        total, done = sum(len(prompt.turns) for prompt in todo), 0

        def on_turns(count: int) -> None:
            nonlocal done
            done += count
            progress("turns", done, total)

        for found in collect_traces(llm, todo, params, known=known, batch=batch, warn=note, on_turns=on_turns):
            writer.add(found)
        writer.flush()
        note(f"{writer.written} traces written to {out}" + (f", {len(known)} were there" if known else ""))


def _known_ids(directory: Path, fingerprint: str) -> set[str]:
    """Ids of the traces that this model has in the directory already."""
    from hvd.traces.reader import read_traces

    if not directory.is_dir() or not any(directory.glob("*.parquet")):
        return set()
    return {found.id for found in read_traces(directory, warn=note) if found.model_fingerprint == fingerprint}


@trace.command("import")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPTS...")
@_OUT
@_SPLIT
@_LIMIT
@click.option(
    "--max-context", type=click.IntRange(2), help="Leave out turns with more tokens, prompt and answer together."
)
@click.option(
    "--model", "-m", required=True, help="Where the tokenizer comes from: Hugging Face directory, hub id or GGUF file."
)
def import_(
    prompts: tuple[str, ...], out: Path, split: str | None, limit: int | None, max_context: int | None, model: str
) -> None:
    """Turn recorded conversations (assistant messages in the prompt files) into traces. No model is run.

    \b
    Examples:
      hvd trace import conversations.jsonl --out traces --model MODEL
    """
    from hvd.models.checkpoint import load_checkpoint
    from hvd.traces.importers import recorded_traces
    from hvd.traces.writer import TraceWriter

    found = read_conversations(prompts, split, limit, None)
    tokenizer = load_checkpoint(model).tokenizer()
    with TraceWriter(out, tokenizer.token_classes()) as writer, progress_bar() as progress:
        for done, prompt in enumerate(found, start=1):
            for recorded in recorded_traces([prompt], tokenizer, max_context=max_context, warn=note):
                writer.add(recorded)
            progress("conversations", done, len(found))
        writer.flush()
        note(f"{writer.written} traces written to {out}")


@trace.command()
@click.argument("traces", nargs=-1, required=True)
@click.option("--id", "id_", help="Show this trace's cycles instead of the overview.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def show(traces: tuple[str, ...], id_: str | None, as_json: bool) -> None:
    """What is in trace files: by data set, or the cycles of one trace.

    \b
    Examples:
      hvd trace show traces/
      hvd trace show traces/ --id mt_bench/81#turn0
    """
    from hvd.traces.reader import read_traces

    found = read_traces(traces, warn=note)
    if id_ is None:
        _show_overview(found, as_json)
        return
    chosen = next((one for one in found if one.id == id_), None)
    if chosen is None:
        raise ConfigError(f"no trace with id {id_!r}; 'hvd trace show' without --id lists the data sets")
    _show_cycles(chosen, as_json)


def _show_overview(traces: Iterator[Trace], as_json: bool) -> None:
    from hvd.training.loops import loop_onset

    rows: dict[tuple[str, str], dict[str, int]] = {}
    for found in traces:
        row = rows.setdefault((found.model, found.dataset), dict.fromkeys(_COUNTS, 0))
        row["traces"] += 1
        row["prompt_tokens"] += len(found.prompt)
        row["response_tokens"] += len(found.response)
        row["cycles"] += len(found.steps)
        row["cut_off"] += found.cut
        row["loops"] += loop_onset(found.response) is not None
    if as_json:
        for (model, dataset), row in rows.items():
            emit_json({"model": model, "dataset": dataset, **row})
        return
    _print_table(["model", "dataset", *_COUNTS], [[*key, *map(str, row.values())] for key, row in rows.items()])


_COUNTS = ("traces", "prompt_tokens", "response_tokens", "cycles", "cut_off", "loops")
_STEP = ("position", "context", "arm", "drafted", "accepted", "committed", "offered", "match_len", "score", "reason")


def _show_cycles(chosen: Trace, as_json: bool) -> None:
    if as_json:
        for step in chosen.steps:
            emit_json({name: getattr(step, name) for name in _STEP})
        return
    note(f"{chosen.id}: {len(chosen.prompt)} prompt tokens, {len(chosen.response)} generated, {chosen.finish_reason}")
    _print_table(
        _STEP,
        [
            [f"{step.score:.2f}" if name == "score" else str(getattr(step, name)) for name in _STEP]
            for step in chosen.steps
        ],
    )


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    stdout_console().print(table)
