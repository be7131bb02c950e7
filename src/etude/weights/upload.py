"""One rank's share of a publish: its stretches of all tensors, coded and uploaded. It remembers what it published last.

    snapshot --cut--> piece --> unchanged: its digest is the parent's          (nothing is uploaded)
                            --> a difference from the piece as it was          (`changes`)
                            --> coded as it is, of an anchor                   (`parts`)

The baseline is the last snapshot whose version was committed: an aborted one leaves no trace here. So the next
difference is always one from the version that it will name as its parent.

What it does not do: create manifests (publish.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.errors import StoreError
from etude.types import Manifest, Noun, Part, Version
from etude.weights import delta
from etude.weights.manifests import blob_key, digest_bytes
from etude.weights.pieces import Blob, Packer, Piece, Place, Snapshot, cut, place_of
from etude.weights.store import Store
from etude.weights.workers import in_order


class Uploaded(Noun, frozen=True):
    """What a rank has in the store of a version that is not committed yet. Parts by name and offset."""

    parts: tuple[Part, ...]
    """Empty unless the version is an anchor."""
    changes: tuple[Part, ...]
    """Empty if there is no parent, or it was cut otherwise."""


@dataclass(frozen=True, slots=True)
class _Coded:
    part: Part
    whole: bytes | None
    difference: bytes | None
    """Empty: unchanged. None: there is nothing that it could be a difference from."""


class Uploader:
    """Not for several threads at once; it uses `threads` of its own."""

    def __init__(self, store: Store, *, threads: int, parent: Manifest | None = None) -> None:
        """parent: the version that training goes on from; what of it did not change is not uploaded again."""
        self._store = store
        self._threads = threads
        self._base: dict[Place, np.ndarray] = {}
        self._digests: dict[Place, str] = {}
        self._known: dict[str, str] = {}
        """Digest -> key of the newest anchor's blobs: as long as they are named, gc leaves them."""
        if parent is not None:
            self._remember(parent.parts, parent.changes)

    def upload(self, snapshot: Snapshot, version: Version, *, anchor: bool) -> Uploaded:
        """Errors: StoreError if the store fails, or if what is to be a difference only has nothing to differ from."""
        kept: list[Part] = []
        parts: dict[bool, list[Part]] = {True: [], False: kept}
        missing: list[str] = []
        put = lambda item: (item[0], self._put(item[1], version))  # noqa: E731
        for is_whole, placed in in_order(put, self._blobs(snapshot, kept, missing, anchor=anchor), self._threads):
            parts[is_whole].extend(placed)
        if missing and not anchor:
            raise StoreError(
                f"step {snapshot.step} cannot be a difference", cause=f"{missing[0]} is new", hint="publish an anchor"
            )
        return Uploaded(parts=_ordered(parts[True]), changes=() if missing else _ordered(kept))

    def committed(self, snapshot: Snapshot, uploaded: Uploaded) -> None:
        """`snapshot` is what the next difference starts from."""
        self._base = {piece.place: piece.data for piece in cut(snapshot.tensors)}
        self._remember(uploaded.parts, uploaded.changes)

    def _remember(self, parts: tuple[Part, ...], changes: tuple[Part, ...]) -> None:
        self._digests = {place_of(part): part.digest for part in parts or changes}
        if parts:
            self._known = {part.blob.rpartition("-")[2]: part.blob for part in parts}

    def _blobs(
        self, snapshot: Snapshot, unchanged: list[Part], missing: list[str], *, anchor: bool
    ) -> Iterator[tuple[bool, Blob]]:
        """(whether it holds whole pieces, blob); unchanged pieces and the names of new ones go to the lists."""
        whole, changed = Packer(), Packer()
        code = lambda piece: self._code(piece, anchor=anchor)  # noqa: E731
        for coded in in_order(code, cut(snapshot.tensors), self._threads):
            if coded.whole is not None:
                yield from ((True, blob) for blob in whole.add(coded.part, coded.whole))
            if coded.difference is None:
                missing.append(coded.part.name)
            elif coded.difference:
                yield from ((False, blob) for blob in changed.add(coded.part, coded.difference))
            else:
                unchanged.append(coded.part)
        yield from ((True, blob) for blob in whole.rest())
        yield from ((False, blob) for blob in changed.rest())

    def _code(self, piece: Piece, *, anchor: bool) -> _Coded:
        digest = digest_bytes(piece.data.data)
        whole = delta.encode(None, piece.data, piece.dtype) if anchor else None
        return _Coded(piece.part(digest), whole, self._difference(piece, digest))

    def _difference(self, piece: Piece, digest: str) -> bytes | None:
        if self._digests.get(piece.place) == digest:
            return b""
        base = self._base.get(piece.place)
        return None if base is None else delta.encode(base, piece.data, piece.dtype)

    def _put(self, blob: Blob, version: Version) -> tuple[Part, ...]:
        """Upload it, unless the newest anchor has it; its parts, with its key."""
        key = self._known.get(blob.digest)
        if key is None:
            key = blob_key(version.incarnation, version.n, blob.digest)
            self._store.put(key, blob.data)
        return tuple(msgspec.structs.replace(part, blob=key) for part in blob.parts)


def _ordered(parts: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: (part.name, part.offset)))
