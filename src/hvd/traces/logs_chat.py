"""Answers in JSON records: conversations, requests with their responses, prompts with completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hvd.traces.logs_record import ROLE_NAMES, Recorded, digest, group_of, group_of_prompt, plain_message, text_of
from hvd.traces.prompts import Message

MESSAGE_KEYS = ("messages", "conversations", "conversation", "trajectory")
REQUEST_KEYS = ("request", "input", "body", "kwargs", "params")
RESPONSE_KEYS = ("response", "choices", "completion", "output", "answer", "generated_text")
_CONVERSATION_IDS = ("conversation_id", "session_id", "thread_id", "trace_id")

CHAT, REQUESTS, COMPLETIONS = "chat", "requests", "completions"
FORMS = {
    CHAT: "conversations: {messages: [...]}, or conversations with from and value; one answer an assistant message",
    REQUESTS: "requests with messages and their response; one answer a response",
    COMPLETIONS: "finished prompts with their completion; one answer a line",
}


class NoAnswerError(ValueError):
    """A record that is sound and holds no recorded answer."""


def form_of(record: Mapping[str, Any]) -> str | None:
    """Which of `FORMS` a record has; None = none of them."""
    answered = any(record.get(key) is not None for key in RESPONSE_KEYS)
    if _ends_with_assistant(record):
        return CHAT
    asked = _request_of(record)
    if isinstance(asked, str):
        return COMPLETIONS
    if asked is not None and (answered or not _has_messages(record)):
        return REQUESTS
    return CHAT if _has_messages(record) else None


class Conversations:
    """Turns records into answers, and leaves out turns that an earlier record had already.

    Logs often hold a growing conversation many times. An assistant message is known by all that stands before it
    (system messages apart, which may hold the time of day) and by itself. A response of a request is never a repeat.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self.repeats = 0

    def answers(self, record: Any, source: str, dataset: str, form: str) -> Iterator[Recorded]:
        """The answers of one record. ValueError when it is not of this form, NoAnswerError when it has none."""
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        if isinstance(record.get("dataset"), str):
            dataset = record["dataset"]
        if form == CHAT:
            return self._turns(record, source, dataset)
        return _responses(record, source, dataset)

    def _turns(self, record: dict[str, Any], source: str, dataset: str) -> Iterator[Recorded]:
        messages = _messages(next((record[key] for key in MESSAGE_KEYS if key in record), None))
        group = _stated_group(record) or group_of(messages)
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > 0 and m["content"].strip()]
        if not turns:
            raise NoAnswerError("no assistant message behind another one")
        keys = _chain(messages)
        for number, i in enumerate(turns):
            if keys[i] in self._seen:
                self.repeats += 1
                continue
            self._seen.add(keys[i])
            yield Recorded(f"{source}#turn{number}", dataset, group, messages[:i], answer=messages[i]["content"])


def _chain(messages: tuple[Message, ...]) -> list[bytes]:
    """For each message what stands for it and all before it, system messages left out."""
    key, keys = "", []
    for message in messages:
        if message["role"] != "system":
            key = digest(key, message["role"], message["content"])
        keys.append(bytes.fromhex(key))
    return keys


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"needs a non-empty list of messages, as {', '.join(MESSAGE_KEYS)}")
    return tuple(plain_message(message) for message in given)


def _has_messages(record: Mapping[str, Any]) -> bool:
    return any(isinstance(record.get(key), list) for key in MESSAGE_KEYS)


def _ends_with_assistant(record: Mapping[str, Any]) -> bool:
    messages = next((record[key] for key in MESSAGE_KEYS if isinstance(record.get(key), list)), None)
    last = messages[-1] if messages else None
    said = last.get("role", last.get("from")) if isinstance(last, dict) else None
    return isinstance(said, str) and ROLE_NAMES.get(said.lower()) == "assistant"


def _stated_group(record: Mapping[str, Any]) -> str | None:
    for key in _CONVERSATION_IDS:
        if isinstance(record.get(key), str | int):
            return digest(str(record[key]))
    name = record.get("id")
    return digest(name.split("#", 1)[0]) if isinstance(name, str) and "#" in name else None


# -- requests and responses -----------------------------------------------------------------------------------------


