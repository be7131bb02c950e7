"""Episodes on disk: append-only segments that a kill cannot spoil. For reading by people and by reports.

    episodes/ before-000000.mp  train-000000.mp  train-000001.mp  after-000000.mp ...

    segment = "etude episodes 1\\n" record*          one file a writer and a kind of occasion (`when`)
    record  = length (4 bytes, big-endian) body       body = zstd frame with checksum around a msgpack EpisodeRecord

A writer never touches an older segment. A record reaches the kernel in one write; what a kill cut off at the end of a
segment is ignored by the reader, while a damaged record before the end is an error that names the place.

What it does not do: keep what training needs (that is in the run's groups and batches), or sync before `close`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zstandard

from etude.errors import StoreError
from etude.frames import append_bytes, decode, encode
from etude.types import FORMAT, Noun, Scored, Task

_HEADER = f"etude episodes {FORMAT}\n".encode()
_WHEN = re.compile(r"[a-z][a-z0-9_]{0,31}")
SEGMENT_BYTES = 64 << 20
"""A segment that has grown beyond this is closed and the next one opened."""
MAX_RECORD = 256 << 20
"""Bytes of one record after decompression; a longer one is refused."""


class EpisodeRecord(Noun, frozen=True, kw_only=True):
    """A task, one graded attempt at it, and on which occasion.

    >>> EpisodeRecord(task=task, scored=scored, when="before")
    """

    task: Task
    scored: Scored
    when: str
    """before, after, control, train; any short lower-case word."""
    step: int | None = None
    """Optimizer step of the weights that it started from, where known."""


class EpisodeWriter:
    """Appends records to new segments in `folder`, which is made if need be.

    Without `keep_tokens` the contexts (ids, log-probs, routes) are left out: they are most of an episode's bytes, and
    only training needs them.
    """

    def __init__(self, folder: Path, *, keep_tokens: bool = False) -> None:
        self.folder = folder
        self._keep_tokens = keep_tokens
        self._files: dict[str, int] = {}
        self._compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {folder}", cause=str(error)) from error

    def append(self, record: EpisodeRecord) -> None:
        """Errors: ValueError for a `when` that is no short lower-case word; StoreError if the disk is full."""
        if not _WHEN.fullmatch(record.when):
            raise ValueError(f"{record.when!r} is not an occasion: use a short lower-case word")
        if not self._keep_tokens:
            record = _without_tokens(record)
        body = self._compressor.compress(encode(record))
        data = len(body).to_bytes(4, "big") + body
        try:
            file = self._file(record.when)
            append_bytes(file, data)
            if os.fstat(file).st_size > SEGMENT_BYTES:
                self._close(record.when)
        except OSError as error:
            # what follows a cut record could not be read: the next record goes to a new segment
            if record.when in self._files:
                os.close(self._files.pop(record.when))
            raise StoreError(
                f"cannot write to {self.folder}", cause=str(error), hint="free space on its disk"
            ) from error

    def close(self) -> None:
        """Sync and close all segments."""
        for when in list(self._files):
            self._close(when)

    def _close(self, when: str) -> None:
        file = self._files.pop(when)
        os.fsync(file)
        os.close(file)

    def _file(self, when: str) -> int:
        if when not in self._files:
            number = max((int(path.stem[-6:]) + 1 for path in _segments(self.folder, when)), default=0)
            path = self.folder / f"{when}-{number:06d}.mp"
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._files[when] = file
            append_bytes(file, _HEADER)
        return self._files[when]


def _without_tokens(record: EpisodeRecord) -> EpisodeRecord:
    episode = record.scored.episode
    turns = tuple(msgspec.structs.replace(turn, span=None) for turn in episode.turns)
    episode = msgspec.structs.replace(episode, contexts=(), turns=turns)
    return msgspec.structs.replace(record, scored=msgspec.structs.replace(record.scored, episode=episode))


def _segments(folder: Path, when: str | None) -> list[Path]:
    name = f"{when or '*'}-" + "[0-9]" * 6 + ".mp"
    return sorted(folder.glob(name))


def read_episodes(folder: Path, limit: int | None = None, when: str | None = None) -> Iterator[EpisodeRecord]:
    """Records in the order in which each occasion's were written; at most `limit`, only those of `when` if given.

    No folder, no records. Errors: StoreError naming the segment that is damaged or of another format.
    """
    left = limit
    for path in _segments(folder, when):
        for record in read_segment(path):
            if left is not None:
                if left <= 0:
                    return
                left -= 1
            yield record


def read_segment(path: Path) -> Iterator[EpisodeRecord]:
    """Records of one segment. Errors: StoreError, as of `read_episodes`."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(len(_HEADER))
            if header != _HEADER:
                if _HEADER.startswith(header):
                    return  # killed before the first record
                cause = f"it begins with {header!r}"
                raise StoreError(f"{path} is no segment of episodes in format {FORMAT}", cause=cause)
            while True:
                at = file.tell()
                length = int.from_bytes(file.read(4), "big")
                body = file.read(min(length, size))
                if at + 4 + length > size:
                    return  # the tail was cut
                try:
                    if zstandard.frame_content_size(body) > MAX_RECORD:
                        raise zstandard.ZstdError("the record is too long")
                    yield decode(decompressor.decompress(body), EpisodeRecord)
                except (zstandard.ZstdError, msgspec.MsgspecError) as error:
                    if not file.read().strip(b"\0"):
                        return  # after a power cut: the length is there, the bytes are not
                    hint = "delete the segment, or restore it"
                    raise StoreError(f"{path} is damaged at byte {at}", cause=str(error), hint=hint) from error
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {path}", cause=str(error)) from error
