"""A pool that runs a program on a workspace once: what a fresh sandbox gave for the same question is its answer.

    acquire(files) -> MemoSandbox: files stay here, as text
        read, write, list          answered here
        run_python, first time     (files, program, input) seen before? -> that answer
                                   else -> a real sandbox, filled, runs it -> remembered
        anything else              a real sandbox, from then on for everything

Siblings often write the same repair and run the same tests on it; a sandbox is started only for what nobody ran before.
(Code that draws lots is run by one draw for all of them.) Only a run that ended with exit code 0, or by its own
timer of processor seconds, is remembered: on another day it would end the same way. `exec` always runs.

What it does not do: share anything that a program left: every run that happens, happens in a sandbox of its own or in
the one that its episode has.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence

from etude.protocols import ExecResult, Sandbox, SandboxPool, Snapshot
from etude.types import digest_of

MAX_ANSWERS = 50_000
MAX_ANSWER_BYTES = 1 << 14
"""Of one answer's outputs together; larger ones are not remembered."""
MAX_WORKSPACE_BYTES = 1 << 19
"""A larger workspace lives in a real sandbox from the start: whether its disk holds it, only it knows."""
_LASTING = (0, -signal.SIGPROF)
_PLAIN = re.compile(r"(?!\.{1,2}(/|$))[\w.-]{1,100}(/(?!\.{1,2}(/|$))[\w.-]{1,100}){0,7}", re.ASCII)
"""Paths that mean the same here and inside."""


class MemoPool:
    """Over `inner`, which it closes (protocols.SandboxPool). One event loop."""

    def __init__(self, inner: SandboxPool) -> None:
        self.inner = inner
        self._answers: dict[str, asyncio.Future[ExecResult | None]] = {}
        self._numbers = itertools.count()
        self.answered = 0
        """Runs that cost no sandbox so far."""

    async def acquire(self, files: Mapping[str, str]) -> Sandbox:
        """A sandbox whose workspace holds `files` and nothing else. Errors: as `inner`'s, now or at first use."""
        if sum(map(len, files.values())) > MAX_WORKSPACE_BYTES or not all(map(_PLAIN.fullmatch, files)):
            return await self.inner.acquire(files)
        return MemoSandbox(self, f"memo-{next(self._numbers)}", files)

    async def close(self) -> None:
        await self.inner.close()

    async def answer(self, key: str, run: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
        """The answer to a question; `run` finds it out if nobody has. Waits for a sibling that is asking just now."""
        known = self._answers.get(key)
        if known is not None:
            result = await asyncio.shield(known)
            if result is None:  # that run may end otherwise next time: this one is for its caller alone
                return await run()
            self.answered += 1
            return result
        asking = self._answers[key] = asyncio.get_running_loop().create_future()
        result = None
        try:
            result = await run()
            return result
        finally:
            if result is not None and _is_lasting(result):
                asking.set_result(result)
                self._forget_oldest()
            else:
                del self._answers[key]
                asking.set_result(None)

    def _forget_oldest(self) -> None:
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(key for key, known in self._answers.items() if known.done())]


class MemoSandbox:
    """Made by MemoPool (protocols.Sandbox). Errors: as the inner pool's sandboxes, and those of taking one."""

    def __init__(self, pool: MemoPool, sandbox_id: str, files: Mapping[str, str]) -> None:
        self.sandbox_id = sandbox_id
        self._pool = pool
        self._files = dict(files)
        self._real: Sandbox | None = None
        self._materializing = asyncio.Lock()

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, env: Mapping[str, str] | None = None,
        leaves: bool = False,
    ) -> ExecResult:  # fmt: skip
        real = await self._materialize()
        return await real.exec(argv, stdin=stdin, timeout_s=timeout_s, env=env, leaves=leaves)

    async def run_python(self, source: str, *, stdin: bytes = b"", timeout_s: float) -> ExecResult:
        if self._real is not None:
            return await self._real.run_python(source, stdin=stdin, timeout_s=timeout_s)
        texts = (text for item in sorted(self._files.items()) for text in item)
        key = digest_of(source, stdin.decode("latin-1"), *texts)

        async def run() -> ExecResult:
            return await (await self._materialize()).run_python(source, stdin=stdin, timeout_s=timeout_s)

        return await self._pool.answer(key, run)

    async def read_file(self, path: str) -> bytes:
        if self._real is None and path in self._files:
            return self._files[path].encode()
        if self._real is None and self._is_free(path):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return await (await self._materialize()).read_file(path)

    async def write_file(self, path: str, data: bytes) -> None:
        if self._real is None and (path in self._files or self._is_free(path)):
            size = len(data) + sum(map(len, self._files.values()))
            text = data.decode(errors="replace")
            if size <= MAX_WORKSPACE_BYTES and text.encode() == data:
                self._files[path] = text
                return
        await (await self._materialize()).write_file(path, data)

    async def list_files(self) -> tuple[str, ...]:
        if self._real is None:
            return tuple(sorted(self._files))
        return await self._real.list_files()

    async def snapshot(self) -> Snapshot:
        return await (await self._materialize()).snapshot()

    async def fork(self) -> Sandbox:
        if self._real is None:
            return await self._pool.acquire(self._files)
        return await self._real.fork()

    async def close(self) -> None:
        if self._real is not None:
            await self._real.close()

    async def _materialize(self) -> Sandbox:
        async with self._materializing:
            if self._real is None:
                self._real = await self._pool.inner.acquire(self._files)
            return self._real

    def _is_free(self, path: str) -> bool:
        """A plain path that neither is a folder of a file nor has a file for a folder."""
        if not _PLAIN.fullmatch(path):
            return False
        return not any(f"{name}/".startswith(f"{path}/") or path.startswith(f"{name}/") for name in self._files)


def _is_lasting(result: ExecResult) -> bool:
    size = len(result.stdout) + len(result.stderr) + len(result.result)
    return result.exit_code in _LASTING and not (result.timed_out or result.truncated) and size <= MAX_ANSWER_BYTES
