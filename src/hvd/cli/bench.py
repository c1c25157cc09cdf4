"""`hvd bench`: methods beside each other on sets of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvd.cli.common import SEED, ModelOptions, check_policies, model_options, read_conversations
from hvd.cli.console import note, progress_bar, stdout_console
from hvd.cli.report import write_report
from hvd.config import SamplingParams
from hvd.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hvd.bench.file import BenchFile
    from hvd.bench.peers import PeerMethod
    from hvd.bench.runner import Runner
    from hvd.engine.llm import LLM
    from hvd.models.target import TargetSpec
    from hvd.traces.prompts import Prompt

DEFAULT_POLICIES = "plain,cache,match-len,hvd"
ALL = "all"
EVERY_POLICY = (
    "plain", "cache", "cache@arctic", "any-match", "match-len:4", "match-len:4@arctic", "match-len:8", "score:3",
    "score:3@arctic", "hvd-paper", "hvd",
)  # fmt: skip
"""What `--policies all` stands for; with a head, "eagle3" too."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure, and where to put it. The fields are the options' names."""

    data: tuple[str, ...]
    suite: str | None
    data_dir: Path | None
    sets: str
    policies: str
    peers: str
    split: str | None
    limit: int | None
    turns: int | None
    max_tokens: int
    temperature: float
    seed: int
    scope: str
    repeat: bool
    analysis: bool
    out: Path | None
    resume: bool
    overwrite: bool
    html: Path | None

    def check(self) -> None:
        """Raises ConfigError for options that don't go together, before anything is read or loaded."""
        if not self.data and self.suite is None:
            raise ConfigError("nothing to measure: give prompt files with --data, or a --suite (local, paper)")
        if self.suite == "local" and self.data_dir is None:
            raise ConfigError("--suite local reads the sets of a directory; name it with --data-dir")
        if self.sets and self.suite is None:
            raise ConfigError("--sets chooses from a suite; give --suite local or --suite paper")
        if self.resume and self.out is None:
            raise ConfigError("--resume goes on with a file; name it with --json")
        if self.out is not None and self.out.exists() and not (self.resume or self.overwrite):
            raise ConfigError(f"{self.out} exists already; --resume goes on with it, --overwrite replaces it")
        if self.html is not None and self.html.exists() and not (self.resume or self.overwrite):
            raise ConfigError(f"{self.html} exists already; --overwrite replaces it")


