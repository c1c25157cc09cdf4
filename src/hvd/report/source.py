"""Where a cache draft was copied from, looked up: the suffix tree counts, but keeps no places."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd.types import Draft, Int32Array


@dataclass(frozen=True, slots=True)
class Source:
    """An earlier place of a request's text.

    start    index, prompt and output counted together, of the token that the draft begins with
    length   tokens of the draft that are found there. (A draft follows what was most frequent, which may be a mixture.)
    """

    start: int
    length: int


def find_source(text: Int32Array, draft: Draft) -> Source | None:
    """The place that a draft agrees with longest, the last one of several; None when it came from another text.

    text   int32 [n], everything committed when the draft was made
    """
    n = len(text)
    if not n or not draft.local:
        return None
    places = np.flatnonzero(text[:-1] == text[-1]) + 1
    for back in range(2, draft.match_len + 1):
        places = places[places >= back]
        places = places[text[places - back] == text[n - back]]
    length = 0
    for token in draft.tokens:
        further = places[places + length < n]
        further = further[text[further + length] == token]
        if not len(further):
            break
        places, length = further, length + 1
    return Source(int(places[-1]), length) if length else None
