"""Which contexts hold KV of a given beginning: an index over blocks of ids, for sharing among siblings.

A context is listed under the hash of its first block, of its first two blocks, and so on. Only KV of the serving
version is ever listed: a swap clears the index.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np

BLOCK = 16
"""Tokens."""
H = TypeVar("H")


def block_keys(ids: np.ndarray) -> list[int]:
    """A hash of the ids up to each block boundary. Equal keys do not prove equal ids: compare them."""
    keys: list[int] = []
    key = 0
    data = np.ascontiguousarray(ids, np.int32).tobytes()
    for end in range(4 * BLOCK, len(data) + 1, 4 * BLOCK):
        key = hash((key, data[end - 4 * BLOCK : end]))
        keys.append(key)
    return keys


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Number of equal ids at the start."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class PrefixIndex(Generic[H]):
    """Block key -> holders, the one that came first in front."""

    def __init__(self) -> None:
        self._holders: dict[int, list[H]] = {}
        self._keys: dict[int, list[int]] = {}

    def add(self, holder: H, ids: np.ndarray) -> None:
        """List `holder` under every block of `ids`; blocks that it is listed under already are skipped."""
        listed = self._keys.setdefault(id(holder), [])
        for key in block_keys(ids)[len(listed) :]:
            listed.append(key)
            self._holders.setdefault(key, []).append(holder)

    def remove(self, holder: H) -> None:
        for key in self._keys.pop(id(holder), ()):
            holders = self._holders[key]
            holders.remove(holder)
            if not holders:
                del self._holders[key]

    def find(self, ids: np.ndarray) -> H | None:
        """The holder of the longest listed beginning of `ids`."""
        for key in reversed(block_keys(ids)):
            if holders := self._holders.get(key):
                return holders[0]
        return None

    def clear(self) -> None:
        self._holders.clear()
        self._keys.clear()
