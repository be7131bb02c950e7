"""A pool on an event loop that lives as long as a test module, so that not every test starts bubblewrap anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from etude.protocols import ExecResult
from etude.sandbox.namespace import NamespaceSandbox
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe

T = TypeVar("T")
RECIPE = SandboxRecipe(spares=2, memory_mb=128, timeout_s=30.0, pids=24, disk_mb=8, output_kb=64, nice=0)
COUNT = "import os\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]))"
"""Source that prints how many processes there are: 2 are process 1 and itself."""


class Machine:
    """`run` takes coroutines; `box` is a sandbox for the length of a `with`."""

    def __init__(self, runner: asyncio.Runner, pool: NamespacePool) -> None:
        self.runner = runner
        self.pool = pool

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def in_box(
        self, work: Callable[[NamespaceSandbox], Coroutine[Any, Any, T]], files: dict[str, str] | None = None
    ) -> T:
        """Run `work` with a fresh sandbox."""

        async def with_box() -> T:
            async with box(self.pool, files) as sandbox:
                return await work(sandbox)

        return self.run(with_box())

    def python(self, source: str, *, timeout_s: float = 15.0, stdin: bytes = b"") -> ExecResult:
        """What the source does in a fresh sandbox."""
        return self.in_box(lambda sandbox: sandbox.run_python(source, stdin=stdin, timeout_s=timeout_s))

    def shell(self, script: str, *, timeout_s: float = 15.0) -> ExecResult:
        """What the shell script does in a fresh sandbox."""
        return self.in_box(lambda sandbox: sandbox.exec(["sh", "-c", script], timeout_s=timeout_s))


@contextlib.asynccontextmanager
async def box(pool: NamespacePool, files: dict[str, str] | None = None) -> AsyncIterator[NamespaceSandbox]:
    async with closing(await pool.acquire(files or {})) as sandbox:
        yield sandbox


@contextlib.asynccontextmanager
async def closing(sandbox: NamespaceSandbox) -> AsyncIterator[NamespaceSandbox]:
    try:
        yield sandbox
    finally:
        await sandbox.close()


@contextlib.contextmanager
def machine(recipe: SandboxRecipe) -> Iterator[Machine]:
    with asyncio.Runner() as runner:
        pool = NamespacePool(recipe)
        runner.run(pool.start())
        try:
            yield Machine(runner, pool)
        finally:
            runner.run(pool.close())
