"""What lies where in a weight store, and which versions survive. Publishing, reading and gc all read through here.

    incarnations/<k>          a start of a trainer: nonce, and the version and checkpoint that it went on from
    manifests/<k>/<n>         a version: (k, n); creating this object is the publish
    blobs/<k>-<n>-<digest>    coded pieces of tensors, first uploaded for (k, n)
    leases/<holder>           versions that a reader needs for now
    pins/<name>               a version that stays until it is unpinned

Numbers are zero-padded, so that a listing's order is theirs. Versions of one incarnation form a line (each names the
one before as its parent), and an incarnation continues from the version that its record names. So a version is dead
exactly if no chain of records leads from the newest incarnation to it: `Lineage` derives that, nobody lists it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from etude.errors import MissingError, StoreError
from etude.frames import decode, encode
from etude.types import FORMAT, Manifest, Noun, Part, Version
from etude.weights.store import Store

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class IncarnationRecord(Noun, frozen=True):
    """One start of a trainer. Created conditionally, so that two trainers never share an incarnation."""

    incarnation: int
    """From 1."""
    nonce: str
    parent: Version | None
    """The version that this incarnation goes on from; None if it starts from the model folder."""
    checkpoint: str | None
    """Name of the checkpoint that it resumed from."""
    format: int = FORMAT


class Lease(Noun, frozen=True):
    """What a reader needs until `ttl_s` seconds after the object was last written, by the store's clock."""

    holder: str
    versions: tuple[Version, ...]
    ttl_s: float
    format: int = FORMAT


class Pin(Noun, frozen=True):
    """A version that gc leaves alone: reference policy, checkpoint, production, running evaluation."""

    name: str
    version: Version
    reason: str
    format: int = FORMAT


class _Head(msgspec.Struct):
    format: int


def record_key(incarnation: int) -> str:
    return f"incarnations/{incarnation:010d}"


def manifest_key(incarnation: int, n: int) -> str:
    return f"manifests/{incarnation:010d}/{n:010d}"


def blob_key(incarnation: int, n: int, digest: str) -> str:
    """A key that no other version writes: what gc is about to delete is never written again."""
    return f"blobs/{incarnation:010d}-{n:010d}-{digest}"


def is_blob(key: str, data: bytes | memoryview) -> bool:
    """Whether a blob holds what its name says."""
    return key.rpartition("-")[2] == digest_bytes(data)


