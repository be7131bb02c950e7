"""A reader's copy of a version, and how it becomes another: along differences if it can, else from an anchor.

    target --parent--> ... --parent--> the version held        apply the differences of that path, oldest first
                  \\--> the nearest anchor                      or take its tensors in full, and differences from there

Whichever path has fewer bytes is taken; what is not on it is ignored. Every blob is held to its name and every piece
to its digest. The copy is replaced only by a whole one: arrays that were handed out never change.

What it does not do: choose what to read (subscribe.py), or load it into a network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etude.errors import MissingError, StoreError
from etude.killpoints import reach
from etude.types import Manifest, Part, Version
from etude.weights import delta
from etude.weights.manifests import digest_bytes, is_blob, read_manifest
from etude.weights.pieces import DTYPES
from etude.weights.store import Store
from etude.weights.workers import in_order

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What reading a version took."""

    versions: int
    """Applied one after the other."""
    nbytes: int
    """Of the blobs that were read."""
    seconds: float
    is_whole: bool
    """Whether it began at an anchor."""


def fetch(store: Store, manifest: Manifest, *, threads: int = 2) -> Tensors:
    """All tensors of a version, by one who holds none. Errors: those of `Replica.fetch`."""
    return Replica(store, threads=threads).fetch(manifest)


def dtypes(manifest: Manifest) -> dict[str, str]:
    """safetensors dtype name of every tensor."""
    return {part.name: part.dtype for part in manifest.parts or manifest.changes}


class Replica:
    """Not for several threads at once; it uses `threads` of its own."""

    def __init__(self, store: Store, *, threads: int = 2) -> None:
        self._store = store
        self._threads = threads
        self._tensors: Tensors = {}
        self.version: Version | None = None
        """What is held."""
        self.last: Fetched | None = None
        self.nbytes = 0
        """Read so far, over all versions."""
        self.restarts = 0
        """How often a path of differences failed, and an anchor was taken instead."""

    def fetch(self, manifest: Manifest) -> Tensors:
        """All tensors by hub name, in their shapes; what numpy has no type for as its bits (see `dtypes`).

        Errors: MissingError naming what is gone; StoreError naming what is damaged, or does not make whole tensors.
        """
        if self.version == manifest.version:
            return self._tensors
        started = time.perf_counter()
        path = path_to(self._store, manifest, held=self.version)
        goes_on = _continues(path, self.version)
        try:
            tensors, nbytes = self._along(path, goes_on=goes_on)
        except StoreError:
            if not goes_on:
                raise
            self.restarts += 1
            path, goes_on = path_to(self._store, manifest, held=None), False
            tensors, nbytes = self._along(path, goes_on=False)
        reach("version-fetched")
        self._tensors, self.version = tensors, manifest.version
        self.nbytes += nbytes
        self.last = Fetched(len(path), nbytes, time.perf_counter() - started, is_whole=not goes_on)
        return tensors

    def _along(self, path: Sequence[Manifest], *, goes_on: bool) -> tuple[Tensors, int]:
        """goes_on: the first one is taken as a difference from what is held."""
        tensors, nbytes = self._tensors, 0
        for number, manifest in enumerate(path):
            as_difference = number > 0 or goes_on
            parts = manifest.changes if as_difference else manifest.parts
            tensors = self._apply(manifest, parts, tensors if as_difference else None)
            nbytes += sum(part.nbytes for part in parts)
        return tensors, nbytes

    def _apply(self, manifest: Manifest, parts: Sequence[Part], base: Tensors | None) -> Tensors:
        """The version that `parts` describe: differences from `base`, or whole."""
        _check(manifest, parts, base)
        changed = {part.name for part in parts if part.blob}
        kept = {part.name for part in parts} - changed
        tensors = {name: base[name] for name in kept} if base is not None else {}
        tensors |= {part.name: np.empty(part.shape, DTYPES[part.dtype]) for part in parts if part.name in changed}
        for part in parts:
            if part.name in changed and not part.blob:
                assert base is not None
                _stretch(tensors, part)[:] = _stretch(base, part)
        by_blob: dict[str, list[Part]] = {}
        for part in parts:
            if part.blob:
                by_blob.setdefault(part.blob, []).append(part)
        for _ in in_order(lambda item: self._fill(*item, tensors, base), by_blob.items(), self._threads):
            pass
        return tensors

    def _fill(self, blob: str, parts: Sequence[Part], tensors: Tensors, base: Tensors | None) -> None:
        data = memoryview(self._store.get(blob))
        if not is_blob(blob, data):
            raise StoreError(f"{self._store.url}: {blob} is damaged", cause="its bytes are not those of its name")
        for part in parts:
            out = _stretch(tensors, part)
            old = None if base is None else _stretch(base, part).view(np.uint8)
            delta.decode(old, data[part.start : part.start + part.nbytes], part.dtype, out)
            if digest_bytes(out.view(np.uint8).data) != part.digest:
                raise StoreError(f"{self._store.url}: {blob} is damaged", cause=f"at {part.name}[{part.offset}:]")


