"""Cgroups, version 1 or 2, where this process may make them: memory, pids and processor of a sandbox as a whole.

A group `etude-PID-NUMBER` is made below the group that this process is in (so limits set on Etude itself still hold),
for each controller that is there. Where no group can be made, the reason is a text: then rlimits and the watcher in
inside_zygote.py do the work. Groups that a killed run left behind are removed at the next start.
What it does not do: move Etude's own processes, ask systemd for a group, or limit the disk (a tmpfs does).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NEEDED = ("memory", "pids")
WANTED = (*NEEDED, "cpu")
_PERIOD_US = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one sandbox."""

    memory_bytes: int
    pids: int
    nice: int = 10
    cpus: float = 1.0
    """Processor seconds a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cgroups:
    """Where groups can be made."""

    version: int
    parents: Mapping[str, Path]
    """Controller -> folder; version 2 has the same folder for all."""

    def make(self, number: int, limits: Limits) -> Group:
        """Errors: OSError."""
        folders = {name: parent / f"etude-{os.getpid()}-{number}" for name, parent in self.parents.items()}
        group = Group(folders=tuple(dict.fromkeys(folders.values())))
        write = _write_v1 if self.version == 1 else _write_v2
        try:
            for folder in group.folders:
                folder.mkdir()
            for controller, folder in folders.items():
                write(controller, folder, limits)
        except OSError:
            group.remove()
            raise
        return group

    def sweep(self) -> None:
        """Remove the groups of runs that have ended without doing so."""
        for parent in set(self.parents.values()):
            for folder in parent.glob("etude-*-*"):
                owner = folder.name.split("-")[1]
                if owner.isdigit() and not Path("/proc", owner).exists():
                    with contextlib.suppress(OSError):
                        folder.rmdir()


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The cgroup of one sandbox."""

    folders: tuple[Path, ...]

    def add(self, pid: int) -> None:
        """Move a process in; what it forks from now on is in too. Errors: OSError."""
        for folder in self.folders:
            _put(folder / "cgroup.procs", str(pid))

    def is_empty(self) -> bool:
        """Whether the last process has gone, so that another sandbox may have it. Errors: OSError."""
        return not (self.folders[-1] / "cgroup.procs").read_bytes()

    def remove(self) -> bool:
        """False while processes are still ending in it: try again."""
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


def find(proc: Path = Path("/proc/self")) -> Cgroups | str:
    """Where this process may make groups, or why it may not."""
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        own = dict(line.split(":", 2)[1:] for line in (proc / "cgroup").read_text().splitlines())
    except OSError as error:
        return f"cannot tell this process's cgroup: {error}"
    parents: dict[str, Path] = {}
    unified: Path | None = None
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup":
            for names, path in own.items():
                here = [name for name in names.split(",") if name in WANTED and name in options.split(",")]
                parents |= {name: _below(point, root, path) for name in here}
        elif kind == "cgroup2" and "" in own:
            unified = _below(point, root, own[""])
    if all(name in parents for name in NEEDED):
        return _try(Cgroups(version=1, parents=parents))
    if unified is not None:
        return _find_v2(unified)
    return "no cgroup file system is mounted"


def _find_v2(own: Path) -> Cgroups | str:
    try:
        offered = (own / "cgroup.controllers").read_text().split()
        if missing := [name for name in NEEDED if name not in offered]:
            return f"{own} does not offer the controllers {' and '.join(missing)}"
        names = [name for name in WANTED if name in offered]
        enabled = (own / "cgroup.subtree_control").read_text().split()
        if not set(names) <= set(enabled):
            _put(own / "cgroup.subtree_control", " ".join(f"+{name}" for name in names))
    except OSError as error:
        return f"{own} is not delegated to this user: {error.strerror}"
    return _try(Cgroups(version=2, parents=dict.fromkeys(names, own)))


def _try(groups: Cgroups) -> Cgroups | str:
    try:
        groups.make(-1, Limits(memory_bytes=1 << 30, pids=16)).remove()
    except OSError as error:
        return f"{error.filename} cannot be written: {error.strerror}"
    return groups


def _below(point: str, root: str, path: str) -> Path:
    """Folder of cgroup `path` in a mount at `point` that shows the hierarchy from `root` on."""
    inner = os.path.relpath(path, root) if path.startswith(root) else "."
    return Path(os.path.normpath(os.path.join(point, inner)))


def _write_v1(controller: str, folder: Path, limits: Limits) -> None:
    if controller == "memory":
        _put(folder / "memory.limit_in_bytes", str(limits.memory_bytes))
        for optional in ("memory.memsw.limit_in_bytes", "memory.kmem.tcp.limit_in_bytes"):
            with contextlib.suppress(OSError):  # swap and socket buffers: not every kernel counts them
                _put(folder / optional, str(limits.memory_bytes))
    elif controller == "pids":
        _put(folder / "pids.max", str(limits.pids))
    else:
        _put(folder / "cpu.shares", str(max(2, int(1024 / 1.25**limits.nice))))
        _put(folder / "cpu.cfs_period_us", str(_PERIOD_US))
        _put(folder / "cpu.cfs_quota_us", str(int(limits.cpus * _PERIOD_US)))


def _write_v2(controller: str, folder: Path, limits: Limits) -> None:
    if controller == "memory":
        _put(folder / "memory.max", str(limits.memory_bytes))
        with contextlib.suppress(OSError):
            _put(folder / "memory.swap.max", "0")
    elif controller == "pids":
        _put(folder / "pids.max", str(limits.pids))
    else:
        _put(folder / "cpu.weight.nice", str(limits.nice))
        _put(folder / "cpu.max", f"{int(limits.cpus * _PERIOD_US)} {_PERIOD_US}")


def _put(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)
