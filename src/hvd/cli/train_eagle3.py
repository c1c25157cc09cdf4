"""`hvd train eagle3`: an EAGLE3 head for any target."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd.cli.common import read_conversations
from hvd.cli.console import emit_json, note, progress_bar, stdout_console
from hvd.errors import ConfigError, MissingExtraError

MOST_LINES = 12
"""Epochs shown of a long training; the head's card has all."""

if TYPE_CHECKING:
    from hvd.traces.prompts import Prompt
    from hvd.training.eagle3.answers import Progress
    from hvd.training.eagle3.train import Eagle3Options, Trained


@click.command("eagle3")
@click.option("--model", "-m", required=True, help="The target: Hugging Face directory, hub id or GGUF file.")
@click.option("--data", "-d", multiple=True, metavar="FILE", help="Prompt file (JSONL); may be given several times.")
@click.option(
    "--text", multiple=True, metavar="TRACES", help="Answers that are there already: traces of this target. Repeatable."
)
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Directory for all that is made.")
@click.option("--split", type=click.Choice(["train", "dev", "test"]), help="Only prompts of this split.")
@click.option("--limit", type=click.IntRange(1), help="At most so many conversations of each file.")
@click.option("--turns", type=click.IntRange(1), help="At most so many turns of each conversation.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, help="Longest answer to generate.")
@click.option("--temperatures", default="0,0.8", help="The target answers each prompt once at each; empty: not at all.")
@click.option("--recorded", is_flag=True, help="Learn from the prompt files' recorded answers too.")
@click.option("--batch", type=click.IntRange(1), default=64, help="Answers generated side by side, by each worker.")
@click.option("--workers", type=click.IntRange(1), default=1, help="Processes that generate; each holds the model.")
@click.option("--vocab", type=click.IntRange(2), default=8192, help="Entries of the draft vocabulary.")
@click.option("--intermediate", type=click.IntRange(1), help="Size of the head's MLP (the target's when not given).")
@click.option("--length", type=click.IntRange(16), default=2048, help="Most tokens of a text and of a pack.")
@click.option("--steps", type=click.IntRange(1), default=5, help="Steps of the training-time test.")
@click.option("--epochs", type=click.IntRange(1), default=10, help="Rounds over the text.")
@click.option(
    "--prompt-share", type=click.FloatRange(0, 1), default=0.2, help="Share of the prompts to learn from too."
)
@click.option("--packs", type=click.IntRange(1), default=1, help="Packs of --length tokens an update.")
@click.option("--learning-rate", type=float, default=6e-3, help="Highest learning rate (of Muon; AdamW's is half).")
@click.option("--patience", type=click.IntRange(1), default=3, help="Epochs without progress before it ends.")
@click.option("--hold-out", type=float, default=0.05, help="Share of the prompts that is judged by, not trained on.")
@click.option("--states-gb", type=click.FloatRange(0, 1e6), default=20.0, help="Most hidden states kept on disk.")
@click.option("--from-scratch", is_flag=True, help="Begin at random, not as the target's last layer.")
@click.option("--device", default="auto", help="auto, cpu or cuda.")
@click.option("--dtype", default="bfloat16", help="The target's numbers: bfloat16, float16 or float32.")
@click.option("--precision", default="bfloat16", help="Products of the training: bfloat16 or float32.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads (all cores when not given).")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Seed of everything that is drawn.")
@click.option("--restart", is_flag=True, help="Forget the checkpoint (text and hidden states stay).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def eagle3(**given: Any) -> None:
    """Train an EAGLE3 head: the target answers prompts, and the head learns to foresee it.

    Four stages, each kept under OUT and resumed by running the same command again: answers (text/), hidden states
    (states/), training (checkpoint.pt), and the head (head/), which '--eagle3 OUT/head' takes. Needs the extra 'torch',
    and hours where there is no GPU. There a small model answers faster with '--workers', which share the cores.

    \b
    Examples:
      hvd train eagle3 --model MODEL --data chat.jsonl --data code.jsonl --split train --out smol
      hvd train eagle3 --model MODEL --data all.jsonl --out smol --temperatures 0 --vocab 5000 --epochs 20
      hvd generate "Hello" --model MODEL --eagle3 smol/head
    """
    temperatures = _temperatures(given["temperatures"])
    if not given["data"] and not given["text"]:
        raise ConfigError("nothing to learn from: give prompt files with --data, or traces with --text")
    prompts = read_conversations(given["data"], given["split"], given["limit"], given["turns"]) if given["data"] else []
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtraError("training an EAGLE3 head", "torch") from None

    options = _options(given, temperatures)
    try:
        with progress_bar() as progress:
            trained = _train(given, prompts, options, progress)
    except KeyboardInterrupt:
        note(f"what was made is kept in {given['out']}; the same command goes on from there")
        raise
    if given["as_json"]:
        emit_json(trained.to_dict())
    else:
        _print(trained)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--temperatures must be numbers with commas between, got {text!r}") from None


def _options(given: dict[str, Any], temperatures: tuple[float, ...]) -> Eagle3Options:
    from hvd.training.eagle3.fit import FitOptions
    from hvd.training.eagle3.train import Eagle3Options

    if math.isnan(given["states_gb"]):
        raise ConfigError("--states-gb must be a number of gigabytes, got nan")
    names = ("steps", "length", "prompt_share", "packs", "epochs", "learning_rate", "patience", "precision", "seed")
    return Eagle3Options(
        max_tokens=given["max_tokens"],
        temperatures=temperatures,
        recorded=given["recorded"],
        vocab=given["vocab"],
        intermediate=given["intermediate"],
        hold_out=given["hold_out"],
        states_bytes=int(given["states_gb"] * 1e9),
        from_target=not given["from_scratch"],
        fit=FitOptions(**{name: given[name] for name in names}),
    )


def _train(given: dict[str, Any], prompts: list[Prompt], options: Eagle3Options, progress: Progress) -> Trained:
    from hvd.models.checkpoint import load_checkpoint
    from hvd.models.torch_target import TorchTarget
    from hvd.training.eagle3.answers import given_traces
    from hvd.training.eagle3.place import only_run
    from hvd.training.eagle3.train import train_eagle3, write_text
    from hvd.training.eagle3.workers import Writer, write_text_with

    checkpoint = load_checkpoint(given["model"])
    writer = Writer(given["model"], given["dtype"], given["device"], given["threads"], given["batch"])
    out: Path = given["out"]
    with only_run(out):
        if given["restart"]:
            (out / "checkpoint.pt").unlink(missing_ok=True)
        if prompts and given["workers"] > 1:
            write_text_with(given["workers"], writer, prompts, out, options, progress, note)
        llm = writer.open(progress)
        assert isinstance(llm.target, TorchTarget)
        text = list(given_traces([Path(name) for name in given["text"]]))
        if prompts:
            text += write_text(llm, prompts, out, options, progress, note)
        return train_eagle3(checkpoint, llm.target, text, out, options, progress, note)


def _print(trained: Trained) -> None:
    from rich.table import Table

    steps = len(trained.curve[-1].score.accepted)
    shown = sorted({1, min(2, steps), min(4, steps), steps})
    table = Table("epoch", "seconds", "loss", *(f"chain of {k}" for k in shown))
    table.title = "tokens per cycle on held-out prompts"
    every = -(-len(trained.curve) // MOST_LINES)
    for point in [*trained.curve[:-1:every], trained.curve[-1]]:
        chains = (f"{1 + point.score.accepted[k - 1]:.2f}" for k in shown)
        table.add_row(str(point.epoch), f"{point.seconds:.0f}", f"{point.score.loss:.3f}", *chains)
    stdout_console().print(table)
    click.echo(str(trained.folder))
