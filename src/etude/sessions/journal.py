"""A local append-only log in which entries are durable before a database has them.

    FOLDER/000000.log 000001.log ...     segment = "etude journal 1\\n" record*
                                         record  = length (4 bytes, big-endian) blake2b-64 of the body (8) body

    append(bodies) --one write, one sync--> durable      many callers share the sync (recorder.py groups them)
    batch() --> bodies not yet done, oldest first --> done(batch) --> a finished segment is deleted

A record is whole or it is ignored: what a kill cut off at the end of a segment was never promised to anybody, and after
a write that failed the segment is cut back to what was synced. Progress is not written down: after a restart every
record that is still there comes again, and unique ids make that harmless. One process has the folder at a time.

What it does not do: read bodies, wait, or try again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import StoreError
from etude.frames import append_bytes
from etude.types import FORMAT

_HEADER = f"etude journal {FORMAT}\n".encode()
_HEAD_BYTES = 12
SEGMENT_BYTES = 16 << 20
"""A segment that has grown beyond this is closed and the next one opened."""
BATCH_BYTES, BATCH_RECORDS = 8 << 20, 500
"""What `batch` gives at most; one record more may be longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Bodies of one segment, from one byte of it to another."""

    segment: int
    bodies: tuple[bytes, ...]
    end: int


@dataclass(slots=True)
class _Segment:
    path: Path
    size: int
    """Bytes that are synced."""
    is_closed: bool
    done: int = len(_HEADER)
    """What lies before this byte was dealt with."""


class Journal:
    """`append` may run in one thread while another uses `batch` and `done`. Errors: StoreError."""

    def __init__(self, folder: Path) -> None:
        """Takes what an earlier life left. Errors: StoreError if another process has it, or it is of another format."""
        self.folder = folder
        self.damaged: list[Path] = []
        """Segments with something in them that is neither a record nor a cut tail: kept beside, not deleted."""
        self._lock = threading.Lock()
        self._file: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot keep a journal in {folder}", cause=str(error)) from error
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._owner)
            hint = "give each process a journal of its own"
            raise StoreError(f"{folder} is another process's journal", cause=str(error), hint=hint) from error
        try:
            self._segments = {int(path.stem): _opened(path) for path in sorted(folder.glob("[0-9]*.log"))}
        except StoreError:
            os.close(self._owner)
            raise
        self._next = max(self._segments, default=-1) + 1

    def append(self, bodies: Sequence[bytes]) -> None:
        """Durable when it returns. Errors: StoreError if the disk is full or broken; then none of them is kept."""
        data = b"".join(_record(body) for body in bodies)
        try:
            segment = self._active()
            append_bytes(self._file, data)  # type: ignore[arg-type]  # opened by the line before
            os.fdatasync(self._file)  # type: ignore[arg-type]
        except OSError as error:
            self._cut_back()
            raise StoreError(
                f"cannot write to {self.folder}", cause=str(error), hint="free space on its disk; nothing was kept"
            ) from error
        with self._lock:
            segment.size += len(data)
        if segment.size > SEGMENT_BYTES:
            self._close_segment()

    def batch(self) -> Batch | None:
        """The oldest records that are not done; None if all are."""
        while True:
            with self._lock:
                number = min(self._segments, default=None)
                segment = None if number is None else self._segments[number]
                size = 0 if segment is None else segment.size
            if number is None or segment is None:
                return None
            bodies, end = [], segment.done
            for body, after in _records(segment.path, segment.done, size):
                bodies.append(body)
                end = after
                if len(bodies) >= BATCH_RECORDS or end - segment.done >= BATCH_BYTES:
                    break
            if bodies:
                return Batch(segment=number, bodies=tuple(bodies), end=end)
            if not segment.is_closed:
                return None
            self._retire(number, segment, end)

    def done(self, batch: Batch) -> None:
        """These records need not come again."""
        self._segments[batch.segment].done = batch.end

    def bodies(self) -> Iterator[bytes]:
        """All that is not done, oldest first."""
        for _, segment in sorted(self._segments.items()):
            yield from (body for body, _ in _records(segment.path, segment.done, segment.size))

    def waiting(self) -> int:
        """Bytes that are not done."""
        with self._lock:
            return sum(max(0, segment.size - segment.done) for segment in self._segments.values())

    def close(self) -> None:
        """Deletes what is done, keeps the rest for the next life, and lets go of the folder."""
        self._close_segment()
        while self.batch() is None and self._segments:
            pass
        os.close(self._owner)

    def _active(self) -> _Segment:
        """The segment that is written to; a new one if need be."""
        if self._file is None:
            path = self.folder / f"{self._next:06d}.log"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with self._lock:
                self._segments[self._next] = _Segment(path, 0, is_closed=False)
            self._next += 1
            append_bytes(self._file, _HEADER)
            os.fsync(self._file)
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)  # else a power cut could take the file's name away
            finally:
                os.close(folder)
            with self._lock:
                self._segments[self._next - 1].size = len(_HEADER)
        return self._segments[self._next - 1]

    def _cut_back(self) -> None:
        """After a failed write nobody may find half of it; after a failed sync the file is not to be trusted."""
        if self._file is not None:
            segment = self._segments[self._next - 1]
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, segment.size)
            self._close_segment()

    def _close_segment(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with self._lock:
                self._segments[self._next - 1].is_closed = True

    def _retire(self, number: int, segment: _Segment, end: int) -> None:
        with self._lock:
            del self._segments[number]
        with contextlib.suppress(FileNotFoundError):
            if _is_cut_tail(segment.path, end, segment.size):
                segment.path.unlink()
            else:
                kept = segment.path.with_suffix(".damaged")
                segment.path.rename(kept)
                self.damaged.append(kept)


def _record(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + hashlib.blake2b(body, digest_size=8).digest() + body


def _opened(path: Path) -> _Segment:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(len(_HEADER))
    except OSError as error:
        raise StoreError(f"cannot read {path}", cause=str(error)) from error
    if header != _HEADER and not _HEADER.startswith(header.rstrip(b"\0")):
        hint = f"this Etude reads format = {FORMAT}; move it away"
        raise StoreError(f"{path} is no journal in format {FORMAT}", cause=f"it begins with {header!r}", hint=hint)
    return _Segment(path, size, is_closed=True)


def _records(path: Path, start: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Whole records from byte `start` on, each with the byte after it."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            while start + _HEAD_BYTES <= size:
                head = file.read(_HEAD_BYTES)
                length = int.from_bytes(head[:4], "big")
                if start + _HEAD_BYTES + length > size:
                    return
                body = file.read(length)
                if hashlib.blake2b(body, digest_size=8).digest() != head[4:]:
                    return
                start += _HEAD_BYTES + length
                yield body, start
    except OSError as error:
        raise StoreError(f"cannot read {path}", cause=str(error)) from error


def _is_cut_tail(path: Path, start: int, size: int) -> bool:
    """Whether what follows the last whole record is less than one, or zeros: what a kill or a power cut leaves."""
    if size <= start:
        return True
    with path.open("rb") as file:
        file.seek(start)
        rest = file.read()
    length = int.from_bytes(rest[:4], "big")
    return len(rest) < _HEAD_BYTES + length or not rest.strip(b"\0")
