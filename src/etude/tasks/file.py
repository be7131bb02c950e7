"""Task files: one zstandard-compressed file with tasks by split, their reference solutions and licence texts.

    first line   JSON: {"kind": "etude tasks", "format": 1, "digest": ..., "sections": [{name, count, nbytes, ...}]}
    then         the sections, one after the other: `train`, `heldout`, ... (msgpack arrays of entries), `licences`

A task and its reference lie side by side, but only `load_references` hands references out: whoever runs an episode
loads tasks. Files are written whole or not at all.

What it does not do: say whether the tasks are good; that is `check`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard

from etude.errors import TaskError
from etude.frames import decode, encode, write_bytes
from etude.types import FORMAT, Noun, Task

SHIPPED = {"repair": Path(__file__).parent / "repair.tasks.zst"}
"""Name -> file of the tasks that come with Etude: `etude:NAME/SPLIT`."""
SPLITS = ("train", "heldout", "final", "base")
MAX_BYTES = 1 << 30
"""Of a task file, decompressed; a longer one is refused unread."""
_KIND = "etude tasks"
_LICENCES = "licences"
T = TypeVar("T")


class Entry(Noun, frozen=True):
    """A task and the text of the file under test before the fault was planted."""

    task: Task
    reference: str


class Section(Noun, frozen=True):
    """One part of a task file."""

    name: str
    count: int
    nbytes: int
    digest: str
    """blake2b-128 of its bytes."""


class Header(Noun, frozen=True):
    """What a task file says of itself."""

    kind: str
    digest: str
    """Of the sections' digests, in order: names the content of the whole file."""
    sections: tuple[Section, ...]
    format: int = FORMAT


class _Formatted(msgspec.Struct):
    """All that is read of a header before its format is known."""

    kind: str
    format: int


@dataclass(frozen=True, slots=True)
class Address:
    """A split of a file."""

    path: Path
    split: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """`etude:repair/train` or `some/file.tasks.zst/train`. Errors: TaskError."""
        head, _, split = text.rpartition("/")
        if text.startswith("etude:"):
            name = head.removeprefix("etude:")
            if name not in SHIPPED:
                names = ", ".join(f"etude:{name}/SPLIT" for name in SHIPPED)
                raise TaskError(f"no tasks named {text!r} come with Etude", hint=f"there are: {names}")
            return cls(SHIPPED[name], split)
        if not head:
            raise TaskError(f"{text!r} is not an address of tasks", hint="etude:repair/train or FILE.zst/SPLIT")
        if text.endswith(".zst"):
            raise TaskError(f"{text!r} names no split", hint=f"add one: {text}/train")
        return cls(Path(head), split)


def write_tasks(path: Path, splits: Mapping[str, Sequence[Entry]], licences: Mapping[str, str]) -> Header:
    """Write a task file; `licences` maps a package to its licence texts. Errors: TaskError, OSError."""
    unknown = sorted(set(splits) - set(SPLITS))
    if unknown:
        raise TaskError(f"no such split: {', '.join(unknown)}", hint=f"splits: {', '.join(SPLITS)}")
    parts = [(name, len(splits[name]), encode(list(splits[name]))) for name in SPLITS if name in splits]
    parts.append((_LICENCES, len(licences), encode(dict(sorted(licences.items())))))
    sections = tuple(
        Section(name=name, count=count, nbytes=len(data), digest=_digest(data)) for name, count, data in parts
    )
    header = Header(kind=_KIND, digest=_digest("".join(s.digest for s in sections).encode()), sections=sections)
    body = msgspec.json.encode(header) + b"\n" + b"".join(data for _, _, data in parts)
    compressor = zstandard.ZstdCompressor(level=12, write_checksum=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, compressor.compress(body))
    return header


def read_header(path: Path) -> Header:
    """Errors: TaskError, as for every reader here: the file is missing, cut, damaged or of another format."""
    return _read(path)[0]


def load_tasks(address: str) -> tuple[Task, ...]:
    """The tasks of a split, in the file's order. Errors: TaskError."""
    return tuple(entry.task for entry in _entries(address))


def load_references(address: str) -> dict[str, str]:
    """Task id -> the file under test before the fault, for a split. Errors: TaskError."""
    return {entry.task.task_id: entry.reference for entry in _entries(address)}


def load_licences(path: Path) -> dict[str, str]:
    """Package -> licence texts. Errors: TaskError."""
    header, body = _read(path)
    return _decoded(_section(path, header, body, _LICENCES), dict[str, str], path, _LICENCES)


def _entries(address: str) -> list[Entry]:
    where = Address.parse(address)
    header, body = _read(where.path)
    names = [section.name for section in header.sections if section.name != _LICENCES]
    if where.split not in names:
        raise TaskError(f"{where.path} has no split {where.split!r}", hint=f"it has: {', '.join(names)}")
    return _decoded(_section(where.path, header, body, where.split), list[Entry], where.path, where.split)


def _decoded(data: memoryview, kind: type[T], path: Path, name: str) -> T:
    try:
        return decode(data, kind)
    except ValueError as error:
        raise TaskError(f"{path}: section {name!r} is malformed", cause=str(error)) from error


def _section(path: Path, header: Header, body: memoryview, name: str) -> memoryview:
    start = 0
    for section in header.sections:
        if section.name == name:
            data = body[start : start + section.nbytes]
            if len(data) < section.nbytes or _digest(data) != section.digest:
                raise TaskError(
                    f"{path}: section {name!r} does not have its digest",
                    cause="the file was changed or damaged",
                    hint="get it again, or build it: etude tasks build",
                )
            return data
        start += section.nbytes
    raise TaskError(f"{path} has no section {name!r}")


def _read(path: Path) -> tuple[Header, memoryview]:
    try:
        status = path.stat()
    except OSError as error:
        hint = "build it: etude tasks build" if path in SHIPPED.values() else None
        raise TaskError(f"cannot read the task file {path}", cause=error.strerror, hint=hint) from error
    return _read_version(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=2)
def _read_version(path: Path, modified_ns: int, size: int) -> tuple[Header, memoryview]:
    """Header and sections of the file as it was at that time: a run reads several splits of one file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskError(f"cannot read the task file {path}", cause=error.strerror) from error
    if data[:4] != zstandard.FRAME_HEADER:
        raise TaskError(f"{path} is not a task file", cause="it is not zstandard-compressed")
    try:
        length = zstandard.frame_content_size(data)
        if not 0 <= length <= MAX_BYTES:
            raise TaskError(f"{path} is not a task file", cause=f"it claims {length} bytes decompressed")
        content = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise TaskError(f"{path} is cut or damaged", cause=str(error), hint="get it again") from error
    line, _, body = content.partition(b"\n")
    return _header(path, line), memoryview(body)


def _header(path: Path, line: bytes) -> Header:
    try:
        formatted = msgspec.json.decode(line, type=_Formatted)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{path} is not a task file", cause="its first line is no header") from error
    if formatted.kind != _KIND:
        raise TaskError(f"{path} is not a task file", cause=f"it says that it is {formatted.kind!r}")
    if formatted.format != FORMAT:
        raise TaskError(
            f"{path} has format {formatted.format}",
            cause=f"this Etude reads format {FORMAT}",
            hint="build it again: etude tasks build",
        )
    try:
        return msgspec.json.decode(line, type=Header)
    except ValueError as error:
        raise TaskError(f"{path} has a malformed header", cause=str(error)) from error


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
