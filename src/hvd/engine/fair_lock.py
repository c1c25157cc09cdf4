"""A lock that is given to those who wait before it goes back to the one who had it."""

from __future__ import annotations

import threading


class FairLock:
    """Re-entrant. A thread that takes the lock over and over (a decoding loop) can't starve one that waits for it.

    Whoever waits holds the *turn*; the thread that has just released the lock must get the turn first, and so comes
    behind the waiting one.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._depth += 1
            return
        with self._turn:
            self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth = 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._lock.release()
