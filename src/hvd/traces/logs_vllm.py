"""Answers in the log of a vLLM server (`--enable-log-requests --enable-log-outputs`, before those `--log-requests`).

    Received request ID: prompt: '...', params: SamplingParams(...), prompt_token_ids: [1, 2], ...
    Request ID details: prompt: '...', prompt_token_ids: [1, 2], ...               (newer versions, level DEBUG)
    Generated response ID: output: '...', output_token_ids: [3, 4], finish_reason: stop
    Generated response ID (streaming delta): ...                                   then one "(streaming complete)"

Texts stand there as Python literals, so one entry is one line whatever it says. What stands in front of an entry (time,
process, container) does not matter.
"""

from __future__ import annotations

import ast
import json
import re
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from hvd.traces.logs_record import Recorded, clean, digest, group_of_prompt
from hvd.types import Int32Array

VLLM = "vllm"
ABOUT = "log of a vLLM server; one answer a 'Generated response'"
ADVICE = (
    "start vLLM with --enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG "
    "(newer versions log prompts at that level only), without --max-log-len"
)

_TEXT = r"""('(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|None)"""
_IDS = r"([\[(][\d, ]*[\])]|None)"
_PROMPT = re.compile(rf"(?:Received request (\S+):|Request (\S+) details:) prompt: {_TEXT}")
_IDS_BEGIN = "prompt_token_ids: "
_PROMPT_IDS = re.compile(rf"{_IDS_BEGIN}{_IDS}")
_OUTPUT = re.compile(
    rf"Generated response (\S+?)(?: \(streaming (delta|complete)\))?: output: {_TEXT}"
    rf"(?:, output_token_ids: {_IDS})?(?:, finish_reason: (\w+))?"
)
_BEGUN = re.compile(r"Received request \S+:|Request \S+ details:|Generated response \S+")

_LARGEST = np.iinfo(np.int32).max
_PENDING_CHARS = 64 * 1024 * 1024
"""Prompts remembered for responses to come: the oldest are forgotten."""


@dataclass(slots=True, eq=False)
class _Open:
    """A request whose response is awaited, and the deltas that have come."""

    prompt: str | None = None
    prompt_ids: Int32Array | None = None
    text: str = ""
    ids: list[Int32Array] | None = None

    @property
    def size(self) -> int:
        return len(self.prompt or "") + (0 if self.prompt_ids is None else self.prompt_ids.nbytes)


class VLLMLog:
    """Reads line after line; keeps what requests said until they are answered.

    requests, unprompted   requests seen; responses whose prompt is not in the log
    """

    def __init__(self, dataset: str) -> None:
        self._dataset = dataset
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._size = 0
        self.requests = 0
        self.unprompted = 0

    def line(self, line: str, source: str) -> Recorded | None:
        """Take in a line; the answer that it completes, if any. ValueError for an entry that is torn."""
        if line.startswith('{"'):
            line = _unwrapped(line)
        if (found := _OUTPUT.search(line)) is not None:
            return self._response(found, source)
        if (found := _PROMPT.search(line)) is not None:
            self._request(found, line)
            return None
        if "Received request" in line and ": params:" in line:
            self.requests += 1  # the prompt, if logged at all, has its own line
            return None
        if _BEGUN.search(line) is not None:
            raise ValueError("an entry of vLLM that ends too early")
        return None

    def _request(self, found: re.Match[str], line: str) -> None:
        self.requests += found.group(1) is not None
        ids = _PROMPT_IDS.match(line, max(line.rfind(_IDS_BEGIN), found.end()))  # a stop text may say the same
        opened = _Open(_literal(found.group(3)), _numbers(ids.group(1) if ids else None))
        name = found.group(1) or found.group(2)
        self._forget(name)
        self._open[name] = opened
        self._size += opened.size
        while self._size > _PENDING_CHARS and len(self._open) > 1:
            self._forget(next(iter(self._open)))

    def _forget(self, name: str) -> None:
        gone = self._open.pop(name, None)
        self._size -= gone.size if gone is not None else 0

    def _find(self, name: str) -> _Open | None:
        """Completions add the number of the prompt to the id of the request."""
        for each in (name, f"{name}-0", name.rpartition("-")[0]):
            if each in self._open:
                return self._open[each]
        return None

    def _response(self, found: re.Match[str], source: str) -> Recorded | None:
        name, stream, text, ids, finish = found.groups()
        opened = self._find(name)
        if opened is None or (opened.prompt is None and opened.prompt_ids is None):
            self.unprompted += stream != "delta"
            return None
        said, numbers = _literal(text) or "", _numbers(ids)
        if stream == "delta":
            opened.text += said
            if numbers is not None:
                opened.ids = [*(opened.ids or []), numbers]
            return None
        if stream == "complete":
            numbers = np.concatenate(opened.ids) if opened.ids else numbers
            said = said or opened.text
            opened.text, opened.ids = "", None
        if not said and numbers is None:
            return None
        group = group_of_prompt(opened.prompt) if opened.prompt is not None else digest(source)
        return Recorded(
            source, self._dataset, group, None, opened.prompt, opened.prompt_ids, said, numbers, cut=finish == "length"
        )


def looks_like_vllm(text: str) -> bool:
    """Whether the beginning of a file is that of a vLLM log."""
    return _BEGUN.search(text) is not None or (
        "vllm" in text.lower() and re.search(r"(INFO|DEBUG) \d\d-\d\d", text) is not None
    )


def _unwrapped(line: str) -> str:
    """The line within a line of a container's JSON log."""
    try:
        inner = json.loads(line)
    except (ValueError, RecursionError):  # the latter: nested too deeply
        return line
    entry = inner.get("log", inner.get("message")) if isinstance(inner, dict) else None
    return entry if isinstance(entry, str) else line


def _literal(text: str) -> str | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError) as error:
        raise ValueError("a text that is no Python literal") from error
    return clean(value) if isinstance(value, str) else None


def _numbers(text: str | None) -> Int32Array | None:
    if text is None or text == "None":
        return None
    inner = text[1:-1].strip().rstrip(",")
    try:
        ids = np.array(inner.split(",") if inner else [], np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError("token ids that are no numbers") from error
    if len(ids) and ids.max() > _LARGEST:
        raise ValueError(f"a token id above {_LARGEST}")
    return ids.astype(np.int32)