def named_key(folder: str, name: str) -> str:
    """`leases/<name>` or `pins/<name>`. Errors: StoreError for a name that could leave the folder."""
    if not _NAME.fullmatch(name):
        raise StoreError(f"{name!r} cannot name an object of {folder}/", hint="letters, digits, dots, dashes")
    return f"{folder}/{name}"


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """blake2b-128."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_parts(parts: tuple[Part, ...]) -> str:
    """Names a version's content, however it is stored: of every piece's place and digest, in order."""
    return digest_bytes(encode([(p.name, p.dtype, p.shape, p.offset, p.count, p.digest) for p in parts]))


def read_object(store: Store, key: str, kind: type[T]) -> T:
    """Errors: MissingError; StoreError if the object is unreadable or of another format."""
    data = store.get(key)
    try:
        number = msgspec.msgpack.decode(data, type=_Head).format
        if number == FORMAT:
            return decode(data, kind)
    except msgspec.MsgspecError as error:
        raise StoreError(
            f"{store.url}: {key} is not a {kind.__name__}", cause=str(error), hint="it is damaged"
        ) from error
    raise StoreError(f"{store.url}: {key} has format {number}", hint=f"this Etude reads format {FORMAT}")


def read_manifest(store: Store, incarnation: int, n: int) -> Manifest:
    """The version (incarnation, n), its digest checked. Errors: MissingError, StoreError."""
    key = manifest_key(incarnation, n)
    manifest = read_object(store, key, Manifest)
    if (manifest.version.incarnation, manifest.version.n) != (incarnation, n):
        raise StoreError(f"{store.url}: {key} holds version {manifest.version.name}")
    described = [parts for parts in (manifest.parts, manifest.changes) if parts]
    if not described or any(digest_parts(parts) != manifest.digest for parts in described):
        raise StoreError(f"{store.url}: {key} does not match its own digest", hint="it is damaged")
    return manifest


def named_version(store: Store, name: str) -> Manifest:
    """The version that a person calls `incarnation.n`. Errors: StoreError for another word, MissingError."""
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", name)
    if match is None:
        raise StoreError(f"{name!r} names no version", hint="incarnation.n, as in 1.25: see etude weights list")
    try:
        return read_manifest(store, int(match[1]), int(match[2]))
    except MissingError as error:
        raise MissingError(f"{store.url} has no version {name}", hint="see etude weights list") from error


def read_record(store: Store, incarnation: int) -> IncarnationRecord:
    return read_object(store, record_key(incarnation), IncarnationRecord)


def numbers_after(store: Store, folder: str, last: int | None = None) -> list[int]:
    """Numbers of the objects in `folder`, rising; only those above `last`."""
    after = None if last is None else f"{folder}/{last:010d}"
    return [int(entry.key.rpartition("/")[2]) for entry in store.entries(folder, after=after)]


def incarnations(store: Store, *, above: int | None = None) -> list[int]:
    return numbers_after(store, "incarnations", above)


def manifest_numbers(store: Store, incarnation: int, *, above: int | None = None) -> list[int]:
    return numbers_after(store, f"manifests/{incarnation:010d}", above)


def head(store: Store) -> Manifest | None:
    """The newest version of the newest incarnation; while it has none, the parent that its record names.

    None: nothing can be read yet.
    """
    numbers = incarnations(store)
    if not numbers:
        return None
    if versions := manifest_numbers(store, numbers[-1]):
        return read_manifest(store, numbers[-1], versions[-1])
    parent = read_record(store, numbers[-1]).parent
    return None if parent is None else read_manifest(store, parent.incarnation, parent.n)


@dataclass(frozen=True, slots=True)
class Lineage:
    """The surviving versions: for each incarnation on the chain the last n that the next one went on from."""

    last: dict[int, int | None]
    """incarnation -> its last surviving n; None for the newest, of which every version survives."""
    checkpoints: tuple[str, ...]
    """Names of the checkpoints that the chain's records resumed from, newest first."""

    def survives(self, incarnation: int, n: int) -> bool:
        if incarnation not in self.last:
            return False
        bound = self.last[incarnation]
        return bound is None or n <= bound


def lineage(store: Store) -> Lineage:
    """Walk the records from the newest incarnation down. Errors: StoreError if a record is unreadable."""
    last: dict[int, int | None] = {}
    checkpoints: list[str] = []
    numbers = incarnations(store)
    current, bound = (numbers[-1] if numbers else 0), None
    while current:
        last[current] = bound
        record = read_record(store, current)
        if record.checkpoint is not None:
            checkpoints.append(record.checkpoint)
        if record.parent is None:
            break
        if record.parent.incarnation >= current:
            raise StoreError(
                f"{store.url}: incarnation {current} names a later one as its parent", hint="it is damaged"
            )
        current, bound = record.parent.incarnation, record.parent.n
    return Lineage(last, tuple(checkpoints))


def pin(store: Store, name: str, version: Version, reason: str) -> None:
    """Keep `version` until `unpin`. Errors: MissingError if its manifest is gone already."""
    store.put(named_key("pins", name), encode(Pin(name=name, version=version, reason=reason)))
    if store.head(manifest_key(version.incarnation, version.n)) is None:
        unpin(store, name)
        raise MissingError(f"{store.url} has no version {version.name} to pin as {name}")


def unpin(store: Store, name: str) -> None:
    store.delete(named_key("pins", name))


def pins(store: Store) -> list[Pin]:
    return [read_object(store, entry.key, Pin) for entry in store.entries("pins")]
