"""Checkpoints: everything from which training goes on exactly as if nothing had happened.

    checkpoints/000001-00000010/   incarnation, step
        state.mp                   step, incarnation, published version, random state, digest of the tensors
        tensors.safetensors        masters and optimizer state, fp32

A checkpoint is written beside, synced, and renamed into place only after the manifest of its version is committed and
no later trainer has been seen. Its version is pinned in the store while it exists. Which one a start resumes from
follows from the store: the newest of the highest incarnation, else the one that the incarnation's record names.

numpy alone: tensors come and go as arrays by name. What it does not do: know models or optimizers (optimizer.py).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as dump_tensors

from etude.errors import RunError, StoreError
from etude.frames import read_file, write_bytes, write_file
from etude.killpoints import reach
from etude.types import FORMAT, Manifest, Noun, Version
from etude.weights.manifests import digest_bytes, incarnations, lineage, pin, pins, read_record, unpin
from etude.weights.store import Store

_NAME = re.compile(r"(\d{6,})-(\d{8,})")
KEEP = 2
"""Newest checkpoints of the surviving lineage that are kept."""
PINNED = "pinned"
"""A file of this name inside a checkpoint keeps it for good."""


class CheckpointState(Noun, frozen=True):
    """What a checkpoint says of itself."""

    name: str
    step: int
    incarnation: int
    version: Version
    """The published version with the same weights."""
    random: np.ndarray
    """State of torch's generator, uint8."""
    tensors_digest: str
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory. `tensors` are read-only."""

    state: CheckpointState
    tensors: Mapping[str, np.ndarray]


class Checkpoints:
    """The checkpoints of one run: a folder here, versions in a store. One trainer writes."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder = folder
        self._store = store
        folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """Complete checkpoints, by incarnation and step."""
        found = [(match, path.name) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [name for _, _, name in sorted((int(match[1]), int(match[2]), name) for match, name in found)]

    def resume_from(self) -> str | None:
        """The checkpoint that a new trainer goes on from; None: from the model folder.

        Errors: RunError if the folder and the store are not of one run, or the named checkpoint is gone.
        """
        names, numbers = self.names(), incarnations(self._store)
        if not numbers:
            if names:
                raise RunError(
                    f"{self._folder} does not belong to {self._store.url}",
                    cause="there are checkpoints, but the store has never seen a trainer",
                    hint="restore the store, or remove the checkpoints to start again",
                )
            return None
        own = [name for name in names if int(name.partition("-")[0]) == numbers[-1]]
        if own:
            return own[-1]
        named = read_record(self._store, numbers[-1]).checkpoint
        if named is not None and named not in names:
            raise RunError(
                f"checkpoint {named} is missing in {self._folder}",
                cause=f"incarnation {numbers[-1]} of {self._store.url} went on from it",
                hint="restore the folder",
            )
        return named

    def load(self, name: str) -> Loaded:
        """Errors: StoreError if a file is missing, cut or changed, or of another format."""
        folder = self._folder / name
        state = read_file(folder / "state.mp", CheckpointState)
        path = folder / "tensors.safetensors"
        try:
            data = path.read_bytes()
            if digest_bytes(data) != state.tensors_digest:
                raise StoreError(f"{path} is damaged", cause="its digest is not the one in state.mp", hint=_AWAY)
            return Loaded(state, load_tensors(data))
        except (OSError, SafetensorError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} cannot be read", cause=str(error), hint=_AWAY) from error

    def save(
        self,
        *,
        step: int,
        manifest: Manifest,
        random: np.ndarray,
        tensors: Mapping[str, np.ndarray],
        fence: Callable[[], None],
    ) -> str:
        """Write the checkpoint of a committed version, then remove what is older than the last two. Returns its name.

        `fence` raises LostRaceError if a later trainer has started. Errors: StoreError, with nothing half-written.
        """
        version = manifest.version
        name = f"{version.incarnation:06d}-{step:08d}"
        final = self._folder / name
        if not final.exists():
            pin(self._store, f"{_PIN}{name}", version, "a checkpoint")
            data = dump_tensors(dict(tensors))
            state = CheckpointState(
                name=name, step=step, incarnation=version.incarnation, version=version, random=random,
                tensors_digest=digest_bytes(data),
            )  # fmt: skip
            temporary = self._folder / f".{name}.tmp"
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                write_bytes(temporary / "tensors.safetensors", data)
                write_file(temporary / "state.mp", state)
                fence()
                reach("checkpoint-written")
                temporary.rename(final)
                _sync(self._folder)
                reach("checkpoint-renamed")
            except OSError as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, StoreError):
                    raise
                raise StoreError(f"cannot write checkpoint {final}", cause=str(error)) from error
        self.prune()
        return name

    def prune(self) -> None:
        """Remove dead checkpoints, and living ones but for the last two and those that are pinned."""
        surviving = lineage(self._store)
        living = []
        for name in self.names():
            folder = self._folder / name
            version = read_file(folder / "state.mp", CheckpointState).version
            if surviving.survives(version.incarnation, version.n):
                living.append(name)
        for name in self.names():
            if name not in living[-KEEP:] and not (self._folder / name / PINNED).exists():
                gone = self._folder / f".{name}.gone"
                (self._folder / name).rename(gone)  # a folder that is half removed must not look like a checkpoint
                unpin(self._store, f"{_PIN}{name}")
                shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed trainer left half-written or half-removed, and the pins of such checkpoints."""
        for path in self._folder.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)
        kept = {f"{_PIN}{name}" for name in self.names()}
        for held in pins(self._store):
            if held.name.startswith(_PIN) and held.name not in kept:
                unpin(self._store, held.name)


_PIN = "checkpoint-"
_AWAY = "move the checkpoint's folder away to go on from the one before"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
