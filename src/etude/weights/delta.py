"""Lossless differences between two versions of a tensor: pure functions of bytes and a dtype's name.

    encode(old, new, "BF16") -> coded          decode(old, coded, "BF16", out)          old None: from nothing

After a small optimizer step few 16-bit weights change, most of them by one unit in the last place. Which ones is hardly
random: a weight near 0 has fine units and moves at every step, a large one hardly ever. So elements are told apart by
their old exponent, which both sides know, and each kind is coded at its own density. The smallest of these is taken
(but `changes` are not tried where nearly all changes, nor for wide integers and doubles):

    unchanged   nothing
    changes     for each kind the gaps between changed elements (where many change: a bit each), then signs and sizes
                of the changes, in units of the last place
    planes      old XOR new, turned by a bit, so that the exponent has a byte of its own; byte by byte
    raw         the new bytes

Streams of bytes go through zstandard. `changes` can be a third smaller than the entropy of positions and changed bits
taken alone, since that does not know of exponents (benchmarks/delta.py measures it). XOR and planes: as in ARCv3.

Memory: some numbers for each changed element and scratch for CHUNK elements. Callers run pieces side by side: numpy and
zstandard let go of the interpreter. What it does not do: know what a version is (publish.py), or hide damage: whoever
decodes compares the digest of what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.weights.rice import Coded, Reader, Squeezed, Writer, damaged, pack, scale_of, squeeze, unpack, unsqueeze

CHUNK = 1 << 18
"""Elements looked at together: they and their flags stay in a core's cache."""
Data = bytes | bytearray | memoryview | np.ndarray
_UNCHANGED, _CHANGES, _PLANES, _RAW = range(4)
_RARE = 0.002
"""The smallest exponents that together so few elements have count as one kind, and the largest too."""
_MOST_KINDS, _CHANGES_A_KIND = 16, 32
"""At most so many kinds, and fewer where little changed: each costs time, and a few bytes."""
_SAMPLE = 1 << 16
_DENSE = 1 / 3
"""Share of changed elements from which each element has a bit of its own."""
_MOST = 0.75
"""Share of changed elements from which planes, at several times the speed, are at most a tenth larger than changes."""
_WORTHWHILE = 0.3
"""Share of the full size from which planes are tried too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The unsigned integers that a dtype's bits are seen as, and where in them the exponent lies."""

    bits: np.dtype
    shift: int = 0
    exponent_bits: int = 0
    """0: all elements are of one kind."""


LAYOUTS = {
    "F64": Layout(np.dtype("<u8")), "F32": Layout(np.dtype("<u4"), 23, 8), "BF16": Layout(np.dtype("<u2"), 7, 8),
    "F16": Layout(np.dtype("<u2"), 10, 5), "F8_E4M3": Layout(np.dtype("u1"), 3, 4),
    "F8_E5M2": Layout(np.dtype("u1"), 2, 5), "I64": Layout(np.dtype("<u8")), "I32": Layout(np.dtype("<u4")),
    "U8": Layout(np.dtype("u1")), "BOOL": Layout(np.dtype("u1")),
}  # fmt: skip
"""safetensors name -> layout."""