@click.command()
@click.option("--data", "-d", multiple=True, metavar="FILE", help="Prompt file (JSONL); may be given several times.")
@click.option(
    "--suite",
    type=click.Choice(["local", "paper"]),
    help="local: the prompt files of --data-dir, by name; paper: the paper's sixteen sets, from the Hugging Face hub.",
)
@click.option(
    "--data-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory of NAME.jsonl; with --suite paper it has what stands in for sets that can't be had.",
)
@click.option(
    "--sets", default="", show_default=False, metavar="NAMES", help="Only these sets of the suite, with commas between."
)
@click.option(
    "--policies",
    default=DEFAULT_POLICIES,
    help="Names with commas between, or all; plain is always measured. name@arctic: with ArcticInference's drafts.",
)
@click.option(
    "--peers",
    default="",
    show_default=False,
    metavar="NAMES",
    help="Other programs to run beside: transformers, llama.cpp, vllm, with commas between.",
)
@click.option("--split", type=click.Choice(["train", "dev", "test"]), help="Only prompts of this split.")
@click.option("--limit", type=click.IntRange(1), help="At most so many conversations of each set (paper: 80).")
@click.option("--turns", type=click.IntRange(1), help="At most so many turns of each conversation.")
@click.option("--max-tokens", type=int, default=256, help="Most tokens to generate for a turn.")
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--seed", type=SEED, default=0, help="Seed of sampling.")
@click.option(
    "--scope",
    default="none",
    help="What a request's cache holds: none (its own text), dataset or all (earlier answers too).",
)
@click.option("--repeat", is_flag=True, help="Measure plain decoding twice; the difference is noise.")
@click.option("--analysis/--no-analysis", default=True, help="Replay every answer for the analysis in the JSON file.")
@click.option(
    "--json",
    "out",
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="Write records, summary and analysis here, and keep it up to date.",
)
@click.option("--resume", is_flag=True, help="Go on with what --json OUT holds already.")
@click.option("--overwrite", is_flag=True, help="Replace what --json OUT and --html OUT hold already.")
@click.option(
    "--html", metavar="OUT", type=click.Path(path_type=Path), help="Write a page of it all (see 'hvd report')."
)
@model_options
def bench(options: ModelOptions, **given: Any) -> None:
    """Measure methods on sets of prompts and check every output.

    Each prompt runs under all methods before the next, in an order that rotates, and the policies' outputs are compared
    with plain decoding's; each policy has a suffix cache of its own. The tables show speed over plain decoding: tokens
    a second of a data set, and for categories and all the geometric mean over data sets. Exit code 1 when an output
    differs. A peer's text need not be ours; how far it agrees is reported.

    \b
    Examples:
      hvd bench --model MODEL --data chat.jsonl --data edits.jsonl --policies match-len,hvd --limit 10
      hvd bench --model MODEL --suite local --data-dir DIR --sets gsm8k,mbpp --policies all --repeat
      hvd bench --model MODEL --suite paper --peers transformers,llama.cpp --json results.json --resume
    """
    from hvd.bench.file import BenchFile
    from hvd.bench.peers import check_peers
    from hvd.bench.runner import Runner
    from hvd.types import Arm

    what = BenchOptions(**{field.name: given[field.name] for field in fields(BenchOptions)})
    what.check()
    params = SamplingParams(max_tokens=what.max_tokens, temperature=what.temperature, seed=what.seed)
    names, peer_names = _policies(what.policies), _names(what.peers)
    check_peers(peer_names)
    predictors = check_policies([name.partition("@")[0] for name in names], options.predictor)
    prompts, data = _prompts(what)

    base = options.open()
    head = Arm.EAGLE3 in base.drafters
    if head and ALL in _names(what.policies) and "eagle3" not in names:
        names.append("eagle3")
    settings = {
        "policies": names,
        "peers": peer_names,
        "sampling": asdict(params),
        "turns": what.turns,
        "scope": what.scope,
        "repeat": what.repeat,
        "predictors": list(options.predictor) or "shipped",
        "analysis": what.analysis,
    }
    peers, missing = _peers(peer_names, base, options, params)
    runner = Runner(
        base,
        names,
        params,
        predictors=predictors,
        scope=what.scope,
        repeat=what.repeat,
        peers=peers,
        analyse=what.analysis,
    )
    took_part = {"methods": {peer.name: peer.how for peer in peers}, "missing": missing}
    file = BenchFile(
        what.out, _model(base.target.spec, options, head), settings, data, peers=took_part, resume=what.resume
    )
    whole = False
    try:
        _run(runner, prompts, file)
        whole = True
    finally:
        if file.records:
            file.write()
            if what.html is not None:
                write_report([file.content()], what.html)
        _report(file)
        if not whole:
            _say_partial(file, prompts, what.out)
    if not file.records:
        raise RequestError("nothing was measured: no prompt could be run")
    if not all(record["identical"] for record in file.records if record["peer"] is None):
        raise click.exceptions.Exit(1)


def _say_partial(file: BenchFile, prompts: Sequence[Prompt], out: Path | None) -> None:
    from hvd.traces.conversation import turn_ids

    done = sum(file.done(turn_ids(prompt)) for prompt in prompts)
    more = "" if out is None or not file.records else f"; the same command with --resume goes on with {out}"
    note(f"PARTIAL: {done} of {len(prompts)} conversations were measured{more}")


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _policies(given: str) -> list[str]:
    names = _names(given)
    if not names:
        raise ConfigError("--policies names no policy; try plain,cache,match-len,hvd")
    return list(dict.fromkeys(each for name in names for each in (EVERY_POLICY if name == ALL else [name])))


def _prompts(what: BenchOptions) -> tuple[list[Prompt], dict[str, Any]]:
    """All conversations to measure, and the `data` of the file."""
    from hvd.bench.hub import Hub
    from hvd.bench.sets import Found, describe, local_sets, paper_sets

    found = Found([], [])
    if what.suite == "local":
        assert what.data_dir is not None
        found = local_sets(what.data_dir, _names(what.sets), what.split, what.limit, note)
    elif what.suite == "paper":
        found = paper_sets(Hub(), _names(what.sets), what.split, what.limit, note, what.data_dir)
    if found.missing:
        note(f"{_counted(len(found.missing), 'set')} could not be had: {describe(found.missing)}")
    prompts = [replace(prompt, turns=prompt.turns[: what.turns]) for prompt in found.prompts]
    if what.data:
        prompts += read_conversations(what.data, what.split, what.limit, what.turns)
    if not prompts:
        raise ConfigError("no prompts" + (f" with split {what.split!r}" if what.split else ""))
    data = {
        "files": [Path(name).name for name in what.data],
        "suite": what.suite,
        "sets": found.sets,
        "missing": [asdict(one) for one in found.missing],
        "split": what.split,
        "limit": what.limit,
    }
    return prompts, data