def _stretch(tensors: Tensors, part: Part) -> np.ndarray:
    """The part's elements, flat; a view."""
    return tensors[part.name].reshape(-1)[part.offset : part.offset + part.count]


def _check(manifest: Manifest, parts: Sequence[Part], base: Tensors | None) -> None:
    """Errors: StoreError if the parts do not make whole tensors, or are not of the base's."""
    name = manifest.version.name
    filled: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        if part.dtype not in DTYPES:
            raise StoreError(f"version {name}: {part.name} has the unknown dtype {part.dtype}")
        if part.offset != filled.get(part.name, 0) or part.shape != shapes.setdefault(part.name, part.shape):
            raise StoreError(f"version {name}: the pieces of {part.name} do not fit together")
        if min(part.shape, default=0) < 0 or part.count < 0:
            raise StoreError(f"version {name}: {part.name} cannot have the shape {part.shape}")
        if base is not None and (part.name not in base or base[part.name].shape != part.shape
                                 or base[part.name].dtype != DTYPES[part.dtype]):  # fmt: skip
            raise StoreError(f"version {name} is no difference from the version before", cause=f"see {part.name}")
        if base is None and not part.blob:
            raise StoreError(f"version {name}: {part.name} lies nowhere")
        filled[part.name] = filled.get(part.name, 0) + part.count
    for tensor, count in filled.items():
        if count != int(np.prod(shapes[tensor], dtype=np.int64)):
            raise StoreError(f"version {name}: {tensor} is incomplete")
    if not filled or (base is not None and base.keys() != filled.keys()):
        raise StoreError(f"version {name} has other tensors than the version before")


def _continues(path: Sequence[Manifest], held: Version | None) -> bool:
    """Whether the path's differences begin at what is held."""
    return held is not None and bool(path[0].changes) and path[0].parent == held


def path_to(store: Store, target: Manifest, *, held: Version | None) -> list[Manifest]:
    """Versions to apply, oldest first: the first one's parent is `held`, or it is an anchor.

    Errors: MissingError if a version on the way is gone; StoreError if none of them is an anchor.
    """
    walked: list[Manifest] = []
    from_anchor: list[Manifest] | None = None
    for manifest in _ancestors(store, target):
        walked.append(manifest)
        if _continues(walked[-1:], held):
            shorter = walked[::-1]
            if from_anchor is None or _size(shorter, whole=False) <= _size(from_anchor, whole=True):
                return shorter
            return from_anchor
        if from_anchor is None and manifest.is_anchor:
            from_anchor = walked[::-1]
        if from_anchor is not None and not _may_lead_to(manifest, held):
            return from_anchor
    if from_anchor is None:
        raise StoreError(f"version {target.version.name} cannot be rebuilt", cause="no anchor is below it")
    return from_anchor


def _ancestors(store: Store, target: Manifest) -> Iterator[Manifest]:
    """The version, its parent, and so on as far as they are there; a gap above the nearest anchor is an error."""
    current, above_anchor = target, True
    while True:
        yield current
        above_anchor = above_anchor and not current.is_anchor
        parent = current.parent
        if parent is None or not current.changes:
            return
        if (parent.incarnation, parent.n) >= (current.version.incarnation, current.version.n):
            raise StoreError(f"{store.url}: version {current.version.name} names a later parent", hint="it is damaged")
        try:
            current = read_manifest(store, parent.incarnation, parent.n)
        except MissingError:
            if above_anchor:
                raise
            return


def _may_lead_to(manifest: Manifest, held: Version | None) -> bool:
    parent = manifest.parent
    return held is not None and parent is not None and (held.incarnation, held.n) <= (parent.incarnation, parent.n)


def _size(path: Sequence[Manifest], *, whole: bool) -> int:
    first = path[0].parts if whole else path[0].changes
    return sum(part.nbytes for part in first) + sum(part.nbytes for later in path[1:] for part in later.changes)
