"""Tensors as the weight store sees them: bytes with a dtype's name, cut into pieces, packed into blobs.

    Snapshot --cut--> pieces of at most PIECE_BYTES --coded (upload.py)--> bytes --Packer--> blobs

A rank of a sharded trainer holds a stretch of each tensor: `Stored` says which. The same tensors give the same pieces,
so that what did not change has the digest that it had. numpy alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from etude.errors import StoreError
from etude.types import Part
from etude.weights.manifests import digest_bytes

PIECE_BYTES = 8 << 20
"""Tensors larger than this are cut: pieces are coded side by side, and one bounds the memory that coding takes."""
BLOB_BYTES = 16 << 20
"""Coded pieces share blobs up to this size."""
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"), "I64": np.dtype("<i8"), "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
"""safetensors name -> how numpy holds it. What numpy does not know travels as its bits, in unsigned integers."""
assert sys.byteorder == "little", "blobs hold little-endian numbers as they lie in memory"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor, or one rank's stretch of it: numbers as numpy can hold them, and the name of what they really are."""

    dtype: str
    array: np.ndarray
    shape: tuple[int, ...] | None = None
    """Of the whole tensor, where `array` is a stretch of it; else the array's own."""
    offset: int = 0
    """Elements of the whole, flat, that lie before the stretch."""

    def __post_init__(self) -> None:
        if DTYPES.get(self.dtype) != self.array.dtype:
            raise StoreError(f"a tensor of {self.array.dtype} cannot be published as {self.dtype}")

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.array.shape if self.shape is None else self.shape

    def copy(self) -> Stored:
        return Stored(self.dtype, self.array.copy(), self.shape, self.offset)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All tensors of one step, which nobody changes any more."""

    step: int
    tensors: Mapping[str, Stored]

    @classmethod
    def take(cls, step: int, tensors: Mapping[str, Stored]) -> Snapshot:
        """Copy the bytes."""
        return cls(step, {name: tensor.copy() for name, tensor in sorted(tensors.items())})


Place = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype, shape, offset, count: equal for the same piece of two versions."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [offset, offset + count) of a tensor, flat."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: np.ndarray
    """[bytes] uint8, a view."""

    @property
    def count(self) -> int:
        return len(self.data) // DTYPES[self.dtype].itemsize

    @property
    def place(self) -> Place:
        return (self.name, self.dtype, self.shape, self.offset, self.count)

    def part(self, digest: str) -> Part:
        """Without a place in a blob."""
        return Part(name=self.name, dtype=self.dtype, shape=self.shape, offset=self.offset, count=self.count,
                    digest=digest, blob="", start=0, nbytes=0)  # fmt: skip


def place_of(part: Part) -> Place:
    """`Piece.place` of the piece that the part describes."""
    return (part.name, part.dtype, part.shape, part.offset, part.count)


def cut(tensors: Mapping[str, Stored], limit: int = PIECE_BYTES) -> Iterator[Piece]:
    """By name and offset. An empty tensor has one empty piece."""
    for name, tensor in sorted(tensors.items()):
        flat = np.ascontiguousarray(tensor.array).reshape(-1)
        step = limit // flat.itemsize
        for start in range(0, max(flat.size, 1), step):
            data = flat[start : start + step].view(np.uint8)
            yield Piece(name, tensor.dtype, tensor.whole_shape, tensor.offset + start, data)


@dataclass(frozen=True, slots=True)
class Blob:
    """Coded pieces, one after the other. `parts` say where each lies, in a blob that has no name yet."""

    digest: str
    data: bytes
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Packer:
    """Coded pieces -> blobs of at most BLOB_BYTES, in the order in which they come."""

    limit: int = BLOB_BYTES
    _parts: list[Part] = field(default_factory=list)
    _data: list[bytes] = field(default_factory=list)
    _filled: int = 0

    def add(self, part: Part, data: bytes) -> Iterator[Blob]:
        """The blob that is full, if one is."""
        if self._filled and self._filled + len(data) > self.limit:
            yield from self.rest()
        self._parts.append(msgspec.structs.replace(part, start=self._filled, nbytes=len(data)))
        self._data.append(data)
        self._filled += len(data)

    def rest(self) -> Iterator[Blob]:
        """What is left, if anything."""
        if self._parts:
            data = b"".join(self._data)
            yield Blob(digest_bytes(data), data, tuple(self._parts))
        self._parts, self._data, self._filled = [], [], 0
