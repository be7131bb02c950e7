"""Collecting old versions, so that a long run does not fill the store.

Kept: the last K anchors of the surviving lineage and all after the oldest of them; pins; versions under an unexpired
lease; each with all that it takes to rebuild it, down to an anchor. Two phases, far apart:

    1  the manifest of a version that was not needed for `grace_s` is deleted, those of dead lineages too
    2  a blob that no manifest has named for `grace_s`, and that was not written for as long, is deleted

so that a pin or lease which is just being written is seen in time, a reader which had just read a manifest can still
fetch its blobs, and a publisher's fresh blobs, which no manifest names yet, stay. What that presumes: a publish, and
whatever of it is still on its way, is over within `grace_s`; so are a reader's poll and a round of gc together. (A
reader that was slower finds its version gone, and takes a newer one.) All times are the store's. Records of
incarnations stay for good: lineage is derived from them.

What it does not do: trust what it cannot read. An unreadable manifest, lease or pin stops the collection with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from etude.errors import MissingError
from etude.types import Manifest
from etude.weights.manifests import (
    Lease,
    incarnations,
    lineage,
    manifest_key,
    manifest_numbers,
    pins,
    read_manifest,
    read_object,
)
from etude.weights.store import Store

_Name = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Collected:
    """What one round deleted."""

    manifests: int
    blobs: int
    nbytes: int
    """Of the blobs."""


class Collector:
    """Collects in rounds. What it learnt lives in memory: a new collector waits `grace_s` anew."""

    def __init__(
        self, store: Store, *, keep_anchors: int, grace_s: float, now: Callable[[], float] | None = None
    ) -> None:
        """`now` stands for the store's clock, in seconds since the epoch."""
        self._store = store
        self._keep = keep_anchors
        self._grace_s = grace_s
        self._now = now or store.now
        self._unneeded_since: dict[_Name, float] = {}
        self._unnamed_since: dict[str, float] = {}
        self._read: dict[_Name, Manifest] = {}
        self._next_s = 0.0

    def run_if_due(self) -> Collected | None:
        """A round, if the last one is long enough ago."""
        if time.monotonic() < self._next_s:
            return None
        self._next_s = time.monotonic() + self._grace_s / 10
        return self.run()

    def run(self) -> Collected:
        """One round of both phases. Errors: StoreError, with nothing deleted that is needed."""
        now = self._now()
        manifests = self._delete_manifests(now)
        blobs, nbytes = self._delete_blobs(now)
        self._store.sweep_temporary(max(self._grace_s, 3600.0))
        return Collected(manifests, blobs, nbytes)

    def _versions(self) -> list[_Name]:
        store = self._store
        return [(k, n) for k in incarnations(store) for n in manifest_numbers(store, k)]

    def _delete_manifests(self, now: float) -> int:
        names = self._versions()
        kept = self._kept(names, now)
        self._unneeded_since = {name: self._unneeded_since.get(name, now) for name in names if name not in kept}
        gone = [name for name, since in self._unneeded_since.items() if since <= now - self._grace_s]
        for name in gone:
            self._store.delete(manifest_key(*name))
            self._read.pop(name, None)
            del self._unneeded_since[name]
        return len(gone)

    def _kept(self, names: list[_Name], now: float) -> set[_Name]:
        surviving = lineage(self._store)
        alive = [name for name in names if surviving.survives(*name)]
        anchors = [name for name in alive if self._manifest(name).is_anchor]
        oldest = anchors[-self._keep :][:1]
        kept = {name for name in alive if [name] >= oldest}
        kept |= {(pin.version.incarnation, pin.version.n) for pin in pins(self._store)}
        for entry in self._store.entries("leases"):
            try:
                lease = read_object(self._store, entry.key, Lease)
            except MissingError:
                continue  # given back in this moment
            if entry.modified + lease.ttl_s >= now:
                kept |= {(version.incarnation, version.n) for version in lease.versions}
            elif entry.modified + lease.ttl_s + self._grace_s < now:
                self._store.delete(entry.key)
        return self._with_chains(kept & set(names))

    def _with_chains(self, kept: set[_Name]) -> set[_Name]:
        """And what they are differences from."""
        chained = set()
        for name in kept:
            while name not in chained:
                try:
                    manifest = self._manifest(name)
                except MissingError:
                    break  # broken long ago: nothing below it can be of use
                chained.add(name)
                if manifest.is_anchor or manifest.parent is None:
                    break
                name = (manifest.parent.incarnation, manifest.parent.n)
        return chained

    def _manifest(self, name: _Name) -> Manifest:
        if name not in self._read:
            self._read[name] = read_manifest(self._store, *name)
        return self._read[name]

    def _delete_blobs(self, now: float) -> tuple[int, int]:
        named = set()
        for name in self._versions():
            manifest = self._manifest(name)
            named |= {part.blob for part in (*manifest.parts, *manifest.changes)}
        blobs = {entry.key: entry for entry in self._store.entries("blobs")}
        unnamed = blobs.keys() - named
        self._unnamed_since = {key: self._unnamed_since.get(key, now) for key in unnamed}
        deleted = nbytes = 0
        for key in sorted(unnamed):
            since = max(self._unnamed_since[key], blobs[key].modified)
            if since > now - self._grace_s:
                continue
            self._store.delete(key)
            del self._unnamed_since[key]
            deleted += 1
            nbytes += blobs[key].size
        return deleted, nbytes
