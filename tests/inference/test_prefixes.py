"""The index of beginnings."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.prefixes import BLOCK, PrefixIndex, block_keys, common_length

IDS = st.lists(st.integers(0, 2), max_size=20)


@given(IDS, IDS)
def test_common_length_counts_equal_ids_at_the_start(one: list[int], other: list[int]) -> None:
    length = common_length(np.array(one, np.int32), np.array(other, np.int32))
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_keys_of_equal_beginnings_are_equal_and_of_others_not() -> None:
    ids = np.arange(5 * BLOCK + 3, dtype=np.int32)
    changed = ids.copy()
    changed[2 * BLOCK] = 99
    one, other = block_keys(ids), block_keys(changed)
    assert len(one) == 5
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_the_longest_beginning_and_the_first_holder_win() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    ids = np.arange(4 * BLOCK, dtype=np.int32)
    long, short = "long", "short"
    index.add(short, ids[: 2 * BLOCK])
    index.add(long, ids)
    assert index.find(ids) == long
    assert index.find(ids[: 2 * BLOCK]) == short
    assert index.find(ids[: BLOCK - 1]) is None
    assert index.find(ids + 1) is None


def test_a_removed_holder_is_found_no_more_and_others_stay() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    ids = np.arange(3 * BLOCK, dtype=np.int32)
    one, two = "one", "two"
    index.add(one, ids)
    index.add(two, ids)
    index.remove(one)
    assert index.find(ids) == two
    index.remove(two)
    index.remove(two)
    assert index.find(ids) is None


def test_a_holder_that_grew_is_listed_under_its_new_blocks() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    ids = np.arange(3 * BLOCK, dtype=np.int32)
    index.add("one", ids[:BLOCK])
    index.add("one", ids)
    index.remove("one")
    assert index.find(ids) is None
