"""`hvd explain`: why each draft of one request was chosen, and what came of it."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

import click

from hvd.cli.common import ModelOptions, check_policies, model_options, sampling_options
from hvd.cli.console import NARROW, emit_json, note, progress_bar, stdout_console
from hvd.cli.prompt import encode_prompt, prompt_options, read_prompt
from hvd.cli.replay import simulated_head
from hvd.config import EngineConfig, SamplingParams
from hvd.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from hvd.report.explain import ExplainedRequest
    from hvd.tokenizer import Tokenizer

_TITLE = 110
"""Characters of the prompt that become the page's title."""


@click.command()
@prompt_options
@click.option("--policy", default="hvd", help="Whose decisions to explain.")
@click.option("--trace", "traces", metavar="PATH", help="Replay a recorded request instead: trace file or directory.")
@click.option("--id", "wanted", metavar="ID", help="Which request of --trace (default: the first).")
@click.option(
    "--shared", is_flag=True, help="With --trace: earlier requests of its data set serve it, as in a session."
)
@click.option("--head", metavar="P[,LENGTH]", help="With --trace: simulate an EAGLE3 chain (see 'hvd replay').")
@click.option("--cycle", "number", type=click.IntRange(1), metavar="N", help="Show one cycle in full.")
@click.option("--html", metavar="OUT", type=click.Path(path_type=Path), help="Write a page to look at and to share.")
@click.option("--overwrite", is_flag=True, help="Replace what --html OUT holds already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@sampling_options
@model_options
def explain(
    prompt: str | None,
    file: str | None,
    chat: bool | None,
    policy: str,
    traces: str | None,
    wanted: str | None,
    shared: bool,
    head: str | None,
    number: int | None,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
    params: SamplingParams,
    options: ModelOptions,
) -> None:
    """Show why each draft was chosen: its match, its predicted survival, its cost, and what came of it.

    Decodes a prompt and watches, or replays a recorded request without a model (then --model gives the tokenizer
    alone, and --cost is needed). The page colours each token by the arm that drafted it; every cycle can be opened.

    \b
    Examples:
      hvd explain "Repeat this list twice: ..." --model MODEL
      hvd explain --file prompt.txt --model MODEL --html why.html
      hvd explain --trace traces/ --id webshop/12 --model MODEL --cost cost.json --cycle 3
    """
    if html is not None and html.exists() and not overwrite:
        raise ConfigError(f"{html} exists already; --overwrite replaces it")
    if traces is None:
        if wanted is not None or shared or head is not None:
            raise ConfigError("--id, --shared and --head belong to --trace; leave them out, or name a trace")
        request, title = _live(prompt, file, chat, policy, params, options)
    else:
        if prompt is not None or file is not None:
            raise ConfigError("give a prompt or --trace, not both")
        request, title = _replayed(traces, wanted, policy, shared, head, options), ""
    if number is not None and number > len(request.cycles):
        raise ConfigError(f"--cycle {number}: the request has {len(request.cycles)} cycles")
    _show(request, number, html, title, as_json)


def _live(
    prompt: str | None,
    file: str | None,
    chat: bool | None,
    policy: str,
    params: SamplingParams,
    options: ModelOptions,
) -> tuple[ExplainedRequest, str]:
    from hvd.report.explain import explain_live

    text = read_prompt(prompt, file)
    if not options.model:
        raise ConfigError("a prompt needs --model; or give --trace to replay a recorded request")
    check_policies([policy], options.predictor)
    llm = options.open(EngineConfig(policy=policy))
    ids = encode_prompt(llm, text, chat)
    with progress_bar() as progress:
        most = params.max_tokens
        request = explain_live(llm, ids, params, policy, lambda done: progress("decoding", done, most or done))
    return request, shorten(text.strip().splitlines()[0], _TITLE, placeholder=" \u2026")


def _replayed(
    traces: str, wanted: str | None, policy: str, shared: bool, head: str | None, options: ModelOptions
) -> ExplainedRequest:
    from hvd.analysis.costs import EXAMPLES, load_cost
    from hvd.report.explain import explain_walk
    from hvd.traces.reader import read_traces, trace_files
    from hvd.training.replay import cycles, walks
    from hvd.training.simulate import policy_with

    predictors = check_policies([policy], options.predictor)
    trace_files(traces)
    if options.cost is None:
        raise ConfigError(f"--trace needs --cost: a file made by 'hvd profile', or one of {', '.join(EXAMPLES)}")
    cost, simulated = load_cost(options.cost)[0], simulated_head(head)
    player = policy_with(policy, predictors)
    found = (trace for trace in read_traces(traces, warn=note) if shared or wanted is None or trace.id == wanted)
    for walk in walks(found, shared=shared):
        if wanted is None or walk.trace.id == wanted:
            tokenizer = _tokenizer(options, walk.trace.tokenizer_fingerprint)
            return explain_walk(walk, player, cost, simulated, tokenizer, policy)
        for _ in cycles(walk, player, cost, simulated):
            pass  # the policy learns from it
    raise TraceError(
        f"no request with a prompt and a response in {traces}" + (f" has the id {wanted!r}" if wanted else "")
    )


def _tokenizer(options: ModelOptions, fingerprint: str) -> Tokenizer | None:
    """The model's tokenizer, without its weights; None (texts are ids) without a model."""
    if not options.model:
        note("no --model: tokens are shown as ids")
        return None
    from hvd.models.checkpoint import load_checkpoint

    tokenizer = load_checkpoint(options.model).tokenizer()
    if tokenizer.fingerprint != fingerprint:
        raise ConfigError(f"{options.model} has another tokenizer than the trace; give the model that wrote it")
    return tokenizer


def _show(request: ExplainedRequest, number: int | None, html: Path | None, title: str, as_json: bool) -> None:
    from hvd.report.explain import request_json
    from hvd.report.explain_page import explain_page
    from hvd.report.explain_text import ExplainView
    from hvd.report.page import write_page

    if html is not None:
        write_page(html, explain_page(request, title))
        note(f"wrote {html}")
    if as_json:
        emit_json(request_json(request))
    elif number is not None:
        ExplainView(stdout_console(NARROW)).cycle(request, number)
    elif html is None:
        ExplainView(stdout_console(NARROW)).overview(request)


for _option in explain.params:
    if isinstance(_option, click.Option) and _option.name == "cost":
        _option.help = (
            "Cost file made by 'hvd profile' (this machine's own when not given); --trace needs one, or an example: "
            "cpu-small, cpu-0.5b, gpu-8b or gpu-70b."
        )
    elif _option.name == "model":  # a replayed request has no use for a model but its tokenizer
        _option.required = False
