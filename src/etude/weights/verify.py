"""What a store holds, and whether all of it is sound. For `etude weights list` and `etude weights verify`.

It reads only; nothing is repaired here.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import MissingError, StoreError
from etude.types import Manifest, Version
from etude.weights.manifests import (
    head,
    incarnations,
    is_blob,
    lineage,
    manifest_key,
    manifest_numbers,
    pins,
    read_manifest,
)
from etude.weights.pieces import DTYPES
from etude.weights.replica import Replica
from etude.weights.store import Store


@dataclass(frozen=True, slots=True)
class Listed:
    """A version as a person sees it."""

    version: Version
    parent: Version | None
    is_anchor: bool
    nbytes: int
    """Of the tensors, as they are in memory."""
    change_bytes: int
    """Stored, of the difference from its parent."""
    whole_bytes: int
    """Stored, of an anchor's tensors in full."""
    modified: float
    """Seconds since the epoch, by the store's clock."""
    state: str
    """`head`, `alive`, or `dead` (no later incarnation went on from it)."""
    pins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a check of the whole store found."""

    versions: int
    blobs: int
    nbytes: int
    problems: tuple[str, ...]
    """Sentences; empty if all versions can be read whole."""


def list_versions(store: Store) -> list[Listed]:
    """Every version, oldest first. Errors: StoreError."""
    newest = head(store)
    surviving = lineage(store)
    names: dict[tuple[int, int], list[str]] = {}
    for pin in pins(store):
        names.setdefault((pin.version.incarnation, pin.version.n), []).append(pin.name)
    rows = []
    for incarnation in incarnations(store):
        for n in manifest_numbers(store, incarnation):
            manifest = read_manifest(store, incarnation, n)
            entry = store.head(manifest_key(incarnation, n))
            alive = "alive" if surviving.survives(incarnation, n) else "dead"
            is_head = newest is not None and newest.version == manifest.version
            rows.append(
                Listed(
                    version=manifest.version, parent=manifest.parent, is_anchor=manifest.is_anchor,
                    nbytes=sum(part.count * DTYPES[part.dtype].itemsize for part in manifest.parts or manifest.changes),
                    change_bytes=sum(part.nbytes for part in manifest.changes),
                    whole_bytes=sum(part.nbytes for part in manifest.parts), modified=entry.modified if entry else 0.0,
                    state="head" if is_head else alive, pins=tuple(sorted(names.get((incarnation, n), ()))),
                )
            )  # fmt: skip
    return rows


def verify(store: Store) -> Verified:
    """Read everything: each version rebuilt with all digests checked, each pin pointing at one, each blob what its name
    says. Errors: StoreError only if the store itself does not answer."""
    problems: list[str] = []
    manifests: list[Manifest] = []
    replica = Replica(store)
    for incarnation in incarnations(store):
        for n in manifest_numbers(store, incarnation):
            try:
                manifest = read_manifest(store, incarnation, n)
                restarts = replica.restarts
                replica.fetch(manifest)
                if replica.restarts > restarts:
                    problems.append(f"version {incarnation}.{n}: it can be had from its anchor only")
                elif manifest.is_anchor and manifest.changes:
                    Replica(store).fetch(manifest)  # its other half
                manifests.append(manifest)
            except (MissingError, StoreError) as error:
                problems.append(f"version {incarnation}.{n}: {error.message}")
    for pin in pins(store):
        if store.head(manifest_key(pin.version.incarnation, pin.version.n)) is None:
            problems.append(f"pin {pin.name}: version {pin.version.name} is gone")
    blobs = store.entries("blobs")
    for entry in blobs:
        try:
            if not is_blob(entry.key, store.get(entry.key)):
                problems.append(f"{entry.key} does not hold what its name says")
        except MissingError:
            continue  # collected while we looked
    return Verified(len(manifests), len(blobs), sum(entry.size for entry in blobs), tuple(problems))
