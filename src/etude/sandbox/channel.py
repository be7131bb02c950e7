"""The host's end of a sandbox's socket: one request, one answer, and the process behind it.

    frame = header length, body length (4 bytes each, big-endian), header (JSON), body      (see inside_zygote.py)

What comes back is not trusted: lengths are bounded before anything is read. Death of the sandbox, and a frame that is
not one, are SandboxDiedError; OSErrors from inside are raised as the same OSError here.
What it does not do: requests in parallel; a sandbox does one thing at a time.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

from etude.errors import SandboxDiedError, SandboxError

_HEAD = struct.Struct(">II")
_UCRED = struct.Struct("iii")
_MAX_HEADER = 64 << 20
_GRACE_S = 15.0
"""How long an answer may be overdue before the sandbox counts as broken."""


def make_socket() -> tuple[socket.socket, socket.socket]:
    """(host's end, sandbox's end). The first message tells the host the sender's pid."""
    host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    host.setblocking(False)
    host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return host, inside


async def peer_pid(host: socket.socket) -> int:
    """Pid (in the host's numbering) of the process that speaks first; what it says stays in the socket."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(host, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(host)
    _, ancillary, _, _ = host.recvmsg(1, socket.CMSG_SPACE(_UCRED.size), socket.MSG_PEEK)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return int(_UCRED.unpack(data)[0])
    return 0


class Channel:
    """Speaks with one sandbox and can kill it."""

    def __init__(
        self,
        name: str,
        pid: int,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        max_body: int,
        machine_is_alive: Callable[[], bool],
    ) -> None:
        self.name = name
        self.pid = pid
        self._machine_is_alive = machine_is_alive
        self._reader, self._writer = streams
        self._max_body = max_body
        self._lock = asyncio.Lock()
        self._pidfd = os.pidfd_open(pid)
        self._why_closed: str | None = None

    @property
    def is_open(self) -> bool:
        """False once the sandbox is known to be gone."""
        return self._why_closed is None and not self._reader.at_eof()

    async def ask(
        self, header: dict[str, Any], *bodies: bytes, timeout_s: float = 60.0
    ) -> tuple[dict[str, Any], bytes]:
        """Header and body of the answer.

        Errors: OSError from inside; SandboxDiedError. A caller that is cancelled while it waits has its sandbox
        killed: what it asked for may be half done.
        """
        async with self._lock:
            if self._why_closed is not None:
                raise self._died(self._why_closed)
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    answer, body = await self._exchange(header, bodies)
            except TimeoutError as error:
                self.kill("it did not answer in time")
                raise self._died("it did not answer in time") from error
            except (EOFError, ConnectionError, ValueError) as error:
                self.kill("its connection ended")
                raise self._died(str(error) or "its first process was killed") from error
            except asyncio.CancelledError:
                self.kill("a call was cancelled")
                raise
        if "errno" in answer:
            raise OSError(answer["errno"], answer["why"], answer["path"])
        return answer, body

    async def _exchange(self, header: dict[str, Any], bodies: tuple[bytes, ...]) -> tuple[dict[str, Any], bytes]:
        head = json.dumps(header).encode()
        self._writer.writelines((_HEAD.pack(len(head), sum(map(len, bodies))), head, *bodies))
        await self._writer.drain()
        return await self.read()

    async def read(self) -> tuple[dict[str, Any], bytes]:
        """The next frame. Errors: EOFError, ConnectionError, ValueError if it is not a frame."""
        header_size, body_size = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
        if header_size > _MAX_HEADER or body_size > self._max_body:
            raise ValueError("it sent something that is not an answer")
        header = json.loads(await self._reader.readexactly(header_size))
        if not isinstance(header, dict):
            raise ValueError("it sent something that is not an answer")
        return header, await self._reader.readexactly(body_size)

    def kill(self, why: str) -> None:
        """End every process of the sandbox, now. Idempotent."""
        if self._why_closed is not None:
            return
        self._why_closed = why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._writer.close()

    async def wait_gone(self) -> None:
        """After `kill`: until the kernel has ended process 1 and, before it, all the others."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.add_reader(self._pidfd, lambda: ended.done() or ended.set_result(None))
        try:
            await ended
        finally:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _died(self, cause: str) -> SandboxError:
        if not self._machine_is_alive():
            return SandboxError(
                f"the machine under sandbox {self.name} broke",
                cause="the process that all sandboxes of the pool run in was killed",
            )
        return SandboxDiedError(f"sandbox {self.name} died", cause=cause)


def send_end(control: socket.socket, inside: socket.socket) -> None:
    """Ask the nest for a sandbox that holds this end. Errors: BlockingIOError if the nest is too busy; OSError."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [inside.fileno()]))
    control.sendmsg([b"s"], [rights])
