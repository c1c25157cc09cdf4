"""Recorded conversations as traces: text written by other models or people, in the tokens of a given tokenizer.

No model is needed. The traces hold no step records; replay makes do without.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hvd.errors import RequestError
from hvd.tokenizer import Tokenizer
from hvd.traces.prompts import Message, Prompt
from hvd.traces.schema import Trace

log = logging.getLogger(__name__)

RECORDED = "recorded"
"""`Trace.model` of what no target of ours has written."""


def recorded_traces(
    prompts: Iterable[Prompt],
    tokenizer: Tokenizer,
    *,
    max_context: int | None = None,
    warn: Callable[[str], None] = log.warning,
) -> Iterator[Trace]:
    """One trace for each recorded answer: the prompt is the conversation before it, in the model's chat template.

    max_context   turns with more tokens in all are left out, as the target could not have written them

    The id is the prompt's with "#turn0", "#turn1", .. behind it, so a conversation stays one group. A conversation that
    the chat template refuses is left out from there on; `warn` gets one line that names it.
    """
    classes = tokenizer.token_classes()
    for prompt in prompts:
        try:
            yield from _turns(prompt, tokenizer, classes, max_context)
        except RequestError as error:
            warn(f"{prompt.id}: {error}; skipped")


def _turns(
    prompt: Prompt, tokenizer: Tokenizer, classes: NDArray[np.uint8], max_context: int | None
) -> Iterator[Trace]:
    history: list[Message] = []
    for number, turn in enumerate(prompt.turns):
        history += turn.messages
        if turn.recorded is None:  # an open turn: nobody has answered it, nor what follows
            return
        before, response = encode_turn(tokenizer, history, turn.recorded)
        if max_context is None or len(before) + len(response) <= max_context:
            yield Trace(
                id=f"{prompt.id}#turn{number}",
                prompt=np.array(before, np.int32),
                response=np.array(response, np.int32),
                token_classes=classes,
                model=RECORDED,
                tokenizer_fingerprint=tokenizer.fingerprint,
                dataset=prompt.dataset,
                category=prompt.category,
                split=prompt.split,
                sampling=json.dumps({"max_tokens": None}),
                created=time.time(),
            )
        history.append({"role": "assistant", "content": turn.recorded})


def encode_turn(tokenizer: Tokenizer, messages: Sequence[Message], answer: str) -> tuple[list[int], list[int]]:
    """Token ids of the conversation up to where the answer begins, and of the answer with its end-of-sequence token.

    The two are encoded apart, as a model writes its answer behind a prompt that is already tokens. Raises RequestError
    when the chat template refuses the messages.
    """
    before = tokenizer.apply_chat_template(messages)
    whole = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": answer}], add_generation_prompt=False
    )
    # Some templates write a finished turn in another way than the beginning of one; the bare answer has to do then.
    text = whole[len(before) :] if whole.startswith(before) else answer
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = set(tokenizer.eos_token_ids)
    stop = next((i for i, token in enumerate(ids) if token in ends), None)
    response = ids[: stop + 1] if stop is not None else [*ids, *tokenizer.eos_token_ids[:1]]
    return tokenizer.encode(before, add_special_tokens=False), response
