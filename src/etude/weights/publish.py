"""The protocol by which a version of the policy becomes public: whole, or not at all.

    1  snapshot     the tensors' bytes are copied; training waits for this only
    2  upload       pieces go into blobs named by their content; what the parent has already is touched
    3  digest       the pieces' digests, in order, name the version's content
    4  commit       the manifest is created conditionally, with parent, digest and nonce
    5  remember     the committed manifest is the next one's parent

A trainer first takes an incarnation (a conditional create, too) and looks for a higher one before every commit: seeing
one, it stops. So of two trainers that think the run is theirs only the later start goes on.

Here the steps are plain calls of one thread; `background.Background` runs them beside training. Every version is an
anchor: it holds all tensors in full. What this file does not do: know where tensors come from, or delete anything.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.errors import LostRaceError, StoreError
from etude.frames import encode
from etude.killpoints import reach
from etude.types import Manifest, Part, Version
from etude.weights.manifests import (
    IncarnationRecord,
    blob_key,
    digest_bytes,
    digest_parts,
    incarnations,
    manifest_key,
    read_manifest,
    read_record,
    record_key,
)
from etude.weights.store import Store

BLOB_BYTES = 16 << 20
"""Tensors are packed into blobs up to this size, and cut where they are larger."""
DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "BOOL": np.dtype("?"),
}  # fmt: skip
"""safetensors name -> how numpy holds it. numpy has no bfloat16: its bits travel as unsigned 16-bit integers."""
_CREATES = 4
"""How often one create is tried again with identical bytes."""
assert sys.byteorder == "little", "blobs hold little-endian numbers as they lie in memory"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the store holds it: numbers as numpy can hold them, and the name of what they really are."""

    dtype: str
    array: np.ndarray

    def __post_init__(self) -> None:
        if DTYPES.get(self.dtype) != self.array.dtype:
            raise StoreError(f"a tensor of {self.array.dtype} cannot be published as {self.dtype}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All tensors of one step, which nobody changes any more."""

    step: int
    tensors: Mapping[str, Stored]

    @classmethod
    def take(cls, step: int, tensors: Mapping[str, Stored]) -> Snapshot:
        """1. snapshot: copy the bytes."""
        return cls(step, {name: Stored(t.dtype, t.array.copy()) for name, t in sorted(tensors.items())})


def take_incarnation(
    store: Store, *, parent: Version | None = None, checkpoint: str | None = None
) -> IncarnationRecord:
    """A new incarnation for a trainer that goes on from `parent`, saved in `checkpoint`. Errors: StoreError."""
    number = max(incarnations(store), default=0)
    while True:
        number += 1
        record = IncarnationRecord(incarnation=number, nonce=uuid.uuid4().hex, parent=parent, checkpoint=checkpoint)
        try:
            _create_record(store, record)
        except LostRaceError:
            continue  # somebody started in this very moment: ours is the next number, and so the one that stays
        return record


def _create_record(store: Store, record: IncarnationRecord) -> None:
    number = record.incarnation
    read = lambda: read_record(store, number).nonce  # noqa: E731
    create_once(store, record_key(number), encode(record), read, nonce=record.nonce)


class Publisher:
    """Publishes versions of one incarnation, one after the other."""

    def __init__(self, store: Store, record: IncarnationRecord, *, parent: Manifest | None = None) -> None:
        """`parent`: manifest of the record's parent, whose unchanged blobs are used again."""
        self.store = store
        self.record = record
        self._parent = record.parent
        self._n = 0
        self._known = {part.blob for part in parent.parts} if parent else set()

    def check_incarnation(self) -> None:
        """Errors: LostRaceError if a later trainer has started: the run is its own now."""
        if later := incarnations(self.store, above=self.record.incarnation):
            raise LostRaceError(
                f"incarnation {self.record.incarnation} of {self.store.url} is over",
                cause=f"a later trainer has taken incarnation {later[-1]}",
                hint="stop this one",
            )

    def publish(self, snapshot: Snapshot) -> Manifest:
        """Steps 2 to 5. The number n is used up even if this fails.

        Errors: StoreError if the version was aborted (publish the snapshot again); LostRaceError if the run is lost.
        """
        n, self._n = self._n, self._n + 1
        # 2. upload
        blobs = list(cut(snapshot.tensors))
        with ThreadPoolExecutor(max_workers=4, thread_name_prefix="upload") as pool:
            list(pool.map(self._upload, blobs))
        reach("blobs-uploaded")
        # 3. digest
        parts = tuple(part for blob in blobs for part in blob.parts)
        version = Version(incarnation=self.record.incarnation, n=n, step=snapshot.step)
        manifest = Manifest(
            version=version, parent=self._parent, full=True, parts=parts,
            digest=digest_parts(parts), nonce=uuid.uuid4().hex,
        )  # fmt: skip
        # 4. commit
        self.check_incarnation()
        for key in sorted({blob.key for blob in blobs}):
            if self.store.head(key) is None:
                raise StoreError(f"version {version.name} was aborted", cause=f"{key} is gone", hint="publish again")
        key = manifest_key(version.incarnation, n)
        create_once(
            self.store, key, encode(manifest), lambda: read_manifest(self.store, version.incarnation, n).nonce,
            nonce=manifest.nonce,
        )  # fmt: skip
        reach("manifest-created")
        # 5. remember
        self._parent = version
        self._known = {blob.key for blob in blobs}
        return manifest

    def _upload(self, blob: Blob) -> None:
        if blob.key in self._known:
            self.store.touch(blob.key, blob.data)
        else:
            self.store.put(blob.key, blob.data)


def create_once(store: Store, key: str, data: bytes, read_nonce: Callable[[], str], *, nonce: str) -> None:
    """Create `key` conditionally, and find out whether what lies there is ours.

    After "already exists" or an error of the create: our nonce there is success; nothing there means that the identical
    bytes are tried again; an unreadable object is an error, not another's. Errors: LostRaceError, StoreError.
    """
    failure: StoreError | None = None
    for attempt in range(_CREATES):
        time.sleep(0.02 * 4**attempt if failure else 0)
        failure = None
        try:
            if store.create(key, data):
                return
        except StoreError as error:
            failure = error
        try:
            found = read_nonce()
        except StoreError as error:
            failure = failure or error
            continue
        if found == nonce:
            return
        raise LostRaceError(f"{store.url}: {key} belongs to another trainer", hint="only one trainer may run")
    raise StoreError(f"{store.url}: {key} could not be created", cause=str(failure)) from failure


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of several pieces of tensors, in the order of their parts."""

    key: str
    data: bytes
    parts: tuple[Part, ...]


def cut(tensors: Mapping[str, Stored], limit: int = BLOB_BYTES) -> Iterator[Blob]:
    """Pack tensors, by name, into blobs of at most `limit` bytes; a larger tensor is cut into pieces.

    The same tensors give the same blobs, so that what did not change is not uploaded again.
    """
    pieces: list[tuple[Part, memoryview]] = []
    filled = 0
    for name, tensor in sorted(tensors.items()):
        flat = np.ascontiguousarray(tensor.array).reshape(-1)
        size = flat.itemsize
        for offset in range(0, max(flat.size, 1), limit // size):
            piece = flat[offset : offset + limit // size]
            if filled and filled + piece.nbytes > limit:
                yield _blob(pieces)
                pieces, filled = [], 0
            data = piece.view(np.uint8).data
            part = Part(
                name=name, dtype=tensor.dtype, shape=tensor.array.shape, offset=offset, count=piece.size,
                blob="", start=filled, nbytes=piece.nbytes, digest=digest_bytes(data),
            )  # fmt: skip
            pieces.append((part, data))
            filled += piece.nbytes
    if pieces:
        yield _blob(pieces)


def _blob(pieces: Sequence[tuple[Part, memoryview]]) -> Blob:
    data = b"".join(piece for _, piece in pieces)
    key = blob_key(digest_bytes(data))
    return Blob(key, data, tuple(msgspec.structs.replace(part, blob=key) for part, _ in pieces))
