"""Token ids -> text, piece by piece, while a request runs.

The pieces joined are exactly what `Tokenizer.decode` makes of all ids at once, and no piece ends inside a character.
A tokenizer's decoder is a chain of steps; each is repeated here as a stream with bounded state, so a token costs the
same however long the text is. A decoder with a step that is not known here is asked once, at the end.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """One request's text. `push` ids as they are committed, `flush` once behind the last."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = make_stream(tokenizer)

    def push(self, ids: Sequence[int]) -> str:
        """Text that is final now; "" while a character (or a run of byte tokens) is unfinished. O(len(ids))."""
        return self._stream.feed(
            [token for id_ in ids if (token := self._tokenizer.token(id_, self._skip)) is not None]
        )

    def flush(self) -> str:
        """The rest, behind the last token. An unfinished character becomes replacement marks, as `decode` has it."""
        return self._stream.finish()

    def pending(self) -> str:
        """What `flush` would return now; goes on as if not asked. It may turn out otherwise with the next token.

        Costs nothing while nothing is unfinished, else as much as the unfinished bytes; for a decoder that is asked
        once, at the end, O(all ids).
        """
        return self._stream.peek()


class _Stream(ABC):
    """Token strings in, final text out."""

    @abstractmethod
    def feed(self, tokens: list[str]) -> str: ...

    @abstractmethod
    def finish(self) -> str: ...

    @abstractmethod
    def peek(self) -> str:
        """What `finish` would return, without ending."""


class _ByteStream(_Stream):
    """Byte-level BPE: every token is some bytes of UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: list[str]) -> str:
        return self._decoder.decode(b"".join([self._bytes(token) for token in tokens]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def peek(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")


class _StepStream(_Stream):
    """A chain of steps, each from strings to strings; text is what leaves the last."""

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps

    def feed(self, tokens: list[str]) -> str:
        for step in self._steps:
            tokens = step.feed(tokens)
        return "".join(tokens)

    def finish(self) -> str:
        tokens: list[str] = []
        for step in self._steps:
            tokens = step.feed(tokens) + step.finish()
        return "".join(tokens)

    def peek(self) -> str:
        return _StepStream(deepcopy(self._steps)).finish() if any(step.holds for step in self._steps) else ""


class _WholeStream(_Stream):
    """A decoder that can't be followed step by step: all text comes at the end."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._tokens: list[str] = []

    def feed(self, tokens: list[str]) -> str:
        self._tokens += tokens
        return ""

    def finish(self) -> str:
        return str(self._decoder.decode(self._tokens))

    def peek(self) -> str:
        return self.finish()


class _Step(ABC):
    @abstractmethod
    def feed(self, tokens: list[str]) -> list[str]: ...

    def finish(self) -> list[str]:
        return []

    @property
    def holds(self) -> bool:
        """Whether `finish` has something to say."""
        return False


class _Replace(_Step):
    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content

    def feed(self, tokens: list[str]) -> list[str]:
        return [token.replace(self._pattern, self._content) for token in tokens]


class _ByteFallback(_Step):
    """Runs of tokens "<0xAB>": characters when the whole run is UTF-8, else a replacement mark for each byte."""

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, tokens: list[str]) -> list[str]:
        out = []
        for token in tokens:
            if (byte := fallback_byte(token)) is not None:
                self._run.append(byte)
            else:
                out += [*self.finish(), token]
        return out

    @property
    def holds(self) -> bool:
        return bool(self._run)

    def finish(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _Metaspace(_Step):
    """SentencePiece's mark to a space; none at the text's start where the tokenizer had put one there."""

    def __init__(self, mark: str, *, strip_first: bool) -> None:
        self._mark, self._strip = mark, strip_first

    def feed(self, tokens: list[str]) -> list[str]:
        out = [
            token.replace(self._mark, "" if self._strip and not index else " ") for index, token in enumerate(tokens)
        ]
        self._strip = self._strip and not tokens
        return out


class _StripStart(_Step):
    """Cut up to `count` characters `content` off the start of the text (behind a Fuse)."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._left = content, count

    def feed(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        while self._left and text:
            if not text.startswith(self._content):
                self._left = 0
                break
            text = text[len(self._content) :]
            self._left -= 1
        return [text]


class _SpaceBetween(_Step):
    """No decoder at all: tokens joined by spaces."""

    def __init__(self) -> None:
        self._first = True

    def feed(self, tokens: list[str]) -> list[str]:
        out = [token if self._first and not index else " " + token for index, token in enumerate(tokens)]
        self._first = self._first and not tokens
        return out


_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def fallback_byte(token: str) -> int | None:
    """The byte that a SentencePiece token like "<0x0A>" stands for; None for other tokens."""
    match = _FALLBACK_BYTE.fullmatch(token)
    return None if match is None else int(match[1], 16)


def make_stream(tokenizer: Tokenizer) -> _Stream:
    """The stream that repeats a tokenizer's decoder."""
    decoder = tokenizer.decoder
    if decoder is None:
        return _StepStream([_SpaceBetween()])
    description = json.loads(decoder.__getstate__())
    if description["type"] == "ByteLevel":
        return _ByteStream(tokenizer)
    steps = _steps_of(description)
    return _WholeStream(decoder) if steps is None else _StepStream(steps)


def _steps_of(description: dict[str, Any]) -> list[_Step] | None:
    """The steps of a sequence of Replace, ByteFallback, Metaspace, Fuse and Strip; None when there is anything else."""
    steps: list[_Step] = []
    fused = False
    for part in description["decoders"] if description["type"] == "Sequence" else [description]:
        match part:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": content} if not fused:
                steps.append(_Replace(pattern, content))
            case {"type": "ByteFallback"} if not fused:
                steps.append(_ByteFallback())
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not fused:
                steps.append(_Metaspace(mark, strip_first=scheme != "never"))
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": content, "start": start, "stop": 0} if fused:
                steps.append(_StripStart(content, start))
            case _:
                return None
    return steps
