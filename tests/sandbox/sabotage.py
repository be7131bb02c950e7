"""One switch a protection that takes it away, so that a test can show that it was what stopped the attacks (E2)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from etude.sandbox import nest, tree
from etude.sandbox.recipe import SandboxRecipe
from sandbox.machine import RECIPE

Change = Callable[[list[str]], list[str]]


def _argv(change: Change) -> Callable[[pytest.MonkeyPatch], None]:
    """bubblewrap's arguments, changed."""

    def switch(patch: pytest.MonkeyPatch) -> None:
        whole = tree.command
        patch.setattr(tree, "command", lambda python, files: change(whole(python, files)))

    return switch


def _inside(name: str, *replacements: tuple[str, str]) -> Callable[[pytest.MonkeyPatch], None]:
    """The source of a program that runs inside, with texts replaced. Each must be there."""

    def switch(patch: pytest.MonkeyPatch) -> None:
        whole = tree._written_files

        def changed() -> Iterator[tuple[str, str]]:
            for path, text in whole():
                if path.endswith(f"/{name}.py"):
                    for old, new in replacements:
                        assert old in text, f"{name} has no {old!r} to take away"
                        text = text.replace(old, new)
                yield path, text

        patch.setattr(tree, "_written_files", changed)

    return switch


def _all(*switches: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def switch(patch: pytest.MonkeyPatch) -> None:
        for one in switches:
            one(patch)

    return switch


def _own_environment(patch: pytest.MonkeyPatch) -> None:
    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings | {"env": {**os.environ}})

    patch.setattr(nest.subprocess, "Popen", Popen)


def _without(*words: str) -> Change:
    return lambda argv: [word for word in argv if word not in words]


def _instead(old: list[str], new: list[str]) -> Change:
    def change(argv: list[str]) -> list[str]:
        place = next(n for n in range(len(argv)) if argv[n : n + len(old)] == old)
        return [*argv[:place], *new, *argv[place + len(old) :]]

    return change


_KEEP_LOW_ONES = """    code = 126
    try:
        for number in 3, 4:
            fcntl.fcntl(number, fcntl.F_DUPFD, 40)
"""
"""Process 1 happens to hold them where the program's own streams come to lie."""
_CLOSE_PIPES = """
        for number in range(5, MAX_FILES):
            try:
                if os.fstat(number).st_mode & 0o170000 == 0o010000:
                    os.close(number)
            except OSError:
                pass
"""
"""Without the end of the pipe that tells it what to do, a fork would wait for ever."""

SWITCHES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "tree": _argv(_instead(["--dir", "/var/tmp"], ["--ro-bind", "/var/tmp", "/var/tmp"])),
    "sealed root": _argv(_instead(["--remount-ro", "/"], [])),
    "environment": _all(_own_environment, _argv(_without("--clearenv"))),
    "network": _all(
        _argv(_instead(["--unshare-all"], ["--unshare-all", "--share-net"])),
        _inside("inside_nest", (" | 0x40000000\n", "\n"), ("        _raise_loopback()\n", "")),
    ),
    "processes": _inside(
        "inside_nest", ('    _mount(b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)\n', "")
    ),
    "process 1": _inside("inside_nest", ("_PR_SET_DUMPABLE, 0, 0, 0, 0", "_PR_SET_DUMPABLE, 1, 0, 0, 0")),
    "system calls": _inside(
        "inside_nest", ('    _check(_libc.prctl(_PR_SET_SECCOMP, 2, head, 0, 0), "seccomp")\n', "")
    ),
    "capabilities": _inside(
        "inside_nest",
        ("    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:\n        capability += 1\n", ""),
        ('    _check(_libc.capset(version_3, bytes(24)), "capset")\n', ""),
    ),
    "end of a run": _inside(
        "inside_run", ("        self._end_processes()\n", "        self._code = self._code or 0\n")
    ),
    "descriptors": _inside(
        "inside_child",
        ("    code = 126\n    try:\n", _KEEP_LOW_ONES),
        ("        os.closerange(5, MAX_FILES)\n", _CLOSE_PIPES),
    ),
    "paths": _inside("inside_files", ("_RESOLVE_BENEATH = 0x08", "_RESOLVE_BENEATH = 0x00")),
    "clock": _inside("inside_run", ('float(header["timeout_s"])', "60.0")),
}
LIMITS: dict[str, dict[str, int]] = {
    "memory": {"memory_mb": 16 * RECIPE.memory_mb},
    "number of processes": {"pids": 40 * RECIPE.pids},
    "disk": {"disk_mb": RECIPE.memory_mb},
    "output": {"output_kb": 64 * RECIPE.output_kb},
}
"""Limits are taken away by raising them: attacks still aim at the ones of RECIPE."""


def take_away(protection: str, patch: pytest.MonkeyPatch) -> SandboxRecipe:
    """The recipe of sandboxes without it; `patch` holds until the test ends."""
    if protection in LIMITS:
        return dataclasses.replace(RECIPE, **LIMITS[protection])
    SWITCHES[protection](patch)
    return RECIPE
