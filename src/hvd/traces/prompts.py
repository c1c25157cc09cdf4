"""Reads prompt files: the benchmark format (docs/trace-format.md) and plain chat JSONL."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd.errors import ConfigError

log = logging.getLogger(__name__)

Message = dict[str, str]
"""A chat message: `role` (system, user, assistant or tool), `content`, and `name` for some tool messages."""

PathLike = str | os.PathLike[str]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer to generate.

    messages   what is added to the conversation before it
    recorded   the recorded answer, or None. It takes the place of the generated one in the history of later
               turns, so that each turn of a recorded conversation is generated from the recorded prefix.
    """

    messages: tuple[Message, ...]
    recorded: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation with answers to generate.

    history = []
    for turn in prompt.turns:
        history += turn.messages
        answer = generate(history)
        history.append({"role": "assistant", "content": answer if turn.recorded is None else turn.recorded})
    """

    id: str
    dataset: str
    category: str
    split: str
    turns: tuple[Turn, ...]


def read_prompts(
    paths: PathLike | Iterable[PathLike],
    *,
    split: str | None = None,
    limit: int | None = None,
    warn: Callable[[str], None] = log.warning,
) -> Iterator[Prompt]:
    """The prompts of JSONL files in order: of one `split` (train, dev, test) or all, at most `limit` a file.

    A record is {"messages": [...]} or {"prompt": "..."}, with optional id, dataset, category, split and gen:
      gen "open"     the user messages are sent one by one, each behind the answer to the one before
      gen "replay"   each assistant message is generated anew from the recorded messages before it
      no gen         replay when the last message is the assistant's, else one answer behind all messages
    A missing split is drawn from the id: 60 % train, 20 % dev, 20 % test, groups (id up to '#') together.

    A broken line costs that line only: `warn` gets one line that names it (file:line), and one with the count
    of each file. ConfigError when a file can't be read.
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    for path in paths:
        yield from _read_file(Path(path), split, limit, warn)


def _read_file(path: Path, split: str | None, limit: int | None, warn: Callable[[str], None]) -> Iterator[Prompt]:
    found = bad = 0
    for number, line in _lines(path):
        if limit is not None and found >= limit:
            break
        if not line.strip():
            continue
        try:
            prompt = parse_record(_json(line), path.stem, number)
        except ValueError as error:
            warn(f"{path}:{number}: {error}; line skipped")
            bad += 1
            continue
        if split is None or prompt.split == split:
            found += 1
            yield prompt
    if bad:
        warn(f"{path}: {bad} broken {'line' if bad == 1 else 'lines'} skipped")


def _json(line: bytes) -> Any:
    """The value of a line. ValueError in words that help whoever wrote it."""
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines as bytes: a line that is not UTF-8 is then that line's fault alone."""
    try:
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise ConfigError(f"can't read the prompt file {path}: {error.strerror}") from error


def parse_record(record: Any, dataset: str, number: int) -> Prompt:
    """One JSON record as a Prompt; `dataset` and `number` (of its line) name what has no name. Or ValueError."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    dataset = _text(record, "dataset", dataset)
    name = _text(record, "id", f"{dataset}/{number}")
    return Prompt(
        id=name,
        dataset=dataset,
        category=_text(record, "category", "other"),
        split=_text(record, "split", "") or split_of(name),
        turns=_turns(_messages(record), record.get("gen")),
    )


def split_of(name: str) -> str:
    """train, dev or test: the first 8 hex digits of sha256(group), modulo 100, are < 60, < 80 or above."""
    bucket = int(hashlib.sha256(name.split("#", 1)[0].encode()).hexdigest()[:8], 16) % 100
    return "train" if bucket < 60 else "dev" if bucket < 80 else "test"


def _text(record: dict[str, Any], key: str, default: str) -> str:
    value = record.get(key)
    if value is None:
        return default
    if not isinstance(value, str | int):
        raise ValueError(f"{key} must be text, got {type(value).__name__}")
    return str(value)


def _messages(record: dict[str, Any]) -> list[Message]:
    if "messages" not in record:
        if not isinstance(record.get("prompt"), str) or not record["prompt"]:
            raise ValueError('needs "messages" (a list) or "prompt" (a text)')
        return [{"role": "user", "content": record["prompt"]}]
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a non-empty list')
    return [_message(message) for message in messages]


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError(f"each message needs a role, one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(content, str):
        raise ValueError(f"the content of a {message['role']} message must be text")
    named = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
    return {"role": message["role"], "content": content, **named}


def _joined(parts: list[Any]) -> str | None:
    """The text of content given in parts; None when one of them is not text."""
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    whole = [text for text in texts if isinstance(text, str)]
    return "".join(whole) if len(whole) == len(parts) else None


def _turns(messages: list[Message], gen: Any) -> tuple[Turn, ...]:
    if gen not in (None, "open", "replay"):
        raise ValueError(f'gen must be "open" or "replay", got {gen!r}')
    if gen == "open":
        return _open_turns(messages)
    if gen == "replay" or messages[-1]["role"] == "assistant":
        return _replay_turns(messages)
    return (Turn(tuple(messages)),)


def _open_turns(messages: list[Message]) -> tuple[Turn, ...]:
    """One turn a user message, which takes the messages in front of it along."""
    turns, waiting = [], list[Message]()
    for message in messages:
        waiting.append(message)
        if message["role"] == "user":
            turns.append(Turn(tuple(waiting)))
            waiting = []
    if not turns:
        raise ValueError("an open record needs a user message")
    return tuple(turns)


def _replay_turns(messages: list[Message]) -> tuple[Turn, ...]:
    """One turn an assistant message; an answer that opens the conversation has no prefix: history only."""
    turns, waiting = [], list[Message]()
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i > 0:
            turns.append(Turn(tuple(waiting), recorded=message["content"]))
            waiting = []
        else:
            waiting.append(message)
    if not turns:
        raise ValueError("a replay record needs an assistant message behind another one")
    return tuple(turns)
