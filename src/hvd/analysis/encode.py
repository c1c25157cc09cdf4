"""Recorded answers as traces in the tokens of a tokenizer, with the part of the prompt that each token belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hvd.errors import RequestError
from hvd.tokenizer import Tokenizer
from hvd.traces.importers import RECORDED, encode_turn
from hvd.traces.logs_record import MARKER, Recorded, group_of_prompt, marked_role
from hvd.traces.prompts import Message
from hvd.traces.schema import Trace
from hvd.types import FinishReason, Int32Array

_PROBED = 50
"""Answers that have both text and token ids, looked at to see whether the ids are this tokenizer's."""


class Part(IntEnum):
    """Part of a prompt. PROMPT: of a prompt whose parts are not known; TEMPLATE: between the messages."""

    TEMPLATE = 0
    SYSTEM = 1
    USER = 2
    TOOL = 3
    ASSISTANT = 4
    PROMPT = 5


_PART_OF_ROLE = {"system": Part.SYSTEM, "user": Part.USER, "tool": Part.TOOL, "assistant": Part.ASSISTANT}


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """An answer ready for replay.

    source   see `Recorded`; a trace's id. `trace.group` is its group
    parts    uint8 [p], the `Part` of each prompt token
    text     the answer's beginning, for those who ask to see it; "" when it is known as tokens only
    """

    trace: Trace
    source: str
    parts: NDArray[np.uint8]
    text: str = ""


