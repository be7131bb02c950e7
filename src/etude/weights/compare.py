"""What changed between two versions, tensor by tensor, and how few bytes could say it. For `etude weights diff`.

The bound is that of a code which knows how many elements of a tensor change, and how often each pattern of changed
bits occurs, but not which elements are likely to change:

    elements * H2(changed share) + changed * H0(old XOR new)          bits, H2 and H0 entropies

Etude's own code does know more (weights/delta.py), and comes out below it where exponents tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from etude.errors import StoreError
from etude.weights import delta
from etude.weights.pieces import Stored, cut


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor of two versions."""

    name: str
    dtype: str
    elements: int
    changed: int
    coded_bytes: int
    """As `delta` codes it."""
    bound_bytes: float

    @property
    def nbytes(self) -> int:
        """In memory."""
        return self.elements * delta.LAYOUTS[self.dtype].bits.itemsize


def compare(old: Mapping[str, Stored], new: Mapping[str, Stored]) -> Iterator[TensorChange]:
    """By name. Errors: StoreError if the two do not have the same tensors."""
    if odd := sorted(old.keys() ^ new.keys()):
        raise StoreError("the two versions have other tensors", cause=f"{odd[0]} is in one of them")
    for name in sorted(new):
        before, after = old[name], new[name]
        if (before.dtype, before.array.shape) != (after.dtype, after.array.shape):
            raise StoreError(f"{name} has another dtype or shape in the second version")
        coded = sum(
            len(delta.encode(was.data, now.data, now.dtype))
            for was, now in zip(cut({name: before}), cut({name: after}), strict=True)
        )
        bits = delta.LAYOUTS[after.dtype].bits
        was, now = (np.ascontiguousarray(t.array).reshape(-1).view(bits) for t in (before, after))
        changed = was != now
        yield TensorChange(
            name, after.dtype, now.size, int(changed.sum()), coded, _bound(now.size, (was ^ now)[changed]) / 8
        )


def _bound(elements: int, patterns: np.ndarray) -> float:
    """Bits."""
    if not len(patterns):
        return 0.0
    share = np.array([len(patterns), elements - len(patterns)]) / elements
    _, counts = np.unique(patterns, return_counts=True)
    return elements * _entropy(share) + len(patterns) * _entropy(counts / len(patterns))


def _entropy(shares: np.ndarray) -> float:
    """Bits a symbol."""
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())
