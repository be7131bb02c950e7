"""Small numbers as bytes: a coder's half that knows the numbers' usual size, the other half left to zstandard.

A number that is about 2**scale is split: its low bits are noise and are stored as they are; its high part
becomes a byte in the stream of all numbers of that scale, on which zstandard's Huffman coder comes within a few percent
of the entropy. Source: R. F. Rice, "Some practical universal noiseless coding techniques", 1979 (its unary code of the
high part is a Huffman code here).

What it does not do: choose scales: writer and reader are given the same.
"""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import zstandard

from etude.errors import StoreError

SCALES = 5
"""Streams of high parts. From the last scale on, so many low bits are noise that the high parts are all alike."""
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

    def numbers(self, values: np.ndarray, scale: int) -> None:
        """values: [count] unsigned, each below 2**32."""
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

    def noise(self, bits: np.ndarray) -> None:
        """bits: [count] of 0 and 1 that no coder makes smaller."""
        self._noise.append(np.packbits(bits.astype(bool, copy=False)))

    def flags(self, bits: np.ndarray) -> None:
        """bits: [count], mostly alike: eight of them make a symbol."""
        self._flags.append(np.packbits(bits))

    def squeezed(self) -> list[Squeezed]:
        return [squeeze(_joined(arrays)) for arrays in (self._flags, self._noise, self._wide, *self._high)]


class Reader:
    """What a Writer wrote, asked for in the same order. Errors of all methods: StoreError, if it is damaged."""

    def __init__(self, streams: list[Squeezed], limit: int) -> None:
        """limit: bytes that no stream exceeds."""
        if len(streams) != SCALES + 3:
            raise damaged(f"it has {len(streams)} streams")
        arrays = [unsqueeze(stream, limit) for stream in streams]
        self._flags, self._noise, self._wide, *self._high = (_Cursor(array) for array in arrays)

    def numbers(self, count: int, scale: int) -> np.ndarray:
        """[count] int64."""
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

    def noise(self, count: int) -> np.ndarray:
        """[count] uint8 of 0 and 1."""
        return np.unpackbits(self._noise.take(-(-count // 8)), count=count)

    def flags(self, count: int) -> np.ndarray:
        return np.unpackbits(self._flags.take(-(-count // 8)), count=count)

    def finish(self) -> None:
        """All must have been read."""
        if not all(cursor.is_empty for cursor in (self._flags, self._noise, self._wide, *self._high)):
            raise damaged("a stream is longer than what it holds")


class _Cursor:
    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def take(self, nbytes: int) -> np.ndarray:
        if nbytes > len(self._data):
            raise damaged("a stream ends too early")
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return taken

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
    streams: list[Squeezed] = []
