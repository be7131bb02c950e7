"""A run's folder: its files, its lock, its state.

    runs/NAME/ recipe.toml run.json metrics.jsonl ledger.sqlite groups/ batches/ episodes/ evals/ weights/ checkpoints/
               logs/ result.json report.html

`run.json` says what ran where and which phase it is in; it is replaced whole. The lock is held by the process that
works in the folder and vanishes with it, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from etude import __version__
from etude.config import resolved_text
from etude.errors import RunError
from etude.frames import write_bytes
from etude.types import FORMAT

PHASES = ("new", "before", "train", "after", "done")
"""In order; `done` is the end. A run that is in any other phase can be resumed."""


def digest(data: bytes) -> str:
    """blake2b-128 of a file's bytes, as the ledger keeps it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class RunFolder:
    """Paths and state of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, *, stage: str, recipe: Any, seed: int) -> RunFolder:
        """Make the folder with its resolved recipe. Errors: RunError if it is there or cannot be written."""
        try:
            path.mkdir(parents=True)
            for name in ("groups", "batches", "episodes", "evals", "checkpoints", "logs"):
                (path / name).mkdir()
        except OSError as error:
            raise RunError(
                f"cannot make the run's folder {path}", cause=str(error), hint="choose another --run"
            ) from error
        write_bytes(path / "recipe.toml", resolved_text(stage, recipe).encode())
        folder = cls(path)
        folder._write(
            {
                "format": FORMAT,
                "name": path.name,
                "stage": stage,
                "phase": "new",
                "created": time.time(),
                "seed": seed,
                "versions": {"etude": __version__, "python": platform.python_version()} | _versions(),
                "git": _git_commit(),
                "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            }
        )
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Errors: RunError if this is no run of our format."""
        folder = cls(path)
        if folder.info().get("format") != FORMAT:
            raise RunError(
                f"{path} has format {folder.info().get('format')!r}", hint=f"this Etude reads format {FORMAT}"
            )
        return folder

    def info(self) -> dict[str, Any]:
        try:
            info: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise RunError(
                f"{self.path} is not a run", cause=str(error), hint="`etude runs list` shows them"
            ) from error
        return info

    @property
    def phase(self) -> str:
        return str(self.info()["phase"])

    def update(self, **changes: Any) -> None:
        """Replace entries of run.json."""
        self._write(self.info() | changes)

    def _write(self, info: dict[str, Any]) -> None:
        write_bytes(self.path / "run.json", json.dumps(info, indent=2).encode())

    def group(self, key: str) -> Path:
        return self.path / "groups" / f"{key}.mp"

    def batch(self, step: int) -> Path:
        return self.path / "batches" / f"{step:06d}.mp"

    def log(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.log"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder. Errors: RunError naming the process that holds it, or that nothing can be written here."""
        try:
            opened = (self.path / "lock").open("a+b", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                holder = file.read().decode().strip() or "another process"
                hint = f"`etude runs stop {self.path.name}` ends it"
                raise RunError(
                    f"run {self.path.name} is in use", cause=f"process {holder} works on it", hint=hint
                ) from error
            try:
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            except OSError as error:
                raise self._unwritable(error) from error
            yield

    def _unwritable(self, error: OSError) -> RunError:
        hint = "make the folder writable (is its disk full, or mounted read-only?); the same command goes on"
        return RunError(f"{self.path} cannot be written", cause=str(error), hint=hint)

    def holder(self) -> int | None:
        """Process id of whoever holds the lock now, else None."""
        path = self.path / "lock"
        if not path.exists():
            return None
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read().strip()
                return int(text) if text.isdigit() else None
        return None


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "numpy", "obstore", "tokenizers")
    installed = {dist.metadata["Name"] for dist in metadata.distributions()}
    return {name: metadata.version(name) for name in names if name in installed}


def _git_commit() -> str | None:
    """Commit of the checkout that this code runs from, or None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def choose(runs: Path, name: str, *, stage: str, recipe: Any, seed: int) -> tuple[RunFolder, bool]:
    """The unfinished run of this name and this very recipe, else a new one; and whether it is resumed.

    Names count up: quickstart, quickstart-2, ... An unfinished run of another recipe is left alone.
    """
    number = 1
    while True:
        path = runs / (name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return RunFolder.create(path, stage=stage, recipe=recipe, seed=seed), False
        if (path / "run.json").is_file():
            folder = RunFolder.open(path)
            wanted = resolved_text(stage, recipe)
            if folder.phase != "done" and (path / "recipe.toml").read_text() == wanted:
                return folder, True
        number += 1
