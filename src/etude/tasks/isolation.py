"""Where harvested functions run while tasks are built: a Python behind bubblewrap, served over pipes.

Where in the flow: checks -> **isolation** -> probe (the program inside). The functions come from published packages,
and nobody has read them all: no network, no user files, nothing writable but a private /tmp, no environment.

What it does not do: hold a workspace, limit a whole process tree or serve an agent; that is `etude.sandbox`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from etude.errors import SandboxError
from etude.sandbox.tree import find_bubblewrap

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Observed:
    """What one call gave, see `probe`."""

    text: str
    wrap: str
    arcs: int


def _command(hash_seed: int) -> list[str]:
    command = [
        find_bubblewrap(),
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--cap-drop",
        "ALL",
    ]
    command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    home = Path.home()
    shared = ("/tmp", "/home", "/root", "/run", "/var", "/mnt", "/media", "/srv")
    for hidden in (*shared, *([str(home)] if len(home.parts) > 2 else [])):
        if Path(hidden).is_dir() and not Path(hidden).is_symlink():
            command += ["--tmpfs", hidden]
    for needed in dict.fromkeys((sys.base_prefix, sys.prefix, str(PACKAGE))):
        command += ["--ro-bind", needed, needed]
    environment = {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(PACKAGE.parent)}
    for name, value in (environment | {"LC_ALL": "C.UTF-8", "TZ": "UTC"}).items():
        command += ["--setenv", name, value]
    return [*command, "--chdir", "/tmp", sys.executable, "-B", "-m", "etude.tasks.probe"]


class Prober:
    """A probe process. Not thread-safe; use it as a context manager.

    >>> with Prober(hash_seed=1) as prober:
    ...     prober.run(["def f(x):\\n    return x + 1"], [["f(1)"]], lines=1000)[0][0].text
    '2'
    """

    def __init__(self, *, hash_seed: int) -> None:
        self.process = subprocess.Popen(
            _command(hash_seed), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
        )

    def __enter__(self) -> Prober:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, sources: Sequence[str], calls: Sequence[Sequence[str]], *, lines: int, fresh: bool = False
    ) -> list[list[Observed]]:
        """Calls of each source, all in one process, at most `lines` lines a call.

        `fresh`: the module is executed anew before each call, as grading does. Errors: SandboxError.
        """
        return self._ask({"sources": sources, "calls": calls, "lines": lines, "fresh": fresh})

    def _ask(self, request: dict[str, object]) -> list[list[Observed]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise SandboxError("the isolated Python that tasks are built in ended", cause=self._last_words())
        return [[Observed(text, wrap, int(arcs, 16)) for text, wrap, arcs in entries] for entries in json.loads(line)]

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        self._kill()
        return self.process.stderr.read().decode(errors="replace").strip()[-500:] or f"exit {self.process.wait()}"

    def close(self) -> None:
        """End the process and everything in it."""
        self._kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not yet sent is forgotten
                    pipe.close()

    def _kill(self) -> None:
        """The whole group: a child of bubblewrap that still waits for its user map does not die with its parent yet."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