def _responses(record: dict[str, Any], source: str, dataset: str) -> Iterator[Recorded]:
    asked = _request_of(record)
    if asked is None:
        raise ValueError(f"needs messages or a prompt, at the top or in {', '.join(REQUEST_KEYS[:3])}")
    messages, prompt = (None, text_of(asked)) if isinstance(asked, str) else (_messages(asked), None)
    group = _stated_group(record) or (group_of(messages) if messages is not None else group_of_prompt(prompt or ""))
    found = [(text, cut) for text, cut in _answers_of(record) if text.strip()]
    if not found:
        raise NoAnswerError("no response")
    if messages is None and not prompt:
        raise NoAnswerError("no prompt")
    for number, (text, cut) in enumerate(found):
        where = source if len(found) == 1 else f"{source}#choice{number}"
        yield Recorded(where, dataset, group, messages, prompt, answer=text, cut=cut)


def _request_of(record: Mapping[str, Any]) -> list[Any] | str | None:
    """The messages or the prompt that a record asks with, wherever they are; None = nowhere."""
    for _ in range(4):  # {"request": {"body": {...}}} and the like
        for key in ("messages", "prompt", "input"):
            given = _unpacked(record.get(key))
            if isinstance(given, list) and given and all(isinstance(part, dict) for part in given):
                return given
            if isinstance(given, str) and key != "messages" and "instruction" not in record:
                return given
        if isinstance(record.get("instruction"), str):
            return "\n\n".join(filter(None, (record["instruction"], text_of(record.get("input")))))
        inner = next((_unpacked(record[key]) for key in REQUEST_KEYS if key in record), None)
        if isinstance(inner, list | str):
            return inner
        if not isinstance(inner, dict):
            return None
        record = inner
    return None


def _answers_of(record: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """(text, cut off) of each response in a record."""
    given: Any = record
    for _ in range(4):
        if isinstance(given, dict) and isinstance(given.get("choices"), list):
            yield from map(_choice, given["choices"])
            return
        if isinstance(given, dict) and isinstance(given.get("body"), dict) and given is not record:
            given = given["body"]
            continue
        if isinstance(given, dict) and given is not record and ("role" in given or "content" in given):
            yield plain_message({"role": "assistant", **given})["content"], _is_cut(given)
            return
        if not isinstance(given, dict):
            break
        inside = ("message", "text", *RESPONSE_KEYS) if given is not record else RESPONSE_KEYS
        given = next((_unpacked(given[key]) for key in inside if given.get(key) is not None), None)
    if isinstance(given, str):
        yield text_of(given), False
    elif isinstance(given, list) and given:
        yield _joined_output(given), False


def _choice(choice: Any) -> tuple[str, bool]:
    if not isinstance(choice, dict):
        raise ValueError("each choice must be an object")
    message = choice.get("message")
    text = plain_message({"role": "assistant", **message})["content"] if isinstance(message, dict) else None
    return (text_of(choice.get("text")) if text is None else text), _is_cut(choice)


def _joined_output(parts: list[Any]) -> str:
    """A list as response: parts of one answer (of the Responses API, which also has reasoning that is not shown)."""
    shown = [part for part in parts if not (isinstance(part, dict) and part.get("type") == "reasoning")]
    texts = []
    for part in shown:
        if isinstance(part, dict) and ("role" in part or part.get("type") == "function_call"):
            texts.append(plain_message({"role": "assistant", **part})["content"])
        else:
            texts.append(text_of([part]))
    return "\n".join(filter(None, texts))


def _is_cut(answer: Mapping[str, Any]) -> bool:
    return answer.get("finish_reason") == "length" or answer.get("stop_reason") == "max_tokens"


def _unpacked(value: Any) -> Any:
    """Some logs hold requests and responses as JSON within JSON. Text that merely looks like JSON stays text."""
    if isinstance(value, str) and value[:1] in "{[":
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        known = ("messages", "choices", "body", "output", "role")
        if isinstance(inner, dict) and any(key in inner for key in known):
            return inner
        if (
            isinstance(inner, list)
            and inner
            and all(isinstance(i, dict) and ("role" in i or "type" in i) for i in inner)
        ):
            return inner
    return value
