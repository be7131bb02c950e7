"""What this machine offers and lacks for sandboxes: named findings for `etude doctor`.

The last finding is the proof: a real sandbox is started and asked to run Python. The others say which part fails and
what to do. What it does not do: install or change anything.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import subprocess
from dataclasses import dataclass

from etude.errors import SandboxError
from etude.sandbox import limits, seccomp, tree
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe

OLDEST_KERNEL = (5, 14)
"""openat2 (5.6), pidfds (5.3 to 5.10), and process limits counted for each user namespace (5.14)."""
ARCHITECTURES = ("x86_64", "aarch64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fact about this machine."""

    name: str
    ok: bool
    """False: sandboxes do not work until it is fixed."""
    cause: str
    """What was found, in words."""
    fix: str = ""
    """What to do; empty if nothing needs to be done."""


def probe(recipe: SandboxRecipe | None = None) -> list[Finding]:
    """Takes about a second. Must not be called inside a running event loop; raises nothing."""
    recipe = recipe or SandboxRecipe()
    findings = [_kernel(), _bubblewrap(), _filter(), _python(recipe), _limits()]
    return [*findings, asyncio.run(_start(recipe))]


def _kernel() -> Finding:
    release = platform.release()
    found = f"{platform.system()} {release} on {platform.machine()}"
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    ok = platform.system() == "Linux" and version >= OLDEST_KERNEL and platform.machine() in ARCHITECTURES
    oldest = ".".join(map(str, OLDEST_KERNEL))
    fix = f"use Linux {oldest} or newer on {' or '.join(ARCHITECTURES)} (on macOS: inside a container or VM)"
    return Finding(name="kernel", ok=ok, cause=found, fix="" if ok else fix)


def _bubblewrap() -> Finding:
    try:
        path = tree.find_bubblewrap()
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
    except SandboxError as error:
        return Finding(name="bubblewrap", ok=False, cause=error.cause or "", fix=error.hint or "")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name="bubblewrap", ok=False, cause=f"{path} does not run: {error}", fix=tree.BWRAP_HINT)
    return Finding(name="bubblewrap", ok=True, cause=f"{version} at {path}")


def _filter() -> Finding:
    try:
        size = len(seccomp.program(memory_is_counted=True)) // 8
    except (ImportError, OSError, RuntimeError) as error:
        return Finding(name="system-call filter", ok=False, cause=str(error), fix=seccomp.HINT)
    return Finding(name="system-call filter", ok=True, cause=f"seccomp, {size} instructions")


def _python(recipe: SandboxRecipe) -> Finding:
    try:
        python = tree.choose_python(recipe)
    except SandboxError as error:
        return Finding(name="python inside", ok=False, cause=f"{error.message}: {error.cause}", fix=error.hint or "")
    return Finding(name="python inside", ok=True, cause=f"{python.executable}, {python.why}")


def _limits() -> Finding:
    groups = limits.find()
    if isinstance(groups, limits.Cgroups):
        found = f"cgroups v{groups.version}: {', '.join(sorted(groups.parents))}"
        return Finding(name="limits", ok=True, cause=found)
    found = f"rlimits and a watcher on the process tree, because {groups}"
    return Finding(name="limits", ok=True, cause=found)


async def _start(recipe: SandboxRecipe) -> Finding:
    user = "a user without rights (root gives its own up)" if os.geteuid() == 0 else f"user {os.geteuid()}"
    try:
        async with NamespacePool(recipe) as pool:
            sandbox = await pool.acquire({"x.py": "print('ready')"})
            done = await sandbox.run_python("import x", timeout_s=10.0)
            await sandbox.close()
    except SandboxError as error:
        return Finding(name="sandbox", ok=False, cause=error.cause or error.message, fix=error.hint or "")
    if done.stdout != b"ready\n":
        said = done.stderr.decode(errors="replace").strip()
        return Finding(name="sandbox", ok=False, cause=f"Python does not work inside: {said}", fix="see sandbox.python")
    return Finding(name="sandbox", ok=True, cause=f"started as {user}, Python answered in {done.wall_s * 1000:.0f} ms")
