"""From committed tokens to text that may be shown: whole characters only, nothing that may yet become a stop text."""

from __future__ import annotations

from dataclasses import dataclass

from hvd.tokenizer import IncrementalDetokenizer, Tokenizer
from hvd.types import Arm


@dataclass(frozen=True, slots=True)
class Piece:
    """One committed token on its way out: its id, the text that became final with it (may be ""), its drafter."""

    token: int
    text: str
    arm: Arm


class TextStream:
    """The growing text of one request.

    `text` is final: it never shrinks, never ends in half a character, never holds a stop text. Text that could be the
    beginning of a stop text is held back until it is known.
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self.text = ""
        self.stopped = False
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = stops
        self._held = ""

    def push(self, token: int, *, may_stop: bool) -> str:
        """Add a token; returns the text that became final. Sets `stopped` when a stop text is complete.

        Text that the tokenizer still holds back (byte tokens of a run) is looked at too, though it is not shown yet.

        may_stop   False before `min_tokens`: stop texts that end here are let through
        """
        self._held += self._detokenizer.push([token])
        if may_stop and self._stops:
            text = self._held + self._detokenizer.pending()
            at = self._find(text)
            if at is not None:
                self.stopped, self._held = True, text
                return self._release(at, drop=True)
        final = ""
        while (at := self._find(self._held)) is not None:
            final += self._release(at + 1)
        return final + self._release(len(self._held) - self._hold())

    def finish(self) -> str:
        """The request ended otherwise: release what was held back, a torn last character included."""
        if self.stopped:
            return ""
        self._held += self._detokenizer.flush()
        return self._release(len(self._held))

    def _find(self, text: str) -> int | None:
        """Where the first complete stop text begins."""
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        return min(found) if found else None

    def _hold(self) -> int:
        """Length of the longest end of the held text with which a stop text begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, length: int, *, drop: bool = False) -> str:
        out, rest = self._held[:length], self._held[length:]
        self._held = "" if drop else rest
        self.text += out
        return out