class Encoder:
    """Turns recorded answers into `Asked`.

    refused     conversations that the chat template refused (or there was none): their messages are joined plainly
    foreign     traces left out because another tokenizer wrote them
    unreadable  answers left out because their text can't be encoded
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """`tokenizer` may be missing when there are only traces."""
        self.tokenizer = tokenizer
        self._classes = tokenizer.token_classes() if tokenizer is not None else np.zeros(0, np.uint8)
        self._lengths = _byte_lengths(tokenizer) if tokenizer is not None else None
        self._trusted = False
        self.refused = self.foreign = self.unreadable = 0

    def all(self, answers: Sequence[Recorded | Trace]) -> Iterator[Asked]:
        """All that can be replayed, in order."""
        self._trusted = self._ids_fit(a for a in answers if isinstance(a, Recorded))
        for answer in answers:
            asked = self._of_trace(answer) if isinstance(answer, Trace) else self._of_recorded(answer)
            if asked is not None and len(asked.trace.prompt) and len(asked.trace.response):
                yield asked

    def _ids_fit(self, answers: Iterable[Recorded]) -> bool:
        """Whether logged ids mean to this tokenizer what the log's text says. (Tool calls are logged otherwise.)"""
        both = [a for a in answers if a.answer and a.answer_ids is not None and len(a.answer_ids)][:_PROBED]
        fitting = [a for a in both if self._decoded(a.answer_ids).strip() == (a.answer or "").strip()]
        return len(fitting) > len(both) // 4

    def _decoded(self, ids: Int32Array | None, special: bool = False) -> str:
        if self.tokenizer is None or ids is None:
            return ""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=not special)

    # -- text -----------------------------------------------------------------------------------------------------

    def _of_recorded(self, answer: Recorded) -> Asked | None:
        assert self.tokenizer is not None
        try:
            if answer.messages is not None:
                before, response, parts = self._conversation(answer.messages, answer.answer or "")
            else:
                before, response, parts = self._finished_prompt(answer)
        except RequestError:
            self.unreadable += 1
            return None
        trace = Trace(
            id=f"{self._group(answer)}#{answer.source}",
            prompt=before,
            response=self._without_end(response) if answer.cut else response,
            token_classes=self._classes,
            finish_reason=FinishReason.LENGTH if answer.cut else FinishReason.STOP,
            model=RECORDED,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            dataset=answer.dataset,
        )
        return Asked(trace, answer.source, parts, (answer.answer or "")[:80])

    def _conversation(
        self, messages: Sequence[Message], answer: str
    ) -> tuple[Int32Array, Int32Array, NDArray[np.uint8]]:
        assert self.tokenizer is not None
        try:
            before, response = encode_turn(self.tokenizer, messages, answer)
            text = self.tokenizer.apply_chat_template(messages)
        except RequestError:
            self.refused += 1
            text = "".join(f"{m['role']}:\n{m['content']}\n\n" for m in messages) + "assistant:\n"
            before, response = self._encoded(text).tolist(), self._ended(answer)
        ids = np.array(before, np.int32)
        return ids, np.array(response, np.int32), self._parts(ids, text, _message_spans(text, messages))

    def _finished_prompt(self, answer: Recorded) -> tuple[Int32Array, Int32Array, NDArray[np.uint8]]:
        ids = answer.prompt_ids if self._trusted or answer.prompt is None else None
        text = answer.prompt if answer.prompt is not None else self._decoded(ids, special=True)
        before = ids if ids is not None else self._encoded(text)
        if answer.answer_ids is not None and len(answer.answer_ids) and (self._trusted or answer.answer is None):
            response = answer.answer_ids
        else:
            response = np.array(self._ended(answer.answer or ""), np.int32)
        return before, response, self._parts(before, text, _marked_spans(text))

    def _without_end(self, response: Int32Array) -> Int32Array:
        """A response that was cut off never came to its end token."""
        assert self.tokenizer is not None
        return response[:-1] if len(response) and response[-1] in self.tokenizer.eos_token_ids else response

    def _group(self, answer: Recorded) -> str:
        """The conversation; of a prompt that the log has as token ids only, known by its text as other prompts are."""
        if answer.messages is None and answer.prompt is None:
            return group_of_prompt(self._decoded(answer.prompt_ids, special=True))
        return answer.group

    def _encoded(self, text: str) -> Int32Array:
        assert self.tokenizer is not None
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def _ended(self, answer: str) -> list[int]:
        assert self.tokenizer is not None
        return [*self.tokenizer.encode(answer, add_special_tokens=False), *self.tokenizer.eos_token_ids[:1]]

    def _parts(self, ids: Int32Array, text: str, spans: Sequence[tuple[int, int, Part]]) -> NDArray[np.uint8]:
        """The part of each token, by the bytes that tokens stand for. Without known spans all is PROMPT."""
        if not spans or self._lengths is None:
            return np.full(len(ids), Part.PROMPT, np.uint8)
        parts = np.full(len(ids), Part.TEMPLATE, np.uint8)
        ends = np.cumsum(self._lengths.take(ids, mode="clip"))
        byte = position = 0
        for start, stop, part in spans:
            begin = byte + _bytes(text[position:start])
            byte, position = begin + _bytes(text[start:stop]), stop
            first, last = np.searchsorted(ends, (begin, byte), side="right")
            parts[first : max(last, first)] = part
        return parts

    # -- traces ---------------------------------------------------------------------------------------------------

    def _of_trace(self, trace: Trace) -> Asked | None:
        known = self.tokenizer is not None
        if self.tokenizer is not None and trace.tokenizer_fingerprint != self.tokenizer.fingerprint:
            self.foreign += 1
            return None
        text = self._decoded(trace.prompt, special=True) if known else ""
        parts = self._parts(trace.prompt, text, _marked_spans(text))
        return Asked(trace, trace.id, parts, self._decoded(trace.response[:30]))


def _message_spans(text: str, messages: Sequence[Message]) -> list[tuple[int, int, Part]]:
    """Where the messages' contents lie in the prompt made of them; what the template changed is left out."""
    spans, position = [], 0
    for message in messages:
        content = message["content"].strip()
        start = text.find(content, position) if content else -1
        if start >= 0:
            position = start + len(content)
            spans.append((start, position, _PART_OF_ROLE[message["role"]]))
    return spans


def _marked_spans(text: str) -> list[tuple[int, int, Part]]:
    """The parts of a finished prompt by its markers."""
    marks = list(MARKER.finditer(text))
    ends = [*(mark.start() for mark in marks), len(text)][1:]
    spans = [(m.end(), end, _PART_OF_ROLE.get(marked_role(m))) for m, end in zip(marks, ends, strict=True)]
    return [(start, end, part) for start, end, part in spans if part is not None]


def _byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Bytes that each token adds to a text, special ones by their spelling, int64 [vocab_size + 1]."""
    spelled = (tokenizer.token(id_, False) or "" for id_ in range(tokenizer.vocab_size))
    lengths = [len(tokenizer.bytes_of(token)) for token in spelled]
    return np.array([*lengths, 0], np.int64)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
