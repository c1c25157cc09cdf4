"""What is known of one request at a cycle boundary. The one definition used by serving and by replay."""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvd.types import Arm, Int32Array

HIT_WINDOW = 64
"""Generated tokens whose shadow hits are remembered."""
TAIL = 8
"""Committed tokens whose character classes are remembered."""
CYCLE_WINDOW = 16
"""Cycles whose arm, drafted and accepted tokens are remembered."""

_HIT_MASK = (1 << HIT_WINDOW) - 1


class History:
    """A request's past, kept in a few integers so that a commit and a look cost microseconds.

    Everything but the `recent` cycles depends on the committed tokens and their shadow hits alone, not on how they were
    cut into cycles or prompt chunks, and so not on the policy.

    A *shadow hit* says that the suffix cache's first token would have been right at that place, whichever arm ran.
    """

    UNKNOWN_CLASSES: ClassVar[NDArray[np.uint8]] = np.zeros(0, np.uint8)
    """For requests without a tokenizer."""

    def __init__(self, token_classes: NDArray[np.uint8]) -> None:
        """`token_classes`: uint8 [V], bit masks from `Tokenizer.token_classes`; an empty array = classes unknown."""
        # The extra zero serves ids beyond the table, which a clipped look-up sends to its end.
        self._classes: NDArray[np.uint8] = np.append(np.asarray(token_classes, np.uint8), np.uint8(0))
        self._tail = b""
        self.prompt_length = 0
        self.generated_length = 0
        self.hits = 0
        """Bit i: shadow hit of the i-th last generated token (bit 0 = the last)."""
        self.recent: deque[tuple[Arm, int, int]] = deque(maxlen=CYCLE_WINDOW)
        """(arm, drafted, accepted) of the last cycles, newest last."""

    def prompt(self, tokens: Int32Array) -> None:
        """Take in (a chunk of) the prompt, int32 [n]."""
        self.prompt_length += len(tokens)
        self._remember(tokens)

    def commit(
        self, tokens: Int32Array, hits: NDArray[np.uint8], arm: Arm, drafted: int, accepted: int, offered: int
    ) -> None:
        """Take in what a cycle committed.

        tokens     int32 [n]   accepted and bonus tokens
        hits       uint8 [n]   shadow hit of each, 0 or 1; ValueError when its length differs
        arm, drafted, accepted what was verified
        offered    length of the cache draft that was on offer (kept by the caller's records; not used here)
        """
        if len(hits) != len(tokens):
            raise ValueError(f"hits must have one entry a token: {len(hits)} hits for {len(tokens)} tokens")
        self.generated_length += len(tokens)
        self._remember(tokens)
        for hit in hits[-HIT_WINDOW:].tolist():
            self.hits = (self.hits << 1) | (1 if hit else 0)
        self.hits &= _HIT_MASK
        self.recent.append((arm, drafted, accepted))

    def _remember(self, tokens: Int32Array) -> None:
        self._tail = (self._tail + self.classes(tokens[-TAIL:]).tobytes())[-TAIL:]

    def classes(self, tokens: Int32Array) -> NDArray[np.uint8]:
        """Class masks, uint8 [n]; 0 where the id is beyond the table. Never raises, whatever the ids."""
        masks: NDArray[np.uint8] = self._classes.take(tokens, mode="clip")
        return masks

    @property
    def class_table(self) -> NDArray[np.uint8]:
        """Class masks by token id, uint8 [V+1]; the last one, 0, serves ids beyond the vocabulary."""
        return self._classes

    @property
    def last_class(self) -> int:
        """Class mask of the last committed token; 0 before the first."""
        return self._tail[-1] if self._tail else 0

    @property
    def tail(self) -> bytes:
        """Class masks of the last committed tokens, at most `TAIL`, newest last."""
        return self._tail

    def hit_rate(self, window: int) -> float:
        """Share of shadow hits in the last `window` generated tokens, half a hit and half a miss added."""
        seen = min(window, self.generated_length)
        return ((self.hits & ((1 << window) - 1)).bit_count() + 0.5) / (seen + 1.0)

    @property
    def hit_run(self) -> int:
        """Shadow hits in a row up to the last token, at most `HIT_WINDOW`."""
        return (~self.hits & (self.hits + 1)).bit_length() - 1

    @property
    def hit_runs(self) -> int:
        """Separate runs of shadow hits within the window."""
        return (self.hits & ~(self.hits << 1)).bit_count()

    def hit(self, ago: int) -> bool:
        """Shadow hit of the `ago`-th last generated token, 0 = the last. ValueError outside of what is remembered."""
        if not 0 <= ago < min(HIT_WINDOW, self.generated_length):
            raise ValueError(f"no shadow hit is remembered {ago} tokens back")
        return bool((self.hits >> ago) & 1)
