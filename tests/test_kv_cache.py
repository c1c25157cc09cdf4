"""The shared bookkeeping of a KV cache against a plain list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd.models.kv_cache import FIRST_CAPACITY, GrowingKVCache
from hvd.types import Int64Array


class NumberCache(GrowingKVCache):
    """Stores one number a position; counts what its storage had to do."""

    def __init__(self, limit: int, slack: int = 0) -> None:
        super().__init__(limit, slack)
        self.store = np.zeros(0, dtype=np.int64)
        self.grown: list[int] = []
        self.moved = 0

    def run(self, numbers: list[int]) -> None:
        self.reserve(len(numbers))
        self.store[self.length : self.length + len(numbers)] = numbers
        self.pending = len(numbers)

    def committed(self) -> list[int]:
        return self.store[: self.length].tolist()

    def _grow(self, capacity: int) -> None:
        store = np.full(capacity, -1, dtype=np.int64)
        store[: self.length] = self.store[: self.length]
        self.store = store
        self.grown.append(capacity)

    def _move(self, sources: Int64Array, start: int) -> None:
        assert np.all(sources > start)
        assert np.all(np.diff(sources) > 0)
        self.store[start : start + len(sources)] = self.store[sources]
        self.moved += len(sources)

    def _free(self) -> None:
        self.store = np.zeros(0, dtype=np.int64)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 1200), st.integers(0, 3))
def test_any_history_equals_a_plain_list(data: st.DataObject, limit: int, slack: int) -> None:
    cache, model, fresh = NumberCache(limit, slack), [], iter(range(10**9))
    for _ in range(data.draw(st.integers(0, 12))):
        if data.draw(st.booleans()) and model:
            length = data.draw(st.integers(0, len(model)))
            cache.rollback(length)
            del model[length:]
            continue
        count = data.draw(st.integers(1, 300))
        numbers = [next(fresh) for _ in range(count)]
        if len(model) + count > limit:
            with pytest.raises(ValueError, match="context limit"):
                cache.run(numbers)
            continue
        cache.run(numbers)
        assert cache.capacity >= cache.length + count + slack
        if data.draw(st.booleans()):
            path = list(range(data.draw(st.integers(0, count))))
        else:
            path = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=20)))
        cache.keep(path)
        model += [numbers[i] for i in path]
        assert (cache.length, cache.pending) == (len(model), 0)
    assert cache.committed() == model
    assert cache.capacity <= limit + slack


def test_a_prefix_is_kept_without_moving_and_a_gap_moves_only_what_lies_behind_it() -> None:
    cache = NumberCache(64)
    cache.run([10, 11, 12, 13])
    cache.keep([0, 1, 2])
    assert cache.moved == 0
    cache.run([20, 21, 22, 23, 24])
    cache.keep([0, 1, 3, 4])
    assert cache.moved == 2
    assert cache.committed() == [10, 11, 12, 20, 21, 23, 24]


def test_capacity_doubles_up_to_the_limit() -> None:
    cache = NumberCache(1500, slack=1)
    while cache.length < 1500:
        cache.run([7] * 4)
        cache.keep(range(4))
    assert cache.grown == [FIRST_CAPACITY, 512, 1024, 1501]
    assert cache.committed() == [7] * 1500


def test_a_small_limit_bounds_the_first_allocation() -> None:
    cache = NumberCache(16)
    cache.run([1] * 16)
    assert cache.capacity == 16


@pytest.mark.parametrize("path", [[1, 0], [0, 0], [-1, 0], [3], [0, 1, 2, 3]])
def test_a_path_that_is_not_pending_or_does_not_ascend_is_refused(path: list[int]) -> None:
    cache = NumberCache(16)
    cache.run([1, 2, 3])
    with pytest.raises(ValueError, match="must ascend within the 3 pending positions"):
        cache.keep(path)
    assert (cache.length, cache.pending) == (0, 3)


def test_nothing_kept_drops_everything_and_may_be_said_twice() -> None:
    cache = NumberCache(16)
    cache.run([1, 2, 3])
    cache.keep(())
    cache.keep(())
    assert (cache.length, cache.pending) == (0, 0)


def test_rollback_drops_what_is_pending_and_knows_its_range() -> None:
    cache = NumberCache(16)
    cache.run([1, 2, 3])
    cache.keep(range(3))
    cache.run([4])
    cache.rollback(3)
    assert (cache.length, cache.pending) == (3, 0)
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"can't roll back to {length}: the cache holds 3"):
            cache.rollback(length)


def test_a_pass_must_be_settled_before_the_next() -> None:
    cache = NumberCache(16)
    cache.run([1])
    with pytest.raises(RuntimeError, match="1 positions are pending"):
        cache.run([2])


def test_a_closed_cache_refuses_everything_but_close() -> None:
    cache = NumberCache(16)
    cache.run([1])
    cache.close()
    cache.close()
    assert len(cache.store) == 0
    for use in (lambda: cache.keep(()), lambda: cache.rollback(0), lambda: cache.reserve(1)):
        with pytest.raises(RuntimeError, match="closed"):
            use()
