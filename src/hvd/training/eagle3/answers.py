"""The answers that a head is trained on: made by the target, kept as traces, never made twice, never mixed up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hvd.config import SamplingParams
from hvd.engine.llm import LLM
from hvd.errors import ConfigError
from hvd.tokenizer import Tokenizer
from hvd.traces.collect import collect_traces
from hvd.traces.importers import recorded_traces
from hvd.traces.prompts import Prompt
from hvd.traces.reader import read_traces
from hvd.traces.schema import Trace
from hvd.traces.writer import TraceWriter

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""
Note = Callable[[str], None]
"""Called with one line that the user should see."""


def target_answers(
    llm: LLM,
    prompts: Sequence[Prompt],
    folder: Path,
    params: SamplingParams,
    length: int,
    progress: Progress,
    note: Note,
) -> list[Trace]:
    """The target's answers to all prompts; those that `folder` holds are not made again.

    length   most tokens of prompt and answer together; longer conversations end there

    Answers lie in a directory of their own for every target, number format and set of sampling parameters, and an id
    says which content of the prompt it answers: whatever changes, nothing stale is taken.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model has no tokenizer")
    spec = llm.target.spec
    made_by = json.dumps([spec.fingerprint, spec.weights, asdict(params)], sort_keys=True)
    folder = folder / f"temperature-{params.temperature:g}-{_digest(made_by)}"
    marked = [_marked(prompt) for prompt in prompts]
    kept = _kept(folder)
    total = sum(len(prompt.turns) for prompt in marked)
    done = tokens = 0

    def on_turns(count: int) -> None:
        nonlocal done
        done += count
        progress(f"answers at temperature {params.temperature:g} ({tokens} new tokens)", done, total)

    with TraceWriter(folder, llm.tokenizer.token_classes()) as writer:
        for trace in collect_traces(llm, marked, params, known=kept, max_context=length, warn=note, on_turns=on_turns):
            writer.add(trace)
            kept[trace.id] = trace
            tokens += len(trace.response)
    return _of(kept, marked)


def recorded_answers(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], folder: Path, length: int, progress: Progress, note: Note
) -> list[Trace]:
    """The recorded answers of the prompt files, as traces; see `target_answers`."""
    folder = folder / f"recorded-{_digest(tokenizer.fingerprint)}"
    marked = [_marked(prompt) for prompt in prompts]
    kept = _kept(folder)
    with TraceWriter(folder, tokenizer.token_classes()) as writer:
        for done, prompt in enumerate(marked, start=1):
            for trace in recorded_traces([prompt], tokenizer, max_context=length, warn=note):
                if trace.id not in kept:
                    writer.add(trace)
                    kept[trace.id] = trace
            progress("recorded answers", done, len(marked))
    return _of(kept, marked)


def _marked(prompt: Prompt) -> Prompt:
    """The prompt, its content in its id, behind the group that the part in front of the first '#' names."""
    return replace(prompt, id=f"{prompt.id}#{_digest(repr(prompt.turns))}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


def _kept(folder: Path) -> dict[str, Trace]:
    """The traces of a directory by id, one each."""
    if not folder.is_dir() or not any(folder.glob("*.parquet")):
        return {}
    return {trace.id: trace for trace in read_traces(folder)}


def _of(kept: dict[str, Trace], prompts: Sequence[Prompt]) -> list[Trace]:
    """Those that answer these prompts."""
    wanted = {prompt.id for prompt in prompts}
    return [trace for trace in kept.values() if _without_turn(trace.id) in wanted]


def _without_turn(id_: str) -> str:
    head, _, tail = id_.rpartition("#")
    return head if tail.startswith("turn") else id_


def given_traces(paths: Sequence[Path]) -> Iterator[Trace]:
    """Traces that were made elsewhere, in order; of those with the same id and parameters the first."""
    seen: set[tuple[str, str]] = set()
    for trace in read_traces(paths) if paths else ():
        if (trace.id, trace.sampling) not in seen:
            seen.add((trace.id, trace.sampling))
            yield trace
