"""`python -m etude.worker RUN ROLE SOCKET PARENT`: one worker process of a run.

It builds what its role needs from the run's saved recipe and serves it on the socket. It ends when its parent does: the
kernel kills it (PR_SET_PDEATHSIG), and a parent that was gone before that call is noticed by its pid. Roles: `trainer`,
`engine`, `engine-N`, `eval-N` (an engine that follows nobody: its version is loaded by name).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from etude.frames import Server


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent is gone")


async def serve(run: Path, role: str, socket: Path) -> None:
    """Serve until the process is killed."""
    from etude.build import worker_handlers

    async with contextlib.AsyncExitStack() as stack:
        server = Server(await worker_handlers(run, role, stack))
        await server.listen(socket)
        await asyncio.Event().wait()


def main() -> None:
    """Read the four words, tie this process to its parent, serve."""
    run, role, socket, parent = sys.argv[1:]
    _die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the orchestrator, which ends its workers
    asyncio.run(serve(Path(run), role, Path(socket)))


if __name__ == "__main__":
    main()
