"""Small numbers as bytes: a coder's half that knows the numbers' usual size, the other half left to zstandard.

A number that is about 2**scale is split: its low bits are noise and are stored as they are; its high part
becomes a byte in the stream of all numbers of that scale, on which zstandard's Huffman coder comes within a few percent
of the entropy. Source: R. F. Rice, "Some practical universal noiseless coding techniques", 1979 (its unary code of the
high part is a Huffman code here).

Where numbers are few, a Huffman coder has not paid for its table yet: their high parts are written in unary.

What it does not do: choose scales: writer and reader are given the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import zstandard

from etude.errors import StoreError

SCALES = 5
"""Streams of high parts. From the last scale on, so many low bits are noise that the high parts are all alike."""
FEW = 256
"""Fewer numbers than that are written in unary."""
_LARGE = 255
"""A high part from here on lies in the stream of wide ones, less 255."""
_LEVEL = 3
_TINY = 32
"""Bytes that zstandard would not make fewer."""
Squeezed = tuple[int, bytes] | None
"""(bytes before zstandard, or -1 if stored as they are; bytes); None if there are none."""


def scale_of(mean: float) -> int:
    """Of numbers with this mean."""
    return int(mean + 1).bit_length() - 1


def damaged(why: str) -> StoreError:
    return StoreError("a difference between two versions is damaged", cause=why, hint="publish the version again")


class Writer:
    """Streams that grow. `squeezed` gives them all, in a fixed order."""

    def __init__(self) -> None:
        self._high: list[list[np.ndarray]] = [[] for _ in range(SCALES)]
        self._noise: list[np.ndarray] = []
        self._wide: list[np.ndarray] = []
        self._flags: list[np.ndarray] = []
        self._unary: list[np.ndarray] = []

    def numbers(self, values: np.ndarray, scale: int) -> None:
        """values: [count] unsigned, each below 2**32."""
        if len(values) < FEW:
            self._few_numbers(values.astype(np.int64), scale)
            return
        shift = max(scale - SCALES + 1, 0)
        high = values >> values.dtype.type(shift)
        for place in range(shift // 8):
            self._noise.append((values >> values.dtype.type(8 * place)).astype(np.uint8))
        for bit in range(shift // 8 * 8, shift):
            self.noise((values >> values.dtype.type(bit)) & values.dtype.type(1))
        if values.itemsize > 1:
            self._wide.append((high[high >= _LARGE] - values.dtype.type(_LARGE)).astype("<u4"))
            high = np.minimum(high, values.dtype.type(_LARGE)).astype(np.uint8)
        self._high[min(scale, SCALES - 1)].append(high)

    def _few_numbers(self, values: np.ndarray, scale: int) -> None:
        high = values >> scale
        self.noise(((values[:, None] >> np.arange(scale)) & 1).reshape(-1))
        self._wide.append((high[high >= _LARGE] - _LARGE).astype("<u4"))
        ends = np.cumsum(np.minimum(high, _LARGE) + 1)
        bits = np.zeros(ends[-1] if len(ends) else 0, bool)
        bits[ends - 1] = True
        self._unary.append(np.packbits(bits))

    def noise(self, bits: np.ndarray) -> None:
        """bits: [count] of 0 and 1 that no coder makes smaller."""
        self._noise.append(np.packbits(bits.astype(bool, copy=False)))

    def flags(self, bits: np.ndarray) -> None:
        """bits: [count], mostly alike: eight of them make a symbol."""
        self._flags.append(np.packbits(bits))

    def squeezed(self) -> list[Squeezed]:
        """The streams, without empty ones at the end."""
        streams = [
            squeeze(_joined(arrays)) for arrays in (self._noise, self._unary, self._flags, self._wide, *self._high)
        ]
        while streams and streams[-1] is None:
            streams.pop()
        return streams


class Reader:
    """What a Writer wrote, asked for in the same order. Errors of all methods: StoreError, if it is damaged."""

    def __init__(self, streams: list[Squeezed], limit: int) -> None:
        """limit: bytes that no stream exceeds."""
        if len(streams) > SCALES + 4:
            raise damaged(f"it has {len(streams)} streams")
        streams = streams + [None] * (SCALES + 4 - len(streams))
        self._all = [_Cursor(unsqueeze(stream, limit)) for stream in streams]
        self._noise, self._unary, self._flags, self._wide, *self._high = self._all

    def numbers(self, count: int, scale: int) -> np.ndarray:
        """[count] int64."""
        if count < FEW:
            return self._few_numbers(count, scale)
        shift = max(scale - SCALES + 1, 0)
        low = np.zeros(count, np.int64)
        for place in range(shift // 8):
            low |= self._noise.take(count).astype(np.int64) << (8 * place)
        for bit in range(shift // 8 * 8, shift):
            low |= self.noise(count).astype(np.int64) << bit
        values = self._high[min(scale, SCALES - 1)].take(count).astype(np.int64)
        large = np.flatnonzero(values == _LARGE)
        values[large] += self._wide.take(4 * len(large)).view("<u4")
        return (values << shift) | low

    def _few_numbers(self, count: int, scale: int) -> np.ndarray:
        low = self.noise(count * scale).astype(np.int64).reshape(count, scale) << np.arange(scale)
        high = self._unary.take_unary(count)
        large = np.flatnonzero(high == _LARGE)
        high[large] += self._wide.take(4 * len(large)).view("<u4")
        return (high << scale) | low.sum(axis=1, dtype=np.int64)

    def noise(self, count: int) -> np.ndarray:
        """[count] uint8 of 0 and 1."""
        return np.unpackbits(self._noise.take(-(-count // 8)), count=count)

    def flags(self, count: int) -> np.ndarray:
        return np.unpackbits(self._flags.take(-(-count // 8)), count=count)

    def finish(self) -> None:
        """All must have been read."""
        if not all(cursor.is_empty for cursor in self._all):
            raise damaged("a stream is longer than what it holds")


class _Cursor:
    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def take(self, nbytes: int) -> np.ndarray:
        if nbytes > len(self._data):
            raise damaged("a stream ends too early")
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return taken

    def take_unary(self, count: int) -> np.ndarray:
        """[count] int64: zeros before each one; the bits after the last one of a byte belong to nobody."""
        ones = np.flatnonzero(np.unpackbits(self._data[: count * (_LARGE + 8) // 8 + 1]))[:count]
        if len(ones) < count:
            raise damaged("a stream ends too early")
        self.take(int(ones[-1]) // 8 + 1 if count else 0)
        return np.diff(ones, prepend=-1) - 1

    @property
    def is_empty(self) -> bool:
        return not len(self._data)


_threads = threading.local()


def squeeze(data: np.ndarray) -> Squeezed:
    """Through zstandard, if that makes it smaller."""
    raw = data.tobytes()
    if not raw:
        return None
    if len(raw) < _TINY:
        return -1, raw
    if not hasattr(_threads, "compressor"):  # making one costs more than a small stream
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False
        )
        _threads.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    small = _threads.compressor.compress(raw)
    return (len(raw), small) if len(small) < len(raw) else (-1, raw)


def unsqueeze(stream: Squeezed, limit: int) -> np.ndarray:
    """[bytes] uint8. Errors: StoreError if it is damaged, or would be longer than `limit`."""
    if stream is None:
        return np.zeros(0, np.uint8)
    size, data = stream
    if size < 0:
        return np.frombuffer(data, np.uint8)
    if size > limit:
        raise damaged(f"a stream claims {size} bytes")
    try:
        raw = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS).decompress(
            data, max_output_size=max(size, 1)
        )
    except zstandard.ZstdError as error:
        raise damaged(str(error)) from error
    if len(raw) != size:
        raise damaged(f"a stream holds {len(raw)} bytes instead of {size}")
    return np.frombuffer(raw, np.uint8)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.view(np.uint8) for array in arrays]) if arrays else np.zeros(0, np.uint8)


class Coded(msgspec.Struct, array_like=True):
    """A difference as it lies in a blob."""

    kind: int
    counts: list[int] = []
    """changes: changed elements of each kind."""
    scales: list[int] = []
    """changes: of each kind that has any, the scale of their sizes; none if all are 0."""
    sizes: list[int] = []
    """Of the streams, see `pack`."""
    packed: bytes = b""
    """All streams, one after the other."""


def pack(streams: Sequence[Squeezed]) -> tuple[list[int], bytes]:
    """(sizes, all the bytes). Sizes: of each stream twice its size before zstandard, odd if zstandard made it smaller,
    and then its size after."""
    sizes: list[int] = []
    for size, data in (stream or (-1, b"") for stream in streams):
        sizes += [2 * len(data)] if size < 0 else [2 * size + 1, len(data)]
    return sizes, b"".join(stream[1] for stream in streams if stream)


def unpack(sizes: Sequence[int], packed: bytes) -> list[Squeezed]:
    """The inverse. Errors: StoreError if the two do not fit."""
    streams: list[Squeezed] = []
    given, at = iter(sizes), 0
    for doubled in given:
        is_smaller = doubled & 1
        after = next(given, -1) if is_smaller else doubled >> 1
        if not 0 <= after <= len(packed) - at or doubled < 0:
            raise damaged("a stream ends too early")
        data, at = packed[at : at + after], at + after
        streams.append((doubled >> 1 if is_smaller else -1, data) if data or is_smaller else None)
    if at != len(packed):
        raise damaged("something follows its streams")
    return streams
