"""`hvd analyze`: would it help on these logs?"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd.cli.common import SEED
from hvd.cli.console import NARROW, emit_json, note, progress_bar, stdout_console
from hvd.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from hvd.analysis.result import Analysis
    from hvd.traces.logs import FileTally
    from hvd.training.replay import SimulatedHead

GAINS = 5
_STAGES = ("read", "tokenize", "replay", "train", "compare")
_FILES = 6
_BAR = 30


@click.command()
@click.argument("logs", nargs=-1, required=True, metavar="LOGS...")
@click.option("--tokenizer", "-t", help="Hub id, directory or .gguf file; not needed for traces of 'hvd trace'.")
@click.option(
    "--format", "form", help="chat, requests, completions, vllm or traces (found out for each file when not given)."
)
@click.option(
    "--cost", default="gpu-8b", help="File of 'hvd profile', or an example: cpu-small, cpu-0.5b, gpu-8b or gpu-70b."
)
@click.option(
    "--eagle3-acceptance",
    type=float,
    metavar="P",
    help="Assume an EAGLE3 head whose tokens are right with probability P.",
)
@click.option("--eagle3-length", type=click.IntRange(1), default=4, help="Tokens of its chain.")
@click.option("--predictor", "-p", multiple=True, help="Predictor file in place of the package's own; none: without.")
@click.option(
    "--max-tokens", type=click.IntRange(1), default=150_000,
    help="Analyse about so many answer tokens; of more, whole conversations are sampled.",
)  # fmt: skip
@click.option("--seed", type=SEED, default=0, help="Seed of the sample.")
@click.option("--keep-loops", is_flag=True, help="Do not cut answers where they begin to loop.")
@click.option(
    "--train", type=click.Path(path_type=Path), help="Write a predictor trained on the logs here, if it helps."
)
@click.option("--no-train", is_flag=True, help="Leave out the comparison with a trained predictor; faster.")
@click.option(
    "--show-text", is_flag=True, help="Show how the answers that gain most begin. Otherwise no text is shown."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def analyze(
    logs: tuple[str, ...],
    tokenizer: str | None,
    form: str | None,
    cost: str,
    eagle3_acceptance: float | None,
    eagle3_length: int,
    predictor: tuple[str, ...],
    max_tokens: int,
    seed: int,
    keep_loops: bool,
    train: Path | None,
    no_train: bool,
    show_text: bool,
    as_json: bool,
) -> None:
    """Would it help me? Replays the recorded answers of logs. Needs no model and no GPU.

    LOGS are files, directories or - for stdin: chats or requests with responses as JSON Lines (gzipped or not), data
    sets with messages (JSON Lines, Parquet), logs of a vLLM server, traces. docs/analyze.md says how to get them and
    what is assumed. Speeds are those of the cost profile.

    \b
    Examples:
      hvd analyze requests.jsonl.gz --tokenizer Qwen/Qwen3-8B
      hvd analyze vllm.log --tokenizer MODEL --cost cost.json --eagle3-acceptance 0.75
      hvd analyze logs/ --tokenizer MODEL --train predictor.npz --json
    """
    from hvd.analysis.analyze import AnalyzeOptions
    from hvd.analysis.analyze import analyze as run

    if train is not None and no_train:
        raise ConfigError("--train and --no-train exclude each other")
    options = AnalyzeOptions(
        tokenizer=tokenizer,
        form=form,
        cost=cost,
        head=_head(eagle3_acceptance, eagle3_length),
        predictors=predictor,
        max_tokens=max_tokens,
        learn=not no_train,
        train=train,
        keep_loops=keep_loops,
        seed=seed,
    )
    stages = 3 if no_train else 5 if train is None else 6
    with ExitStack() as bar:
        progress = bar.enter_context(progress_bar())

        def replayed(found: Analysis) -> None:
            nonlocal progress
            bar.close()  # two that draw on one terminal disturb each other
            _say_faults(found.files)
            if not as_json:
                _print(found, show_text)
            progress = bar.enter_context(progress_bar())

        found = run(logs, options, lambda what, done, total: progress(_stage(what, stages), done, total), replayed)
    if as_json:
        emit_json(found.as_json(show_text=show_text))
    else:
        _print_lines(_training(found, train))


def _stage(what: str, stages: int) -> str:
    """What is being done, with the number of its stage."""
    number = next((i for i, name in enumerate(_STAGES, start=1) if what.startswith(name)), stages)
    return f"{number} of {stages}: {what}"


def _head(acceptance: float | None, length: int) -> SimulatedHead | None:
    if acceptance is None:
        return None
    from hvd.training.replay import SimulatedHead

    return SimulatedHead(acceptance, length)


def _say_faults(files: Iterable[FileTally]) -> None:
    for tally in files:
        for fault in tally.faults:
            note(f"{fault}; skipped")
        if tally.broken > len(tally.faults):
            note(f"{tally.path}: {tally.broken} broken lines in all")


def _print(found: Analysis, show_text: bool) -> None:
    """Everything but the training."""
    _print_lines(_head_lines(found))
    stdout_console(NARROW).print(_policies(found))
    _print_lines((*_payoffs(found), *_sources(found), *_gains(found, show_text), *_loops(found)))


def _print_lines(lines: Iterable[str]) -> None:
    """Wrapped at words on a terminal; elsewhere each stays one line, for grep."""
    console = stdout_console(NARROW)
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal, markup=False)
    sys.stdout.flush()


def _head_lines(found: Analysis) -> Iterator[str]:
    from hvd.analysis.study import counted

    files = sorted(found.files, key=lambda tally: -tally.answers)
    for tally in files[:_FILES]:
        within = counted(tally.lines, _unit(tally))
        yield f"{tally.path}: {tally.format}, {counted(tally.answers, 'answer')} in {within}"
    if len(files) > _FILES:
        yield f"and {len(files) - _FILES} more files"
    sampled = "" if found.share >= 0.9995 else f", a sample of {found.share:.1%} by whole conversations"
    yield (
        f"analysed: {found.answers} of {counted(found.answers_found, 'answer')}{sampled}; "
        f"{counted(found.groups, 'conversation')}, {found.tokens} answer tokens behind {found.prompt_tokens} of prompts"
    )
    yield from (f"note: {line}" for line in found.notes)
    yield f"cost: {found.cost}"
    if found.eagle3:
        yield f"EAGLE3: {found.eagle3}"
    yield ""
    hvd, best = found.policy("hvd"), found.policy("oracle")
    low, high = found.intervals["hvd"]
    yield (
        f"A cache draft would have given {found.cache_share:.0%} of the tokens. With hvd: {hvd.speedup_micro:.2f}x "
        f"plain decoding ({low:.2f} to {high:.2f}), of {best.speedup_micro:.2f}x that are possible."
    )


def _unit(tally: FileTally) -> str:
    return "trace" if tally.format == "traces" else "row" if tally.path.endswith(".parquet") else "line"


def _policies(found: Analysis) -> Table:
    from rich import box
    from rich.table import Table

    names = ("policy", "tok/cycle", "tokens/s", "speed-up", "95 % interval", "regret")
    table = Table(*names, box=box.SIMPLE_HEAD)
    for policy in found.policies:
        low, high = found.intervals[policy.name]
        total = policy.total
        table.add_row(
            policy.name,
            f"{total.tokens / total.cycles:.2f}",
            f"{total.tokens / total.seconds:.1f}",
            f"{policy.speedup_micro:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{policy.regret_micro:.1%}",
        )
    return table


def _payoffs(found: Analysis) -> Iterator[str]:
    payoffs = found.payoffs
    drafts = sum(payoffs.drafts)
    if not drafts:
        yield "No cache draft was ever on offer: nothing in these answers repeats."
        return
    yield (
        f"Payoff of the drafts (accepted tokens), where each is verified: {drafts} drafts, {payoffs.paying:.0%} pay 6 "
        f"or more; {payoffs.bare} times there was none"
    )
    edges = payoffs.edges
    for i, count in enumerate(payoffs.drafts):
        last = i + 1 == len(edges)
        name = f"{edges[i]} or more" if last else str(edges[i])
        if not last and edges[i + 1] > edges[i] + 1:
            name = f"{edges[i]} to {edges[i + 1] - 1}"
        yield f"  {name:>10}  {_bar(count / max(payoffs.drafts)):<{_BAR}} {count / drafts:6.1%}"


def _bar(share: float) -> str:
    return "#" * max(round(_BAR * share), 1 if share else 0)


def _sources(found: Analysis) -> Iterator[str]:
    if found.sources:
        yield "Copied from: " + ", ".join(f"{name} {share:.0%}" for name, share in found.sources.items())


def _gains(found: Analysis, show_text: bool) -> Iterator[str]:
    best = [gain for gain in found.gains if gain.speedup > 1.0][:GAINS]
    if best:
        yield "Most time is saved on:"
    names = [Path(tally.path).name for tally in found.files]
    short = {tally.path: name for tally, name in zip(found.files, names, strict=True) if names.count(name) == 1}
    for gain in best:
        most = f", most of it from {gain.copied}" if gain.copied else ""
        text = f"  {gain.text[:60]!r}" if show_text and gain.text else ""
        yield (
            f"  {_shortened(gain.source, short)}: {gain.tokens} tokens, {gain.speedup:.2f}x, "
            f"saves {gain.plain - gain.seconds:.2f} s, "
            f"{gain.share:.0%} from the cache{most}{text}"
        )


def _shortened(source: str, short: Mapping[str, str]) -> str:
    """ "file:line" without the file's directories; the id of a trace as it is."""
    path, colon, line = source.rpartition(":")
    return short.get(path, path) + colon + line


def _loops(found: Analysis) -> Iterator[str]:
    if found.loops is not None:
        speeds = ", ".join(f"{name} {speed:.2f}x" for name, speed in found.loops.speedups.items() if name != "plain")
        yield (
            f"Loops: {found.loops.answers} answers end in one and were cut there; with the loops left in "
            f"({found.loops.tokens} tokens more): {speeds}"
        )
    else:
        yield "Loops: no answer ends in one" if not found.looped else ""


def _training(found: Analysis, train: Path | None) -> Iterator[str]:
    training = found.training
    if training is None:
        return
    gain = ""
    if training.gain == training.gain:
        gain = f" {training.gain:+.1%} tokens/s ({training.low:+.1%} to {training.high:+.1%});"
    nothing = training.verdict.value == "no" and training.low <= 0.0 <= training.high
    verdict = "" if nothing else f" {training.verdict.value}."
    yield f"Training a predictor on these logs:{verdict}{gain} {training.reason}"
    if training.file:
        yield f"Written: {training.file}; use it with --predictor"
    elif train is not None:
        yield f"{train} was not written: it would not help, as far as can be told"
    elif training.verdict.value == "yes":
        yield "Run again with --train OUT to write it"
