"""A sample of conversations, drawn while a log is read once, in bounded memory.

Each conversation has a number drawn from its name. As long as there is room all are kept; then those with the largest
numbers leave, and none with a larger one comes in any more. So every conversation of the log has the same chance, is in
with all its answers or not at all, and a second run draws the same.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator

from hvd.traces.logs_record import Recorded
from hvd.traces.schema import Trace


class Reservoir:
    """Keeps whole conversations of answers up to a bound.

    most_answer, most_prompt   characters of the kept answers, and of all that stands before them
    answers, answer_chars, prompt_chars, groups   of all that came, kept or not
    """

    def __init__(self, most_answer: int, most_prompt: int, seed: int = 0) -> None:
        self._most = (most_answer, most_prompt)
        self._seed = str(seed).encode()
        self._kept: dict[str, list[tuple[int, Recorded | Trace]]] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._largest: list[tuple[int, str]] = []
        self._limit = 2**64
        self._total = (0, 0)
        self._full = False
        self.answers = self.answer_chars = self.prompt_chars = 0

    def add(self, answer: Recorded | Trace) -> None:
        """Take in the next answer of the log."""
        said, before = _sizes(answer)
        self.answers += 1
        self.answer_chars += said
        self.prompt_chars += before
        number = self._number(answer.group)
        if number >= self._limit or (self._full and answer.group in self._kept):
            return
        if answer.group not in self._kept:
            self._kept[answer.group] = []
            heapq.heappush(self._largest, (-number, answer.group))
        self._kept[answer.group].append((self.answers, answer))
        self._count(answer.group, said, before)
        while self._over() and len(self._kept) > 1:
            self._drop()
        self._full = self._over()  # one conversation alone fills it: its first answers have to do

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    @property
    def groups(self) -> int:
        """Conversations kept."""
        return len(self._kept)

    def __iter__(self) -> Iterator[Recorded | Trace]:
        """The kept answers, in the order of the log."""
        for _, answer in sorted(((n, a) for kept in self._kept.values() for n, a in kept), key=lambda entry: entry[0]):
            yield answer

    @property
    def kept_chars(self) -> int:
        """Characters of the kept answers."""
        return self._total[0]

    def _number(self, group: str) -> int:
        return int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8, key=self._seed).digest())

    def _count(self, group: str, answer: int, prompt: int) -> None:
        before = self._sizes.get(group, (0, 0))
        self._sizes[group] = (before[0] + answer, before[1] + prompt)
        self._total = (self._total[0] + answer, self._total[1] + prompt)

    def _over(self) -> bool:
        return self._total[0] > self._most[0] or self._total[1] > self._most[1]

    def _drop(self) -> None:
        number, group = heapq.heappop(self._largest)
        self._limit = -number
        del self._kept[group]
        answer, prompt = self._sizes.pop(group)
        self._total = (self._total[0] - answer, self._total[1] - prompt)


def _sizes(answer: Recorded | Trace) -> tuple[int, int]:
    """Characters of an answer and of what stands before it; a token counts as four."""
    if isinstance(answer, Trace):
        return 4 * len(answer.response), 4 * len(answer.prompt)
    return answer.answer_chars, answer.prompt_chars
