"""What the tests of agent, rewards and bench share: a small task, its calls, and pools that break on purpose."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from etude.errors import SandboxDiedError, SandboxError
from etude.protocols import ExecResult, Sandbox, SandboxPool, Snapshot
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
from etude.types import Episode, Evidence, IOCheck, IOChecks, Limits, Reward, Task, ToolCall

T = TypeVar("T")
BROKEN = "def clamp(x, low, high):\n    return max(low, max(x, high))\n"
FIXED = BROKEN.replace("max(x, high)", "min(x, high)")


def clamp_task(*, workspace: Mapping[str, str] | None = None, package: str = "pinned", **limits: float) -> Task:
    checks = (
        IOCheck(call="clamp(7, 0, 5)", expected="5", visible=True),
        IOCheck(call="clamp(3, 0, 5)", expected="3", visible=True),
        IOCheck(call="clamp(-3, 0, 5)", expected="0", visible=False),
    )
    return Task.make(
        prompt="Repair clamp.",
        workspace=workspace or {"solution.py": BROKEN},
        verifier=IOChecks(path="solution.py", checks=checks),
        category="repair",
        source={"package": package},
        limits=Limits(**limits),  # type: ignore[arg-type]
    )


READ = ToolCall(name="read_file", arguments={"path": "solution.py"})
FIX = ToolCall(
    name="edit_file", arguments={"path": "solution.py", "old": "max(x, high)", "new": "min(x, high)", "line": 2}
)
SPOIL = ToolCall(name="edit_file", arguments={"path": "solution.py", "old": "max(x, high)", "new": "x", "line": "2"})
TEST = ToolCall(name="run_tests", arguments={})
FINISH = ToolCall(name="finish", arguments={"message": "done"})


def price(task: Task, episode: Episode, evidence: Evidence) -> Reward:
    value = float(evidence.solved)
    return Reward(total=value, parts={"verify": value})


@dataclass
class FragilePool:
    """The outer edge: a real pool whose machines break when told to.

    `refuse`: so many first acquires fail. `die_at`: number of the acquired sandbox (from 0) -> number of the call to it
    (from 0) at which it dies; every call to it fails from then on.
    """

    inner: SandboxPool
    refuse: int = 0
    die_at: dict[int, int] = field(default_factory=dict)
    acquired: int = 0
    open: int = 0

    async def acquire(self, files: Mapping[str, str]) -> Sandbox:
        if self.refuse > 0:
            self.refuse -= 1
            raise SandboxError("no machine is left")
        number = self.acquired
        self.acquired += 1
        sandbox = await self.inner.acquire(files)
        self.open += 1
        return FragileSandbox(sandbox, self, self.die_at.get(number))

    async def close(self) -> None:
        """The inner pool lives on."""


class FragileSandbox:
    def __init__(self, inner: Sandbox, pool: FragilePool, die_at: int | None) -> None:
        self.sandbox_id = inner.sandbox_id
        self._inner, self._pool, self._die_at, self._calls = inner, pool, die_at, 0
        self._closed = False

    def _live(self) -> Sandbox:
        if self._die_at is not None and self._calls >= self._die_at:
            raise SandboxDiedError("the sandbox is gone")
        self._calls += 1
        return self._inner

    async def exec(self, *args: object, **kwargs: object) -> ExecResult:
        return await self._live().exec(*args, **kwargs)  # type: ignore[arg-type]

    async def run_python(self, source: str, *, stdin: bytes = b"", timeout_s: float) -> ExecResult:
        return await self._live().run_python(source, stdin=stdin, timeout_s=timeout_s)

    async def read_file(self, path: str) -> bytes:
        return await self._live().read_file(path)

    async def write_file(self, path: str, data: bytes) -> None:
        await self._live().write_file(path, data)

    async def list_files(self) -> tuple[str, ...]:
        return await self._live().list_files()

    async def snapshot(self) -> Snapshot:
        return await self._live().snapshot()

    async def fork(self) -> Sandbox:
        return await self._live().fork()

    async def close(self) -> None:
        assert not self._closed, "closed twice"
        self._closed = True
        self._pool.open -= 1
        await self._inner.close()


_RUNNER = asyncio.Runner()
_POOL = NamespacePool(SandboxRecipe(spares=2))


def in_loop(job: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine in the one loop that the shared pool lives in."""
    return _RUNNER.run(job)


def real_pool() -> SandboxPool:
    """Real sandboxes. All tests share the pool, which starts with the first of them and ends with the process."""
    return _POOL


@atexit.register
def _close() -> None:
    _RUNNER.run(_POOL.close())
    _RUNNER.close()
