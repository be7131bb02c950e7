"""The protocol by which a version of the policy becomes public: whole, or not at all.

    1  snapshot     the tensors' bytes are copied; training waits for this only
    2  upload       every rank codes its stretches of them into blobs (upload.py)
    3  digest       what the ranks uploaded meets on rank 0; the pieces' digests, in order, name the version's content
    4  commit       the manifest is created conditionally, with parent, digest and nonce
    5  remember     every rank learns whether it was committed: the next difference starts from the last one that was

A trainer first takes an incarnation (a conditional create, too) and looks for a higher one before every commit: seeing
one, it stops. So of two trainers that think the run is theirs only the later start goes on.

Here the steps are plain calls of one thread; `background.Background` runs them beside training. Most versions are
differences from their parent; the first of a start and every `anchor_every`-th after it is an anchor, which holds all
tensors in full, and the difference too, so that a reader which follows never loads one. What this file does not do:
know where tensors come from, or delete anything.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from etude.errors import LostRaceError, StoreError
from etude.frames import decode, encode
from etude.killpoints import reach
from etude.types import Manifest, Noun, Part, Version
from etude.weights.manifests import (
    IncarnationRecord,
    digest_parts,
    incarnations,
    manifest_key,
    read_manifest,
    read_record,
    record_key,
)
from etude.weights.pieces import Snapshot
from etude.weights.store import Store
from etude.weights.upload import Uploaded, Uploader
from etude.weights.workers import in_order

_CREATES = 4
"""How often one create is tried again with identical bytes."""
_SNAPSHOT_S = 60.0
"""For how long a rank waits for its own snapshot of a step that rank 0 publishes."""


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


class Peers(Protocol):
    """The ranks of one trainer, as publishing sees them. All ranks call the same methods in the same order."""

    def tell(self, data: bytes) -> bytes:
        """What rank 0 gave, on all ranks."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 what every rank gave, in their order."""
        ...


class Alone:
    """Rank 0 of one."""

    def tell(self, data: bytes) -> bytes:
        return data

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class _Order(Noun, frozen=True):
    """What the ranks are to upload; no version: publishing is over."""

    version: Version | None
    anchor: bool = False


class _Share(Noun, frozen=True):
    """What came of it on one rank."""

    uploaded: Uploaded | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """A committed version, and what it took."""

    manifest: Manifest
    change_bytes: int
    """Coded bytes of the difference."""
    whole_bytes: int
    """Coded bytes of an anchor's tensors in full; else 0."""
    seconds: float


