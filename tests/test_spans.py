"""Reading trees: depth and ancestry of each node."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd.models.spans import ancestor_mask, depths
from hvd.types import Int32Array


@st.composite
def trees(draw: st.DrawFn) -> Int32Array:
    size = draw(st.integers(1, 40))
    return np.array([draw(st.integers(-1, i - 1)) for i in range(size)], dtype=np.int32)


def test_a_known_tree() -> None:
    parents = np.array([-1, 0, 0, 1, -1, 4], np.int32)
    assert depths(parents).tolist() == [0, 1, 1, 2, 0, 1]
    assert [np.flatnonzero(row).tolist() for row in ancestor_mask(parents)] == [
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 3],
        [4],
        [4, 5],
    ]


def test_a_chain_attends_to_all_before_it() -> None:
    parents = np.arange(-1, 9, dtype=np.int32)
    assert depths(parents).tolist() == list(range(10))
    np.testing.assert_array_equal(ancestor_mask(parents), np.tri(10, dtype=bool))


@given(trees())
def test_each_node_sees_itself_and_as_many_ancestors_as_it_is_deep(parents: Int32Array) -> None:
    mask, depth = ancestor_mask(parents), depths(parents)
    np.testing.assert_array_equal(mask.sum(axis=1), depth + 1)
    for node, parent in enumerate(parents):
        expected = np.zeros(len(parents), dtype=bool) if parent < 0 else mask[parent].copy()
        expected[node] = True
        np.testing.assert_array_equal(mask[node], expected)
