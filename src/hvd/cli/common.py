"""Options that several commands share, and what becomes of them: a model, sampling parameters."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hvd.cli.console import Progress, note, progress_bar
from hvd.config import EngineConfig, SamplingParams
from hvd.errors import ConfigError

if TYPE_CHECKING:
    from hvd.engine.llm import LLM
    from hvd.payoff.predictor import Predictor
    from hvd.traces.prompts import Prompt

SEED = click.IntRange(0, 2**31 - 1)
"""Seeds of samples and of training, as an option's type."""

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how it runs. The fields are the options' names."""

    model: str
    backend: str = "auto"
    weights: str = "auto"
    device: str = "auto"
    threads: int | None = None
    eagle3: str = "auto"
    predictor: tuple[str, ...] = ()
    cost: str | None = None

    def open(self, config: EngineConfig | None = None) -> LLM:
        """Load the model (and convert it the first time), with progress on stderr."""
        from hvd.engine.llm import LLM

        with progress_bar() as progress:
            return LLM(
                self.model,
                backend=self.backend,
                weights=self.weights,
                device=self.device,
                threads=self.threads,
                eagle3=self.eagle3,
                predictor=self.predictor,
                cost=self.cost,
                config=config,
                progress=_announced(progress),
            )


_CONVERTING = "converting the model, once; later starts find it converted"
_MEASURING = "measuring what the model's passes cost here, once; later starts find the costs"


def _announced(progress: Progress) -> Progress:
    """The same progress; where no bar can be seen, a line says what takes so long."""
    from hvd.models.loader import COMPILING

    silent = not sys.stderr.isatty()

    def call(what: str, done: int, total: int) -> None:
        nonlocal silent
        if what == COMPILING and not sys.stderr.isatty():
            note(what)
        elif silent:
            note(_MEASURING if what == "profile" else _CONVERTING)
            silent = False
        progress(what, done, total)

    return call


_MODEL = (
    click.option("--model", "-m", required=True, help="Hugging Face directory, hub id or GGUF file."),
    click.option("--backend", default="auto", help="auto, onnx or torch."),
    click.option("--weights", default="auto", help="auto, int4, int8 or fp32; with torch a dtype such as bfloat16."),
    click.option(
        "--device", default="auto", help="auto, cpu or cuda; auto: for torch a GPU where there is one, else cpu."
    ),
    click.option("--threads", type=click.IntRange(1), help="CPU threads (all cores when not given)."),
    click.option(
        "--eagle3",
        default="auto",
        help="EAGLE3 head: directory or hub id; auto: the one that ships for this model, if any; none: without.",
    ),
    click.option(
        "--predictor",
        multiple=True,
        help="Predictor made by 'hvd train predictor', one of each kind (default: the package's own; none: without).",
    ),
    click.option("--cost", help="Cost file made by 'hvd profile' (this machine's own when not given)."),
)

_SAMPLING = (
    click.option("--max-tokens", type=int, default=256, help="Most tokens to generate."),
    click.option("--temperature", type=float, default=0.0, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, default=1.0, help="Keep the likeliest tokens up to this probability."),
    click.option("--min-p", type=float, default=0.0, help="Drop tokens less likely than this times the likeliest."),
    click.option("--seed", type=int, help="The same seed gives the same text, whatever the policy."),
    click.option("--repetition-penalty", type=float, default=1.0, help="Above 1 weakens tokens of prompt and output."),
    click.option("--presence-penalty", type=float, default=0.0, help="Taken once from each token of the output."),
    click.option("--frequency-penalty", type=float, default=0.0, help="Taken for each occurrence in the output."),
    click.option("--min-tokens", type=int, default=0, help="No stop before so many tokens."),
    click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times."),
    click.option("--stop-token-ids", type=int, multiple=True, help="Token id that ends the answer; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token."),
)

_SAMPLING_FIELDS = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip


def model_options(command: Command) -> Command:
    """Give a command the model's options; they arrive as one argument, `options: ModelOptions`."""
    names = tuple(field.name for field in fields(ModelOptions))
    return _gathered(command, _MODEL, names, "options", lambda taken: ModelOptions(**taken))


def sampling_options(command: Command) -> Command:
    """Give a command the sampling options; they arrive as one argument, `params: SamplingParams`, already checked."""
    return _gathered(command, _SAMPLING, _SAMPLING_FIELDS, "params", lambda taken: SamplingParams(**taken))


def _gathered(
    command: Command,
    options: Sequence[Callable[[Any], Any]],
    names: Sequence[str],
    argument: str,
    make: Callable[[dict[str, Any]], object],
) -> Command:
    @functools.wraps(command)
    def gathered(**given: Any) -> Any:
        taken = {name: given.pop(name) for name in names}
        return command(**{argument: make(taken)}, **given)

    for option in reversed(options):
        option(gathered)
    return gathered  # type: ignore[return-value]


def check_policies(names: Sequence[str], predictors: Sequence[str]) -> list[Predictor]:
    """Read the predictor files and refuse what can't work, before a model is loaded.

    Raises ConfigError for an unknown policy, or one that needs a predictor and has none; PredictorError for a file that
    can't be read.
    """
    from hvd.payoff.policy import make_policy, policy_class
    from hvd.payoff.shipped import gather_predictors

    by_kind = gather_predictors(predictors)
    for name in names:
        kind = policy_class(name.partition(":")[0]).predictor_kind
        make_policy(name, predictor=by_kind.get(kind) if kind else None)
    return list(by_kind.values())


def read_conversations(files: Sequence[str], split: str | None, limit: int | None, turns: int | None) -> list[Prompt]:
    """All conversations of prompt files, before a model is loaded: a bad path is told at once.

    Raises ConfigError when a file can't be read, or when nothing is left of them.
    """
    from hvd.traces.prompts import read_prompts

    found = [replace(p, turns=p.turns[:turns]) for p in read_prompts(files, split=split, limit=limit, warn=note)]
    if not found:
        raise ConfigError(f"no prompts in {', '.join(files)}" + (f" with split {split!r}" if split else ""))
    return found
