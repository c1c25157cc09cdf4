"""One recorded answer of a log, whatever its format: what stood before it, and the answer as text or token ids."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from hvd.traces.prompts import Message
from hvd.types import Int32Array

ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
    "environment": "tool",
}
"""What logs call the four roles."""

MARKER = re.compile(
    r"<\|im_start\|>(?P<chatml>\w+)"
    r"|<\|start_header_id\|>(?P<llama>\w+)<\|end_header_id\|>"
    r"|<\|(?P<zephyr>system|user|assistant|tool|observation)\|>"
    r"|<start_of_turn>(?P<gemma>\w+)"
    r"|<\uff5c(?P<deepseek>User|Assistant)\uff5c>"
    r"|(?P<mistral>\[INST\]|\[/INST\]|\[TOOL_RESULTS\]|<tool_response>|</tool_response>)"
)
"""Where a part begins in a finished prompt: ChatML, Llama 3, Zephyr and Phi, Gemma, DeepSeek, Mistral; tool results."""

_MISTRAL = {
    "[INST]": "user",
    "[/INST]": "assistant",
    "[TOOL_RESULTS]": "tool",
    "<tool_response>": "tool",
    "</tool_response>": "user",
}
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One recorded answer.

    source        "file:line", with "#turn0", .. behind it where a line holds several; never text of the log
    dataset       what its answers are cached with: the log's own data set, or the file's name
    group         conversation: answers of one must stay on one side of a split, and are sampled together
    messages      the conversation before the answer; None where the log has a finished prompt
    prompt        the finished prompt as text, prompt_ids the same as token ids, int32 [p]; None = not in the log
    answer        as text, answer_ids as token ids, int32 [n]; at least one is there
    cut           it was cut off by a limit
    """

    source: str
    dataset: str
    group: str
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    prompt_ids: Int32Array | None = None
    answer: str | None = None
    answer_ids: Int32Array | None = None
    cut: bool = False

    @property
    def answer_chars(self) -> int:
        """Size of the answer in characters; a token id counts as four."""
        return len(self.answer) if self.answer is not None else 4 * _count(self.answer_ids)

    @property
    def prompt_chars(self) -> int:
        """Size of what stands before it, likewise."""
        if self.messages is not None:
            return sum(len(message["content"]) for message in self.messages)
        return len(self.prompt) if self.prompt is not None else 4 * _count(self.prompt_ids)


def _count(ids: Int32Array | None) -> int:
    return 0 if ids is None else len(ids)


def plain_message(message: Any) -> Message:
    """A message of a log as role and text: parts joined, tool calls and reasoning written out. Or ValueError.

    A tool call becomes `<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>`, the arguments as the log has
    them; reasoning becomes `<think>` in front. Images and the like leave nothing.
    """
    if not isinstance(message, dict):
        raise ValueError("each message must be an object")
    kind = message.get("type")
    if kind == "function_call":
        return {"role": "assistant", "content": _call(message)}
    if kind == "function_call_output":
        return {"role": "tool", "content": text_of(message.get("output"))}
    said = message.get("role", message.get("from"))
    role = ROLE_NAMES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise ValueError(f"each message needs a role, one of {', '.join(sorted(set(ROLE_NAMES.values())))}")
    content = text_of(message["content"] if "content" in message else message.get("value"))
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str) and role == "assistant":
        content = f"<think>\n{clean(thought)}\n</think>\n\n{content}"
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else [])
    if not isinstance(calls, list):
        raise ValueError("tool_calls must be a list")
    return {"role": role, "content": "\n".join(filter(None, [content, *map(_call, calls)]))}


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call needs a function with a name")
    arguments = function.get("arguments", function.get("input", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return clean(f'<tool_call>\n{{"name": {name}, "arguments": {written or "{}"}}}\n</tool_call>')


def text_of(content: Any) -> str:
    """The text of a content: a string, nothing, a list of parts, or an object (as JSON)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, list):
        return "".join(_text_of_part(part) for part in content)
    return clean(json.dumps(content, ensure_ascii=False))


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return clean(part)
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        return text_of(part.get("text"))
    if kind in ("tool_use", "function_call"):
        return _call(part)
    return text_of(part.get("content")) if kind == "tool_result" else ""


def clean(text: str) -> str:
    """The text with a mark in place of lone surrogates, which no tokenizer takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def marked_role(found: re.Match[str]) -> str:
    """The role that a `MARKER` announces; "" for one that is no role of ours."""
    name = found.group(found.lastgroup or 0)
    return _MISTRAL.get(name) or ROLE_NAMES.get(name.lower(), "")


def digest(*texts: str) -> str:
    """Sixteen hex digits that stand for texts without showing them."""
    made = hashlib.blake2b(digest_size=8)
    for text in texts:
        made.update(text.encode("utf-8", "replace"))
        made.update(b"\0")
    return made.hexdigest()


def group_of(messages: tuple[Message, ...]) -> str:
    """A conversation is known by how its user begins it: a system message may hold the time of day."""
    first = next((m["content"] for m in messages if m["role"] == "user"), None)
    return digest(first if first is not None else messages[0]["content"] if messages else "")


def group_of_prompt(prompt: str) -> str:
    """The same of a finished prompt: its first user part, or all of it where no markers are known."""
    found = list(_first_user(prompt))
    return digest(prompt[found[0] : found[1]] if found else prompt)


def _first_user(prompt: str) -> tuple[int, int] | tuple[()]:
    begun = None
    for found in MARKER.finditer(prompt):
        if begun is not None:
            return begun, found.start()
        if marked_role(found) == "user":
            begun = found.end()
    return () if begun is None else (begun, len(prompt))