class Publisher:
    """Rank 0: publishes versions of one incarnation, one after the other. Other ranks `follow`."""

    def __init__(
        self,
        store: Store,
        record: IncarnationRecord,
        *,
        parent: Manifest | None = None,
        anchor_every: int = 1,
        threads: int = 1,
        peers: Peers | None = None,
    ) -> None:
        """`parent`: manifest of the record's parent; what did not change since then is not uploaded again."""
        self.store = store
        self.record = record
        self._parent = record.parent
        self._anchor_every = anchor_every
        self._since_anchor: int | None = None
        self._n = 0
        self._uploader = Uploader(store, threads=threads, parent=parent)
        self._peers = peers or Alone()

    def check_incarnation(self) -> None:
        """Errors: LostRaceError if a later trainer has started: the run is its own now."""
        if later := incarnations(self.store, above=self.record.incarnation):
            raise LostRaceError(
                f"incarnation {self.record.incarnation} of {self.store.url} is over",
                cause=f"a later trainer has taken incarnation {later[-1]}",
                hint="stop this one",
            )

    def publish(self, snapshot: Snapshot) -> Published:
        """Steps 2 to 5. The number n is used up even if this fails.

        Errors: StoreError if the version was aborted (publish the snapshot again); LostRaceError if the run is lost.
        """
        started = time.perf_counter()
        n, self._n = self._n, self._n + 1
        version = Version(incarnation=self.record.incarnation, n=n, step=snapshot.step)
        anchor = self._since_anchor is None or self._since_anchor + 1 >= self._anchor_every
        self._peers.tell(encode(_Order(version=version, anchor=anchor)))
        share = _attempt(self._uploader, snapshot, version, anchor=anchor)
        shares = [decode(data, _Share) for data in self._peers.gather(encode(share))]
        reach("blobs-uploaded")
        is_committed = False
        try:
            manifest = self._commit(version, shares)
            is_committed = True
        finally:
            self._peers.tell(encode(is_committed))
        assert share.uploaded is not None
        self._uploader.committed(snapshot, share.uploaded)
        self._parent = version
        self._since_anchor = 0 if anchor else (self._since_anchor or 0) + 1
        return Published(
            manifest, change_bytes=sum(part.nbytes for part in manifest.changes),
            whole_bytes=sum(part.nbytes for part in manifest.parts), seconds=time.perf_counter() - started,
        )  # fmt: skip

    def end(self) -> None:
        """Let the other ranks stop following."""
        self._peers.tell(encode(_Order(version=None)))

    def _commit(self, version: Version, shares: Sequence[_Share]) -> Manifest:
        """3 and 4."""
        uploaded = []
        for rank, share in enumerate(shares):
            if share.uploaded is None:
                raise StoreError(
                    f"version {version.name} was aborted", cause=f"rank {rank}: {share.error}", hint="publish again"
                )
            uploaded.append(share.uploaded)
        parts = _merged(share.parts for share in uploaded)
        has_changes = self._parent is not None and all(share.changes for share in uploaded)
        changes = _merged(share.changes for share in uploaded) if has_changes else ()
        manifest = Manifest(
            version=version, parent=self._parent, parts=parts, changes=changes, digest=digest_parts(parts or changes),
            nonce=uuid.uuid4().hex,
        )  # fmt: skip
        self.check_incarnation()
        self._check_blobs(manifest)
        key = manifest_key(version.incarnation, version.n)
        create_once(
            self.store, key, encode(manifest),
            lambda: read_manifest(self.store, version.incarnation, version.n).nonce, nonce=manifest.nonce,
        )  # fmt: skip
        reach("manifest-created")
        return manifest

    def _check_blobs(self, manifest: Manifest) -> None:
        """A version whose parts are gone is not created."""
        keys = sorted({part.blob for part in (*manifest.parts, *manifest.changes) if part.blob})
        for key, entry in zip(keys, in_order(self.store.head, keys, threads=8), strict=True):
            if entry is None:
                name = manifest.version.name
                raise StoreError(f"version {name} was aborted", cause=f"{key} is gone", hint="publish again")


def _attempt(uploader: Uploader, snapshot: Snapshot, version: Version, *, anchor: bool) -> _Share:
    """2, on one rank: an error aborts the version, not the run."""
    try:
        return _Share(uploaded=uploader.upload(snapshot, version, anchor=anchor))
    except StoreError as error:
        return _Share(uploaded=None, error=str(error))


def _merged(shares: Iterable[tuple[Part, ...]]) -> tuple[Part, ...]:
    return tuple(sorted((part for share in shares for part in share), key=lambda part: (part.name, part.offset)))


# Ranks after the first


class Snapshots:
    """What this rank's training thread hands to its publishing thread. Only the steps that rank 0 may still publish."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._kept: dict[int, Snapshot] = {}

    def keep(self, snapshot: Snapshot, dropped: Sequence[int] = ()) -> None:
        """dropped: steps that were overtaken on rank 0."""
        with self._state:
            for step in dropped:
                self._kept.pop(step, None)
            self._kept[snapshot.step] = snapshot
            self._state.notify_all()

    def take(self, step: int) -> Snapshot:
        """That of `step`; a version may be published again, so it stays until a later one is asked for.

        Errors: StoreError if there is none.
        """
        with self._state:
            for earlier in [kept for kept in self._kept if kept < step]:
                del self._kept[earlier]
            if not self._state.wait_for(lambda: step in self._kept, _SNAPSHOT_S):
                raise StoreError(f"this rank has no snapshot of step {step}")
            return self._kept[step]


def follow(uploader: Uploader, peers: Peers, snapshots: Snapshots) -> None:
    """What a rank after the first does in its publishing thread: upload its share of every version, until the end."""
    while (version := (order := decode(peers.tell(b""), _Order)).version) is not None:
        try:
            snapshot = snapshots.take(version.step)
            share = _attempt(uploader, snapshot, version, anchor=order.anchor)
        except StoreError as error:
            share = _Share(uploaded=None, error=str(error))
        peers.gather(encode(share))
        if decode(peers.tell(b""), bool) and share.uploaded is not None:
            uploader.committed(snapshot, share.uploaded)


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
