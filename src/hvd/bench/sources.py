"""Where in a request a cache draft was copied from: whose message, and how far into the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvd.tokenizer import Tokenizer
from hvd.types import Int32Array

ANSWER, SHARED, TEMPLATE, UNKNOWN = "answer", "shared", "template", "unknown"
"""Sources beside the messages' roles: the answer itself, earlier answers, the template between messages, not found."""


def token_roles(tokenizer: Tokenizer, prompt: Sequence[int], messages: Sequence[Mapping[str, str]]) -> list[str]:
    """For every token of a prompt the role of the message that its first byte lies in, TEMPLATE between messages.

    Messages are looked for in the prompt's own text, one behind the other. One that the template has rewritten is not
    found, and its tokens count as TEMPLATE.
    """
    pieces = [_spelled(tokenizer, token) for token in prompt]
    text = b"".join(pieces)
    starts = np.cumsum([0, *map(len, pieces)])[:-1]
    roles = np.full(len(prompt), TEMPLATE, object)
    at = 0
    for message in messages:
        content = message["content"].strip().encode()
        found = text.find(content, at) if content else -1
        if found < 0:
            continue
        at = found + len(content)
        roles[(starts >= found) & (starts < at)] = message["role"]
    return [str(role) for role in roles]


def _spelled(tokenizer: Tokenizer, token: int) -> bytes:
    spelled = tokenizer.token(token, False)
    return b"" if spelled is None else tokenizer.bytes_of(spelled)


def source_of(text: Int32Array, match_len: int, token: int) -> int | None:
    """Place in the committed text, int32 [n], that a draft's first token was copied from; None when it is nowhere.

    The tree counts every occurrence of a match of so many tokens; the last one stands for all. Where there is none (the
    draft goes on with a copy that the text has left), it is the last one of the longest shorter match.
    """
    places = np.flatnonzero(text == token)
    for back in range(1, match_len + 1):
        longer = places[places >= back]
        longer = longer[text[longer - back] == text[-back]]
        if not len(longer):
            break
        places = longer
    return int(places[-1]) if len(places) else None


def name_source(place: int | None, roles: Sequence[str]) -> str:
    """A role or TEMPLATE for a place in the prompt, ANSWER behind it, UNKNOWN for None."""
    if place is None:
        return UNKNOWN
    return roles[place] if place < len(roles) else ANSWER
