"""The `sandbox` table of a recipe. Light: it loads nothing but errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.errors import RecipeError

KINDS = ("namespace",)
NETWORKS = ("none",)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxRecipe:
    """How code that nobody trusts is run. Errors: RecipeError for a value that cannot be honored."""

    kind: str = "namespace"
    """namespace: Linux namespaces set up by bubblewrap."""
    spares: int = 8
    """Sandboxes kept ready. A waiting one takes about 1.5 MB of memory."""
    memory_mb: int = 512
    """Memory of all processes of a sandbox together, beside its files."""
    timeout_s: float = 20.0
    """Longest time, on the clock, that one command may take; also its processor seconds, summed over its processes."""
    network: str = "none"
    """none: a loopback device of its own and nothing else."""
    pids: int = 64
    """Processes and threads that may exist at once."""
    disk_mb: int = 64
    """Size of /workspace, /tmp and /dev/shm together. Files are kept in memory."""
    output_kb: int = 256
    """Of stdout, stderr and the result channel, each; what is beyond is dropped and reported as truncated."""
    nice: int = 10
    """Priority of everything inside below that of Etude's own processes (0: equal, 19: last)."""
    python: str = "auto"
    """Absolute path of the interpreter inside. auto: the one that runs Etude if a sandbox can read it, else the
    system's."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecipeError(f"sandbox.kind = {self.kind!r} is not supported", hint=f"use one of: {', '.join(KINDS)}")
        if self.network not in NETWORKS:
            raise RecipeError(
                f"sandbox.network = {self.network!r} is not supported",
                cause="sandboxes have no network",
                hint='use network = "none"',
            )
        bounds = {
            "spares": (0, 10_000), "memory_mb": (32, 1 << 20), "pids": (2, 30_000), "disk_mb": (1, 1 << 16),
            "output_kb": (1, 1 << 16), "nice": (0, 19), "timeout_s": (0.01, 86_400.0),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise RecipeError(f"sandbox.{name} = {value} is out of range", hint=f"use {low} to {high}")
        if self.disk_mb > self.memory_mb:
            raise RecipeError(
                f"sandbox.disk_mb = {self.disk_mb} is more than sandbox.memory_mb = {self.memory_mb}",
                cause="files are kept in memory",
                hint="raise memory_mb or lower disk_mb",
            )
        if self.python != "auto" and not PurePosixPath(self.python).is_absolute():
            raise RecipeError(
                f"sandbox.python = {self.python!r} is not an absolute path", hint='use "auto" or "/usr/bin/python3"'
            )
