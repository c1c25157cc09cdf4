"""The bookkeeping of a KV cache, shared by the backends: what is committed, what is pending, how much room there is.

A backend derives from `GrowingKVCache` and adds the storage: how to enlarge it, move positions in it and free it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from hvd.models.target import KVCache
from hvd.types import Int64Array

FIRST_CAPACITY = 256


class GrowingKVCache(KVCache):
    """Positions 0 .. length-1 are committed, the next `pending` belong to the last pass, the rest is free room.

    In a pass a backend calls `reserve(n)`, writes n positions from `length` on, and sets `pending = n` when the pass
    has succeeded; a pass that fails leaves the cache as it was.

    limit      most positions, committed and pending together
    slack      further positions that a backend may scribble on behind the pending ones (padding of a narrow pass)
    capacity   positions that the storage holds now; doubles from `first_capacity` up to limit + slack
    """

    first_capacity = FIRST_CAPACITY

    def __init__(self, limit: int, slack: int = 0) -> None:
        self.length = 0
        self.pending = 0
        self.limit = limit
        self.slack = slack
        self.capacity = 0
        self.closed = False

    def reserve(self, count: int) -> None:
        """Make room for `count` positions (and the slack) behind the committed ones.

        Raises RuntimeError when the cache is closed or a pass has not been settled with `keep`, ValueError when the
        positions would pass the limit.
        """
        self._require_open()
        if self.pending:
            raise RuntimeError(f"{self.pending} positions are pending; call keep() before the next pass")
        if self.length + count > self.limit:
            raise ValueError(f"{count} tokens behind {self.length} pass the context limit of {self.limit} positions")
        need = self.length + count + self.slack
        if need > self.capacity:
            capacity = max(self.capacity, self.first_capacity)
            while capacity < need:
                capacity *= 2
            capacity = min(capacity, self.limit + self.slack)
            self._grow(capacity)
            self.capacity = capacity

    def keep(self, path: Sequence[int]) -> None:
        """See `KVCache.keep`. Costs nothing while the path runs 0, 1, 2, ..; only what lies behind a gap is moved."""
        self._require_open()
        indices = np.asarray(path, dtype=np.int64)
        ascends = bool(np.all(indices[1:] > indices[:-1]))
        if len(indices) and not (ascends and indices[0] >= 0 and indices[-1] < self.pending):
            raise ValueError(f"the path must ascend within the {self.pending} pending positions, got {list(path)}")
        settled = int(np.count_nonzero(indices == np.arange(len(indices))))
        if settled < len(indices):
            self._move(self.length + indices[settled:], self.length + settled)
        self.length += len(indices)
        self.pending = 0

    def rollback(self, length: int) -> None:
        """See `KVCache.rollback`."""
        self._require_open()
        if not 0 <= length <= self.length:
            raise ValueError(f"can't roll back to {length}: the cache holds {self.length} positions")
        self.length = length
        self.pending = 0

    def close(self) -> None:
        """See `KVCache.close`."""
        if not self.closed:
            self.closed = True
            self.length = self.pending = self.capacity = 0
            self._free()

    @abstractmethod
    def _grow(self, capacity: int) -> None:
        """Enlarge the storage to `capacity` positions, keeping the first `length`."""

    @abstractmethod
    def _move(self, sources: Int64Array, start: int) -> None:
        """Copy positions `sources` (ascending, all > start) to start, start + 1, ..; read all before writing any."""

    @abstractmethod
    def _free(self) -> None:
        """Let go of the storage."""

    def _require_open(self) -> None:
        if self.closed:
            raise RuntimeError("the KV cache is closed")
