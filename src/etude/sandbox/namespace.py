"""One sandbox: a workspace and fresh processes in it, until it is closed (protocols.Sandbox).

Its process 1 waits inside (inside_zygote.py); every method is one question over its channel. What a program does wrong
is in its ExecResult; SandboxDiedError says that the sandbox itself has gone, SandboxError that the machine failed.
What it does not do: outlive its first death, save memory in a snapshot.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude import frames
from etude.errors import SandboxError
from etude.protocols import ExecResult, Snapshot
from etude.sandbox.channel import Channel
from etude.sandbox.limits import Group
from etude.sandbox.recipe import SandboxRecipe


class NamespaceSandbox:
    """Made by NamespacePool. `folder` says where snapshots go; `release` is called once, when the sandbox is closed."""

    def __init__(
        self,
        channel: Channel,
        group: Group | None,
        recipe: SandboxRecipe,
        folder: Callable[[], Path],
        release: Callable[[NamespaceSandbox], None],
        fresh: Callable[[], Awaitable[NamespaceSandbox]],
    ) -> None:
        self.sandbox_id = channel.name
        self.channel = channel
        self.group = group
        self._recipe = recipe
        self._folder = folder
        self._release = release
        self._fresh = fresh
        self._ending: asyncio.Task[None] | None = None

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, env: Mapping[str, str] | None = None,
        leaves: bool = False,
    ) -> ExecResult:  # fmt: skip
        """Run a program in /workspace; its whole process tree is killed at the end, unless it `leaves` it running.

        `env` is added to the sandbox's own small environment. `timeout_s` is cut to the recipe's. A program that is
        not there gives exit code 127. Errors: ValueError for an empty argv, SandboxDiedError.
        """
        if not argv:
            raise ValueError("argv is empty")
        return await self._run([*argv], b"", stdin, timeout_s, env, leaves=leaves)

    async def run_python(self, source: str, *, stdin: bytes = b"", timeout_s: float) -> ExecResult:
        """Run Python source in a fork of the warm interpreter. Errors: SandboxDiedError."""
        return await self._run([], source.encode("utf-8", "surrogatepass"), stdin, timeout_s, None)

    async def _run(
        self, argv: list[str], source: bytes, stdin: bytes, timeout_s: float, env: Mapping[str, str] | None,
        *, leaves: bool = False,
    ) -> ExecResult:  # fmt: skip
        timeout_s = min(timeout_s, self._recipe.timeout_s)
        header = {
            "op": "run",
            "argv": argv,
            "env": {**(env or {})},
            "stdin": len(stdin),
            "timeout_s": timeout_s,
            "leaves": leaves,
        }
        answer, body = await self.channel.ask(header, stdin, source, timeout_s=timeout_s)
        first, second, _ = itertools.accumulate(answer["sizes"])
        stdout, stderr, result = body[:first], body[first:second], body[second:]
        return ExecResult(
            exit_code=answer["code"],
            stdout=stdout,
            stderr=stderr,
            result=result,
            timed_out=answer["timed_out"],
            truncated=answer["truncated"],
            wall_s=answer["wall_s"],
        )

    async def read_file(self, path: str) -> bytes:
        """Errors: FileNotFoundError, IsADirectoryError, PermissionError (a path or link that leads outside, or what is
        not a regular file), OSError (EFBIG: larger than the disk), SandboxDiedError."""
        _, body = await self.channel.ask({"op": "get", "path": path})
        return body

    async def write_file(self, path: str, data: bytes) -> None:
        """Whole or not at all; missing folders are made. Errors: as `read_file`, and OSError (ENOSPC: disk full)."""
        await self.put({path: data})

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write many files in one go. Errors: as `write_file`; files before the one that failed are written."""
        listing = [[path, len(data)] for path, data in files.items()]
        await self.channel.ask({"op": "put", "files": listing}, *files.values())

    async def list_files(self) -> tuple[str, ...]:
        """Regular files, relative, sorted; links are not followed. Names that are not UTF-8 are left out."""
        answer, _ = await self.channel.ask({"op": "list"})
        return tuple(answer["files"])

    async def snapshot(self) -> Snapshot:
        """Save files, folders, links and permissions; not processes, FIFOs or sockets; hard links become copies.

        Errors: OSError (EFBIG: files that claim more than the disk holds), SandboxDiedError.
        """
        entries, body = await self._save()
        number = secrets.token_hex(8)
        path = self._folder() / f"{number}.snapshot"
        frames.write_file(path, {"entries": json.dumps(entries), "body": body})
        return Snapshot(snapshot_id=number, path=str(path), memory=False)

    async def fork(self) -> NamespaceSandbox:
        """Another sandbox with a copy of this workspace. Errors: as `snapshot`, SandboxError."""
        entries, body = await self._save()
        other = await self._fresh()
        await other.restore(entries, body)
        return other

    async def restore(self, entries: list[Any], body: bytes) -> None:
        """Fill an empty workspace with what was saved; the sandbox is closed if that fails. Errors: SandboxError."""
        try:
            await self.channel.ask({"op": "restore", "entries": entries}, body)
        except BaseException as error:  # a caller who gives up, too: nobody else knows of this sandbox
            await self.close()
            if isinstance(error, OSError):
                raise SandboxError("a saved workspace does not fit", cause=str(error)) from error
            raise

    async def _save(self) -> tuple[list[Any], bytes]:
        answer, body = await self.channel.ask({"op": "save"})
        return answer["entries"], body

    async def close(self) -> None:
        """Kill everything in it and wait until it is gone. Idempotent."""
        if self._ending is None:
            self.channel.kill("it was closed")
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)  # a caller that is cancelled here takes no place with it

    async def _end(self) -> None:
        await self.channel.wait_gone()
        self._release(self)


def read_snapshot(snapshot: Snapshot) -> tuple[list[Any], bytes]:
    """What `restore` takes. Errors: StoreError if the file is missing or cut."""
    saved = frames.read_file(Path(os.fspath(snapshot.path)), dict[str, Any])
    return json.loads(saved["entries"]), saved["body"]