def encode(old: Data | None, new: Data, dtype: str) -> bytes:
    """What turns `old` into `new`, two tensors of one dtype and size, flat; None: all zeros."""
    layout = LAYOUTS[dtype]
    after = np.frombuffer(new, layout.bits)
    if old is None:
        return min(_planes(None, after), _raw(after), key=len)
    before = np.frombuffer(old, layout.bits)
    if len(before) != len(after):
        raise ValueError(f"{len(before)} and {len(after)} elements cannot be compared")
    changed = int(np.count_nonzero(before != after))
    if not changed:
        return _packed(Coded(_UNCHANGED))
    if before.itemsize > 4 or changed > _MOST * len(before):
        return min(_planes(before, after), _raw(after), key=len)
    found = _changes(before, after, _Kinds.of(before, layout, min(max(changed // _CHANGES_A_KIND, 1), _MOST_KINDS)))
    if len(found) > _WORTHWHILE * before.nbytes:
        found = min(found, _planes(before, after), _raw(after), key=len)
    return found


def decode(old: Data | None, coded: bytes | memoryview, dtype: str, out: np.ndarray) -> None:
    """Put the new tensor into `out`, [elements] of the dtype's size, contiguous; it may be `old`'s own memory.

    Errors: StoreError if what was coded is damaged, or no difference from `old`; `out` may be anything then.
    """
    layout = LAYOUTS[dtype]
    after = out.view(layout.bits)
    before = None if old is None else np.frombuffer(old, layout.bits)
    try:
        parts = msgspec.msgpack.decode(coded, type=Coded)
    except msgspec.MsgspecError as error:
        raise damaged(str(error)) from error
    streams = unpack(parts.sizes, parts.packed)
    if parts.kind == _UNCHANGED and before is not None:
        after[:] = before
    elif parts.kind == _CHANGES and before is not None and before.itemsize <= 4:
        _apply_changes(before, parts, streams, layout, after)
    elif parts.kind == _PLANES:
        _apply_planes(before, streams, after)
    elif parts.kind == _RAW and len(streams) == 1:
        after[:] = _of_size(unsqueeze(streams[0], after.nbytes), after.nbytes).view(layout.bits)
    else:
        raise damaged(f"{parts.kind} is no kind of difference here")


def _packed(coded: Coded) -> bytes:
    return msgspec.msgpack.encode(coded)


# Kinds: exponents of the old tensor


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Exponents from `lowest` to `highest`; what lies beyond is counted with these. How many at most is the coder's
    choice, and the decoder sees it from what was coded."""

    layout: Layout
    lowest: int
    highest: int

    @classmethod
    def of(cls, bits: np.ndarray, layout: Layout, most: int) -> _Kinds:
        if not layout.exponent_bits:
            return cls(layout, 0, 0)
        sample = _exponents(bits[:: max(1, len(bits) // _SAMPLE)], layout)
        counts = np.bincount(sample, minlength=1 << layout.exponent_bits)
        rare = _RARE * len(sample)
        lowest = int(np.argmax(np.cumsum(counts) > rare))
        highest = len(counts) - 1 - int(np.argmax(np.cumsum(counts[::-1]) > rare))
        return cls(layout, max(lowest, highest - most + 1), max(lowest, highest))

    @property
    def count(self) -> int:
        return self.highest - self.lowest + 1

    def of_each(self, bits: np.ndarray) -> np.ndarray:
        """[count] uint8."""
        if not self.layout.exponent_bits:
            return np.zeros(len(bits), np.uint8)
        exponents = _exponents(bits, self.layout)
        return np.clip(exponents, self.lowest, self.highest, out=exponents) - np.uint8(self.lowest)


def _exponents(bits: np.ndarray, layout: Layout) -> np.ndarray:
    shifted = (bits >> bits.dtype.type(layout.shift)).astype(np.uint8)
    return shifted & np.uint8((1 << layout.exponent_bits) - 1)


def _chunks(length: int) -> Iterator[slice]:
    for start in range(0, length, CHUNK):
        yield slice(start, min(start + CHUNK, length))


# Changes


@dataclass(slots=True)
class _Changed:
    """The changed elements of one kind."""

    size: int
    """Elements of the kind, changed or not."""
    ranks: list[np.ndarray]
    """How many elements of the kind lie before each; rising."""
    steps: list[np.ndarray]
    """new - old, wrapped."""


def _find(before: np.ndarray, after: np.ndarray, kinds: _Kinds) -> list[_Changed]:
    found = [_Changed(0, [], []) for _ in range(kinds.count)]
    for chunk in _chunks(len(before)):
        old, new = before[chunk], after[chunk]
        kind_of_each = kinds.of_each(old)
        index = np.flatnonzero(old != new)
        kind_of_changed, step = kind_of_each[index], new[index] - old[index]
        word, bit = index >> 6, (index & 63).astype(np.uint64)
        below = (np.uint64(1) << bit) - np.uint64(1)
        for number, kind in enumerate(found):
            words = _as_words(kind_of_each == number)
            ones = np.bitwise_count(words)
            ends = np.cumsum(ones, dtype=np.uint32)
            mine = np.flatnonzero(kind_of_changed == number)
            if len(mine) == ends[-1]:  # all of the kind
                rank = np.arange(len(mine), dtype=np.uint32)
            else:
                at = word[mine]
                rank = ends[at] - ones[at] + np.bitwise_count(words[at] & below[mine])
            if len(mine):
                kind.ranks.append(rank + np.uint32(kind.size))
                kind.steps.append(step[mine])
            kind.size += int(ends[-1])
    return found


def _as_words(flags: np.ndarray) -> np.ndarray:
    """[ceil(count / 64)] uint64, the first flag in the lowest bit."""
    packed = np.packbits(flags, bitorder="little")
    return np.concatenate((packed, np.zeros(-len(packed) % 8, np.uint8))).view("<u8")


def _changes(before: np.ndarray, after: np.ndarray, kinds: _Kinds) -> bytes:
    counts, scales, writer = [], [], Writer()
    for kind in _find(before, after, kinds):
        count = sum(map(len, kind.ranks))
        counts.append(count)
        if count:
            ranks, kind.ranks = np.concatenate(kind.ranks), []
            _write_places(writer, ranks, kind.size)
            steps, kind.steps = np.concatenate(kind.steps), []
            scales.append(_write_steps(writer, steps))
    return _packed(Coded(_CHANGES, counts, scales if any(scales) else [], *pack(writer.squeezed())))


def _write_places(writer: Writer, ranks: np.ndarray, size: int) -> None:
    if len(ranks) == size:
        return
    if len(ranks) > _DENSE * size:
        flags = np.zeros(size, bool)
        flags[ranks] = True
        writer.flags(flags)
    else:
        gaps = np.diff(ranks, prepend=np.uint32(0xFFFFFFFF)) - np.uint32(1)  # the first one is the first rank
        writer.numbers(gaps, _gap_scale(len(ranks), size))


def _read_places(reader: Reader, count: int, size: int) -> np.ndarray:
    """Ranks, rising."""
    if count == size:
        return np.arange(size)
    if count > _DENSE * size:
        ranks = np.flatnonzero(reader.flags(size))
    else:
        ranks = np.cumsum(reader.numbers(count, _gap_scale(count, size)) + 1) - 1
    if len(ranks) != count or ranks[-1] >= size:
        raise damaged("changed elements lie outside the tensor")
    return ranks


def _gap_scale(count: int, size: int) -> int:
    return scale_of((size - count) / (count + 1))


def _write_steps(writer: Writer, steps: np.ndarray) -> int:
    """Signs and sizes; returns the scale of the sizes."""
    one = steps.dtype.type(1)
    is_down = steps >> steps.dtype.type(8 * steps.itemsize - 1)
    writer.noise(is_down)
    beyond = np.where(is_down, ~steps + one, steps) - one
    scale = scale_of(float(beyond.mean()))
    if scale == 0:  # nearly all are single units
        more = beyond > 0
        writer.flags(more)
        beyond = beyond[more] - one
    writer.numbers(beyond, scale)
    return scale


def _read_steps(reader: Reader, count: int, scale: int, dtype: np.dtype) -> np.ndarray:
    is_down = reader.noise(count).astype(bool)
    if scale == 0:
        beyond = reader.flags(count).astype(np.int64)
        more = np.flatnonzero(beyond)
        beyond[more] += reader.numbers(len(more), scale)
    else:
        beyond = reader.numbers(count, scale)
    size = beyond + 1
    return np.where(is_down, -size, size).astype(dtype)


def _apply_changes(
    before: np.ndarray, coded: Coded, streams: list[Squeezed], layout: Layout, after: np.ndarray
) -> None:
    if not 1 <= len(coded.counts) <= _MOST_KINDS:
        raise damaged(f"it has {len(coded.counts)} kinds of elements")
    kinds = _Kinds.of(before, layout, len(coded.counts))
    reader = Reader(streams, limit=8 * len(before) + 8)
    sizes = np.zeros(kinds.count, np.int64)
    for chunk in _chunks(len(before)):
        sizes += np.bincount(kinds.of_each(before[chunk]), minlength=kinds.count)
    if len(coded.counts) != kinds.count or any(not 0 <= c <= s for c, s in zip(coded.counts, sizes, strict=True)):
        raise damaged("its counts are not those of the tensor it is applied to")
    scales = iter(coded.scales or [0] * kinds.count)
    pending: list[tuple[int, np.ndarray, np.ndarray]] = []
    for number, count in enumerate(coded.counts):
        if count:
            scale = next(scales, -1)
            if not 0 <= scale <= 8 * before.itemsize:
                raise damaged("a scale is missing")
            ranks = _read_places(reader, count, int(sizes[number]))
            pending.append((number, ranks, _read_steps(reader, count, scale, before.dtype)))
    reader.finish()
    _place(before, kinds, pending, after)


def _place(
    before: np.ndarray, kinds: _Kinds, pending: list[tuple[int, np.ndarray, np.ndarray]], after: np.ndarray
) -> None:
    """Add steps to the elements of each kind that have the given ranks."""
    seen = dict.fromkeys((number for number, _, _ in pending), 0)
    done = dict(seen)
    for chunk in _chunks(len(before)):
        kind_of_each = kinds.of_each(before[chunk])
        after[chunk] = before[chunk]
        for number, ranks, steps in pending:
            index = np.flatnonzero(kind_of_each == number)
            first, last = done[number], int(np.searchsorted(ranks, seen[number] + len(index)))
            at = chunk.start + index[ranks[first:last] - seen[number]]
            after[at] += steps[first:last]
            seen[number] += len(index)
            done[number] = last


# Planes, raw


def _planes(before: np.ndarray | None, after: np.ndarray) -> bytes:
    """XOR, turned left by a bit: the sign joins the mantissa's end, and an exponent of 8 bits fills the top byte."""
    mixed = after if before is None else before ^ after
    one, rest = mixed.dtype.type(1), mixed.dtype.type(8 * mixed.itemsize - 1)
    turned = ((mixed << one) | (mixed >> rest)).view(np.uint8).reshape(-1, mixed.itemsize)
    return _packed(Coded(_PLANES, [], [], *pack([squeeze(turned[:, place]) for place in range(mixed.itemsize)])))


def _apply_planes(before: np.ndarray | None, streams: list[Squeezed], after: np.ndarray) -> None:
    if len(streams) != after.itemsize:
        raise damaged(f"it has {len(streams)} planes")
    turned = np.empty((len(after), after.itemsize), np.uint8)
    for place, stream in enumerate(streams):
        turned[:, place] = _of_size(unsqueeze(stream, len(after)), len(after))
    mixed = turned.view(after.dtype)[:, 0]
    one, rest = mixed.dtype.type(1), mixed.dtype.type(8 * mixed.itemsize - 1)
    mixed = (mixed >> one) | (mixed << rest)
    after[:] = mixed if before is None else before ^ mixed


def _raw(after: np.ndarray) -> bytes:
    return _packed(Coded(_RAW, [], [], *pack([squeeze(after)])))


def _of_size(data: np.ndarray, nbytes: int) -> np.ndarray:
    if len(data) != nbytes:
        raise damaged(f"{len(data)} bytes instead of {nbytes}")
    return data
