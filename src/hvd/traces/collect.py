"""Runs a model over prompt files and yields what it did as traces, several conversations side by side."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from hvd.config import SamplingParams
from hvd.engine.llm import LLM, Completion, Stream
from hvd.errors import RequestError
from hvd.traces.conversation import Conversation, turn_ids
from hvd.traces.prompts import Message, Prompt
from hvd.traces.schema import Trace


@dataclass(slots=True)
class _Running:
    """A conversation whose next answer is being decoded."""

    conversation: Conversation
    turns: Iterator[tuple[str, list[Message]]]
    id: str = ""
    stream: Stream | None = None


def collect_traces(
    llm: LLM,
    prompts: Iterable[Prompt],
    params: SamplingParams,
    *,
    known: Collection[str] = (),
    max_context: int | None = None,
    batch: int | None = None,
    warn: Callable[[str], None],
    on_turns: Callable[[int], None] = lambda count: None,
) -> Iterator[Trace]:
    """One trace for each turn, as they end: in the order of the prompts when `batch` is 1.

    known         ids of turns that are not wanted again. Those of an unfinished conversation run all the same, for
                  the history, but are not yielded
    max_context   turns whose prompt and longest answer together have more tokens are left out, and what follows them
    batch         conversations decoded side by side; None = as many as the engine takes
    warn          called with one line for each turn that can't run; its conversation ends there
    on_turns      called with how many turns are done with, whether yielded or not

    A seed in `params` holds for every turn, so a turn's text doesn't depend on what else runs.
    """
    width = batch or llm.config.max_batch
    waiting = iter(prompts)
    running: deque[_Running] = deque()
    try:
        while True:
            while len(running) < width and (prompt := next(waiting, None)) is not None:
                if all(id_ in known for id_ in turn_ids(prompt)):
                    on_turns(len(prompt.turns))
                    continue
                conversation = Conversation(prompt)
                one = _Running(conversation, iter(conversation))
                if _ask(llm, one, params, max_context, warn, on_turns):
                    running.append(one)
            if not running:
                return
            llm.step()
            for one in [one for one in running if one.stream is not None and one.stream.request.done]:
                assert one.stream is not None
                completion = one.stream.completion()
                one.conversation.answered(completion.text)
                on_turns(1)
                if one.id not in known:
                    yield as_trace(llm, one.conversation.prompt, one.id, completion, params)
                if not _ask(llm, one, params, max_context, warn, on_turns):
                    running.remove(one)
    finally:
        for one in running:
            if one.stream is not None:
                one.stream.cancel()


def _ask(
    llm: LLM,
    one: _Running,
    params: SamplingParams,
    max_context: int | None,
    warn: Callable[[str], None],
    on_turns: Callable[[int], None],
) -> bool:
    """Start the conversation's next turn. False when there is none, or when it can't run."""
    one.stream = None
    turn = next(one.turns, None)
    if turn is None:
        return False
    one.id, messages = turn
    try:
        ids = llm.chat_prompt(messages)
        if max_context is not None and len(ids) + (params.max_tokens or 0) > max_context:
            raise RequestError(f"{len(ids)} prompt tokens and the answer do not fit into {max_context}")
        one.stream = llm.stream(ids, params)
    except RequestError as error:
        warn(f"{one.id}: {error}; skipped")
        left = turn_ids(one.conversation.prompt)
        on_turns(len(left) - left.index(one.id))
        return False
    return True


def as_trace(llm: LLM, prompt: Prompt, id_: str, completion: Completion, params: SamplingParams) -> Trace:
    """The trace of one answer."""
    spec = llm.target.spec
    return Trace(
        id=id_,
        prompt=np.asarray(completion.prompt_token_ids, np.int32),
        response=np.asarray(completion.token_ids, np.int32),
        token_classes=np.zeros(0, np.uint8),  # the writer keeps them once a file
        finish_reason=completion.finish_reason,
        model=spec.name,
        model_fingerprint=spec.fingerprint,
        tokenizer_fingerprint=llm.tokenizer.fingerprint if llm.tokenizer is not None else "",
        dataset=prompt.dataset,
        category=prompt.category,
        split=prompt.split,
        sampling=json.dumps(asdict(params)),
        policy=completion.policy,
        created=time.time(),
        steps=tuple(completion.records),
    )
