"""Readers: an engine learns of new versions from the store alone.

    Subscriber.manifests()   polls; yields the newest version whenever it changes

The reader follows the newest incarnation. While that has no version yet, a reader that serves something keeps it
(counted), and a new one takes the parent that the incarnation's record names. A lease in the store keeps what is being
fetched, and what is served, from gc.

What it does not do: download (replica.py), load anything into a network, or decide when to swap (the engine does,
between two decoding steps).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from etude.errors import MissingError
from etude.frames import encode
from etude.killpoints import reach
from etude.types import Manifest, Version
from etude.weights.manifests import (
    Lease,
    head,
    incarnations,
    manifest_key,
    manifest_numbers,
    named_key,
    read_manifest,
)
from etude.weights.store import Store

LEASE_S = 60.0
"""A lease ends so long after it was last renewed; a reader renews at a third of it."""


def latest(store: Store) -> Manifest | None:
    """What a new reader takes; None if nothing can be read yet. Errors: StoreError."""
    return head(store)


class Subscriber:
    """One reader. Not for several tasks at once."""

    def __init__(self, store: Store, *, holder: str, poll_s: float, lease_s: float = LEASE_S) -> None:
        """`holder` names this reader's lease: one name a reader."""
        self.store = store
        self._holder = holder
        self._poll_s = poll_s
        self._lease_s = lease_s
        self._current: Version | None = None
        self._held: tuple[Version, ...] = ()
        self._renewed_s = 0.0
        self.orphaned_polls = 0
        """Polls at which the newest incarnation had no version yet, so that the old one was kept."""

    async def manifests(self) -> AsyncIterator[Manifest]:
        """The newest version now, then every newer one, without end; what was overtaken is left out.

        A version is leased before it is yielded, and until the next one is asked for. Errors: StoreError if the store
        does not answer.
        """
        while True:
            manifest = await asyncio.to_thread(self.poll)
            if manifest is not None:
                yield manifest
            else:
                await asyncio.sleep(self._poll_s)

    def resume(self, version: Version | None) -> None:
        """Take `version` as the one that this reader has: after a fetch that failed, what came later comes again."""
        self._current = version

    def poll(self) -> Manifest | None:
        """The newest version if it is not the one that this reader has; None otherwise."""
        found = self._newest()
        if found is None:
            if time.monotonic() - self._renewed_s > self._lease_s / 3:
                self.hold(*self._held)
            return None
        incarnation, n = found
        try:
            manifest = read_manifest(self.store, incarnation, n)
            self.hold(*(v for v in (self._current, manifest.version) if v is not None))
            if self.store.head(manifest_key(incarnation, n)) is None:
                return None  # collected before our lease was there: the next poll finds a newer one
        except MissingError:
            return None
        reach("version-leased")
        self._current = manifest.version
        return manifest

    def _newest(self) -> tuple[int, int] | None:
        """(incarnation, n) if it differs from what this reader has."""
        current = self._current
        later = incarnations(self.store, above=current.incarnation - 1 if current else None)
        if not later:
            return None
        if current and later[-1] == current.incarnation:
            numbers = manifest_numbers(self.store, current.incarnation, above=current.n)
            return (current.incarnation, numbers[-1]) if numbers else None
        if numbers := manifest_numbers(self.store, later[-1]):
            return later[-1], numbers[-1]
        if current is not None:
            self.orphaned_polls += 1
            return None
        manifest = head(self.store)
        return None if manifest is None else (manifest.version.incarnation, manifest.version.n)

    def hold(self, *versions: Version) -> None:
        """Lease exactly these versions, for `lease_s` seconds or until the next call; none: give the lease back."""
        key = named_key("leases", self._holder)
        if versions:
            self.store.put(key, encode(Lease(holder=self._holder, versions=versions, ttl_s=self._lease_s)))
        elif self._held:
            self.store.delete(key)
        self._held = versions
        self._renewed_s = time.monotonic()

    def close(self) -> None:
        """Give the lease back."""
        self.hold()
