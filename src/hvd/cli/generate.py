"""`hvd generate`: continue or answer one prompt."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING

import click

from hvd.cli.common import ModelOptions, check_policies, model_options, sampling_options
from hvd.cli.console import emit_json, progress_bar, stderr_console, waiting
from hvd.cli.prompt import encode_prompt, prompt_options, read_prompt
from hvd.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from hvd.engine.llm import Completion, Stream


@click.command()
@prompt_options
@click.option(
    "--policy",
    default="hvd",
    help="Who decides what to verify: plain, cache, eagle3, any-match, match-len, score, hvd-paper, hvd.",
)
@click.option(
    "--stream/--no-stream",
    default=None,
    show_default=False,
    help="Print text as it is committed. Default: when stdout is a terminal.",
)
@click.option("--stats", is_flag=True, help="A table of the arms on stderr, behind the text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@sampling_options
@model_options
def generate(
    prompt: str | None,
    file: str | None,
    chat: bool | None,
    policy: str,
    stream: bool | None,
    stats: bool,
    as_json: bool,
    params: SamplingParams,
    options: ModelOptions,
) -> None:
    """Answer (or continue) one prompt.

    The answer is the same, token for token, under every policy; policies differ in speed alone.

    \b
    Examples:
      hvd generate "Why is the sky blue?" --model SmolLM2-135M-Instruct.Q4_1.gguf
      hvd generate --file notes.txt --raw --max-tokens 64 --model MODEL
      hvd generate --file - --temperature 0.8 --seed 7 --json --model MODEL < prompt.txt
    """
    text = read_prompt(prompt, file)
    check_policies([policy], options.predictor)
    llm = options.open(EngineConfig(policy=policy))
    ids = encode_prompt(llm, text, chat)
    with llm.stream(ids, params, policy=policy) as running:
        if not as_json and (sys.stdout.isatty() if stream is None else stream):
            _print_live(running)
            completion = running.completion()
        else:
            completion = _decode_quietly(running, params.max_tokens)
            if not as_json:
                click.echo(completion.text)
    if as_json:
        emit_json(completion_json(completion, options.model))
    if stats:
        _print_stats(completion)


def _print_live(running: Stream) -> None:
    try:
        with waiting(f"reading the prompt ({running.request.prompt_length} tokens)"):
            first = next(running, None)
        for piece in running if first is None else chain([first], running):
            if piece.text:
                click.echo(piece.text, nl=False)
    finally:  # an interruption is told on a line of its own
        click.echo()


def _decode_quietly(running: Stream, most: int | None) -> Completion:
    with progress_bar() as progress:
        for done, _ in enumerate(running, start=1):
            progress("decoding", done, most or done)
    return running.completion()


def completion_json(completion: Completion, model: str) -> dict[str, object]:
    """A completion as `generate --json` prints it; seconds of wall time, arms that had at least one cycle."""
    stats = completion.stats
    return {
        "model": model,
        "policy": completion.policy,
        "prompt_tokens": stats.prompt_tokens,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "seconds": {"prefill": stats.prefill_seconds, "decode": stats.decode_seconds},
        "cycles": stats.cycles,
        "tokens_per_cycle": stats.tokens_per_cycle,
        "verify_width_mean": stats.verify_width_mean,
        "arms": {
            arm.value: {"cycles": of.cycles, "drafted": of.drafted, "accepted": of.accepted}
            for arm, of in stats.arms.items()
        },
    }


def _print_stats(completion: Completion) -> None:
    from rich.table import Table

    stats = completion.stats
    rate = len(completion.token_ids) / stats.decode_seconds if stats.decode_seconds else 0.0
    caption = (
        f"{len(completion.token_ids)} tokens in {stats.cycles} cycles ({stats.tokens_per_cycle:.2f} a cycle), "
        f"{rate:.1f} tokens/s, prefill {stats.prefill_seconds:.2f} s"
    )
    table = Table("arm", "cycles", "drafted", "accepted", caption=caption, title=f"policy {completion.policy}")
    for arm, of in stats.arms.items():
        table.add_row(arm.value, str(of.cycles), str(of.drafted), str(of.accepted))
    stderr_console().print(table)