def _peers(
    names: Sequence[str], base: LLM, options: ModelOptions, params: SamplingParams
) -> tuple[list[PeerMethod], dict[str, str]]:
    """Peers that can take part; those that can't are named."""
    from hvd.bench.peers import PeerSetup, open_peers
    from hvd.models.shipped import choose_head
    from hvd.types import Arm

    spec = base.target.spec
    head = choose_head(options.eagle3, spec.fingerprint) if Arm.EAGLE3 in base.drafters else None
    stop = () if params.ignore_eos or base.tokenizer is None else tuple(base.tokenizer.eos_token_ids)
    setup = PeerSetup(
        options.model,
        options.threads,
        stop,
        spec.context_limit,
        eagle3=None if head is None else str(head),
        device=options.device if spec.backend == "torch" else "cpu",
    )
    peers, missing = open_peers(names, setup)
    for name, why in missing.items():
        note(f"MISSING PEER: {name}: {why}")
    return peers, missing


def _model(spec: TargetSpec, options: ModelOptions, head: bool) -> dict[str, object]:
    return {
        "name": spec.name,
        "fingerprint": spec.fingerprint,
        "family": spec.family,
        "backend": spec.backend,
        "weights": spec.weights,
        "eagle3": options.eagle3 if head else None,
        "threads": options.threads,
    }


def _run(runner: Runner, prompts: Sequence[Prompt], file: BenchFile) -> None:
    from hvd.traces.conversation import turn_ids

    todo = [prompt for prompt in prompts if not file.done(turn_ids(prompt))]
    total, done = sum(len(prompt.turns) for prompt in todo), 0
    if len(todo) < len(prompts):
        note(f"resuming: {len(prompts) - len(todo)} of {len(prompts)} conversations are there already")
    if todo:
        note(f"{_counted(total, 'prompt')} x {len(runner.policies)} policies: {', '.join(runner.policies)}")
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
    """The tables on stdout, what else there is to say on stderr."""
    from hvd.bench.matrix import matrix
    from hvd.bench.report import summarize
    from hvd.cli.bench_tables import NARROW, by_group, overview

    summary, console = summarize(file.records), stdout_console()
    if summary["rows"]:
        fastest = matrix([{"model": {"name": ""}, "records": file.records}])["fastest"]
        console.print(overview(summary, fastest, console.width))
        more = ", tokens a pass in brackets" if console.width >= NARROW else ""
        for loops, title in ((True, f"by set{more}"), (False, f"by set, without prompts that loop{more}")):
            if loops or summary["looped"]:
                rows = [row for row in summary["rows"] if row["loops"] is loops]
                for table in by_group(rows, title, console.width):
                    console.print(table)
    _notes(file, summary)
    if file.records:
        console.print(
            f"output identical: {'yes' if summary['identical'] else 'NO'} ({_counted(summary['prompts'], 'prompt')})"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _notes(file: BenchFile, summary: Mapping[str, Any]) -> None:
    """What was left out or differs."""
    from hvd.bench.report import FEW_PROMPTS

    if 0 < summary["prompts"] < FEW_PROMPTS:
        note(f"only {_counted(summary['prompts'], 'prompt')}: too few to conclude anything from")
    if file.skipped:
        note(f"{len(file.skipped)} prompts were skipped, the first: {file.skipped[0]['id']}: {file.skipped[0]['why']}")
    if file.failed:
        first = file.failed[0]
        note(f"peers failed {len(file.failed)} times, the first: {first['method']} on {first['id']}: {first['why']}")
    for entry in summary["different"]:
        note(f"DIFFERENT OUTPUT: {entry['id']} under {entry['policy']}, from token {entry['differs_at']} on")
    for name, found in summary["agreement"].items():
        share = found["tokens_before_difference"]
        note(
            f"{name}: {found['identical']} of {found['prompts']} texts are ours; {share:.0%} of tokens before they part"
        )
    noise = summary["noise"]
    if noise is not None:
        low, high = noise["lowest_set"], noise["highest_set"]
        note(f"noise: plain again is {noise['micro']:.3f} of plain (sets {low:.2f} - {high:.2f})")
