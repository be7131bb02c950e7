"""`python -m etude.worker RUN ROLE SOCKET PARENT`: one worker process of a run.

It builds what its role needs from the saved recipe and serves it on the socket. It ends when its parent does: the
kernel kills it (PR_SET_PDEATHSIG), and a parent that was gone before that call is noticed by its pid. Roles: `trainer`,
`engine`, `engine-N`, `eval-N` (an engine that follows nobody: its version is loaded by name), and `serve`, the engine
of a server. With `train.ranks` the trainer's process is torchrun's agent, and its ranks are this module again.
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
from etude.rl.stage import RLStage
from etude.serve.stage import ServeStage


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent is gone")


def run_role(run: Path, role: str, socket: Path) -> None:
    """Until the process is killed; a trainer's ranks after the first until the first ends."""
    from etude.build import saved_stage
    from etude.roles import follow_trainer, num_ranks

    stage = saved_stage(run)
    count = num_ranks(stage, role) if isinstance(stage, RLStage) else 1
    if isinstance(stage, RLStage) and count > 1:
        from etude.train.launch import is_rank, run_ranks

        if not is_rank():
            return run_ranks("etude.worker", [str(run), role, str(socket), str(os.getpid())], count)
        if os.environ["RANK"] != "0":
            return follow_trainer(run, stage)
    asyncio.run(serve(run, stage, role, socket))


async def serve(run: Path, stage: RLStage | ServeStage, role: str, socket: Path) -> None:
    """Serve until the process is killed."""
    from etude.roles import handlers_of, serving_handlers

    async with contextlib.AsyncExitStack() as stack:
        if isinstance(stage, RLStage):
            server = Server(await handlers_of(run, stage, role, stack))
        else:
            server = Server(await serving_handlers(run, stage, stack))
        await server.listen(socket)
        await asyncio.Event().wait()


def main() -> None:
    """Read the four words, tie this process to its parent, serve."""
    run, role, socket, parent = sys.argv[1:]
    _die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the orchestrator, which ends its workers
    run_role(Path(run), role, Path(socket))


if __name__ == "__main__":
    main()
