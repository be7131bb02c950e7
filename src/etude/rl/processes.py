"""Worker processes on this machine: start, connect, restart, end.

Each role is `python -m etude.worker RUN ROLE SOCKET`, in its own log file. A worker ends when its parent does: the
kernel sends it SIGKILL (prctl), so a killed orchestrator leaves nothing behind. Sockets lie in a private temporary
folder, for a Unix socket's path must be short and a run's folder need not be.

What it does not do: decide when to restart (the loop and the engine handles do), or place anything on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from etude.errors import EngineError
from etude.frames import Client

TCMALLOC = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4")
"""Preloaded into workers where it is installed: 1.3 times the training speed on a small model."""

Greeting = Callable[[Client], Awaitable[None]]
"""The first calls that a new process is told: it is up once they are answered."""
_STARTS = 3


@dataclass(slots=True)
class _Worker:
    process: asyncio.subprocess.Process
    client: Client | None = None


class Workers:
    """The run's worker processes by role."""

    def __init__(self, run: Path, *, up_timeout_s: float = 180.0) -> None:
        self._run = run
        self._up_timeout_s = up_timeout_s
        self._sockets = Path(tempfile.mkdtemp(prefix="etude-"))
        self._workers: dict[str, _Worker] = {}
        self._starts = 0
        self.restarts = 0

    async def start(self, role: str, greet: Greeting) -> None:
        """Start the role's process, wait until it answers, and `greet` it.

        One that a signal ends before it was greeted is started again: the kernel's out-of-memory killer may strike then
        as well as later. Errors: EngineError with the end of its log if it ends by itself, or again and again; what
        `greet` raises while the process lives.
        """
        for left in reversed(range(_STARTS)):
            try:
                return await self._start(role, greet)
            except BaseException as error:
                again = left and isinstance(error, EngineError) and await self._was_killed(role)
                await self.stop(role)
                if not again:
                    raise
                self.restarts += 1

    async def _start(self, role: str, greet: Greeting) -> None:
        log = self._run / "logs" / f"{role}.log"
        log.parent.mkdir(exist_ok=True)
        self._starts += 1
        socket = self._sockets / f"{role}.{self._starts}"
        with log.open("ab") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "etude.worker", str(self._run), role, str(socket), str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file, env=self._environment(role),
                start_new_session=True,
            )  # fmt: skip
        worker = self._workers[role] = _Worker(process=process)
        connecting = asyncio.create_task(Client.connect(socket, name=role, timeout_s=self._up_timeout_s))
        dying = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({connecting, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise EngineError(f"{role} ended before it was up", cause=_tail(log), hint=f"see {log}")
            worker.client = connecting.result()
        finally:
            connecting.cancel()
            dying.cancel()
        await greet(worker.client)

    async def _was_killed(self, role: str) -> bool:
        worker = self._workers[role]
        if worker.client is not None and not worker.client.closed:
            return False
        # Its connection closes a moment before the process can be waited for.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(worker.process.wait(), 5.0)
        return worker.process.returncode is not None and worker.process.returncode < 0

    async def restart(self, role: str, greet: Greeting) -> None:
        """Kill what is left of the role's process and start it anew."""
        self.restarts += 1
        await self.stop(role)
        await self.start(role, greet)

    async def stop(self, role: str) -> None:
        worker = self._workers.pop(role, None)
        if worker is None:
            return
        if worker.client is not None:
            await worker.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        await worker.process.wait()

    def pid(self, role: str) -> int | None:
        worker = self._workers.get(role)
        return None if worker is None else worker.process.pid

    async def close(self) -> None:
        for role in list(self._workers):
            await self.stop(role)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _environment(self, role: str) -> dict[str, str]:
        environment = dict(os.environ)
        # Whoever computes asks torch for its threads; helpers of other threads would be more than there are cores, and
        # then all of them sleep between operations: a decoding step of 1.1 ms takes 4.1.
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
        preload = next((path for path in TCMALLOC if Path(path).exists()), None)
        if preload and "LD_PRELOAD" not in environment:
            environment["LD_PRELOAD"] = preload
        return environment


def _tail(log: Path, lines: int = 12) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
