"""Where in its context a copied piece of an answer stood before."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from hvd.analysis.encode import Asked, Part
from hvd.types import Draft


class Source(StrEnum):
    """Where accepted cache tokens were copied from."""

    ANSWER = "earlier in the same answer"
    TOOL = "tool results"
    USER = "user messages"
    SYSTEM = "system prompt"
    ASSISTANT = "earlier assistant answers"
    TEMPLATE = "chat template"
    PROMPT = "prompt, parts not known"
    OTHERS = "other requests' answers"


_SOURCES = {
    Part.TEMPLATE: Source.TEMPLATE,
    Part.SYSTEM: Source.SYSTEM,
    Part.USER: Source.USER,
    Part.TOOL: Source.TOOL,
    Part.ASSISTANT: Source.ASSISTANT,
    Part.PROMPT: Source.PROMPT,
}
_SHORT = 4
"""Context tokens to look for where a copy was put together of several places, so that none has all of it."""


class CopyFinder:
    """Finds the copies of one answer in its own text."""

    def __init__(self, asked: Asked) -> None:
        self._parts = asked.parts
        text = np.concatenate((asked.trace.prompt, asked.trace.response)).astype(np.int32)
        self._text = text.tobytes()

    def source(self, position: int, draft: Draft, accepted: int) -> Source:
        """Where the first `accepted` tokens of a draft at `position` generated tokens came from.

        Text that stands in several places counts as copied from the last one.
        """
        if not draft.local:
            return Source.OTHERS
        here = len(self._parts) + position
        for before, after in ((draft.match_len, accepted), (min(_SHORT, draft.match_len), 1)):
            found = self._last(here - before, here + after)
            if found is not None:
                place = found + before
                return Source.ANSWER if place >= len(self._parts) else _SOURCES[Part(int(self._parts[place]))]
        return Source.ANSWER

    def _last(self, start: int, stop: int) -> int | None:
        """The last place in front of `start` where the tokens start .. stop stand, too."""
        wanted, end = self._text[4 * start : 4 * stop], 4 * (stop - 1)
        while (found := self._text.rfind(wanted, 0, end)) >= 0:
            if found % 4 == 0:
                return found // 4
            end = found + len(wanted) - 1
        return None


def shares(tokens: Sequence[tuple[Source, int]]) -> dict[str, float]:
    """Share of each source, largest first."""
    total = sum(count for _, count in tokens) or 1
    return {str(source): count / total for source, count in sorted(tokens, key=lambda each: -each[1]) if count}
