"""The host's end of a sandbox's socket: one request, one answer, and the process behind it.

    frame = header length, body length (4 bytes each, big-endian), header (JSON), body      (see inside_wire.py)

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
from etude.sandbox.inside_wire import HEAD, head_of

_UCRED = struct.Struct("iii")
_MAX_HEADER = 64 << 20
_GRACE_S = 30.0
"""How long an answer may be overdue before the sandbox counts as broken."""


def make_socket() -> tuple[socket.socket, socket.socket]:
    """(host's end, sandbox's end). The first message tells the host the sender's pid."""
    host, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    host.setblocking(False)
    host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return host, inside


async def first_words(host: socket.socket) -> tuple[int, dict[str, Any]]:
    """Of a new sandbox: the pid of the process that speaks (in the host's numbering), and what it says.

    Errors: EOFError, ConnectionError, ValueError.
    """
    await readable(host.fileno())
    head, ancillary, _, _ = host.recvmsg(HEAD.size, socket.CMSG_SPACE(_UCRED.size))
    if len(head) < HEAD.size:
        raise EOFError("it ended at once")
    pid = 0
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = _UCRED.unpack(data)[0]
    header, _ = await _read_rest(host, head, 0)
    return pid, header


async def readable(handle: int) -> None:
    """Wait until there is something to read, or, of a pidfd, until the process has ended."""
    loop = asyncio.get_running_loop()
    happened = asyncio.Event()
    loop.add_reader(handle, happened.set)
    try:
        await happened.wait()
    finally:
        loop.remove_reader(handle)


async def _read_rest(host: socket.socket, head: bytes, max_body: int) -> tuple[dict[str, Any], bytes]:
    header_size, body_size = HEAD.unpack(head)
    if header_size > _MAX_HEADER or body_size > max_body:
        raise ValueError("it sent something that is not an answer")
    header = json.loads(await _read_exactly(host, header_size))
    if not isinstance(header, dict):
        raise ValueError("it sent something that is not an answer")
    return header, await _read_exactly(host, body_size)


async def _read_exactly(host: socket.socket, size: int) -> bytes:
    if size == 0:
        return b""
    loop = asyncio.get_running_loop()
    data = await loop.sock_recv(host, size)
    if len(data) == size:
        return data
    parts = [data]
    missing = size - len(data)
    while missing:
        if not parts[-1]:
            raise EOFError("its first process was killed")
        parts.append(await loop.sock_recv(host, min(missing, 1 << 20)))
        missing -= len(parts[-1])
    return b"".join(parts)


class Channel:
    """Speaks with one sandbox and can kill it. Errors on making one: ProcessLookupError if it has ended already."""

    def __init__(
        self, name: str, host: socket.socket, pid: int, max_body: int, machine_is_alive: Callable[[], bool]
    ) -> None:
        self.name = name
        self.pid = pid
        self._host = host
        self._max_body = max_body
        self._machine_is_alive = machine_is_alive
        self._lock = asyncio.Lock()
        self._pidfd = os.pidfd_open(pid)
        self._why_closed: str | None = None

    @property
    def is_open(self) -> bool:
        """False if the sandbox is gone."""
        if self._why_closed is not None or not self._machine_is_alive():
            return False
        try:
            return self._host.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def ask(
        self, header: dict[str, Any], *bodies: bytes, timeout_s: float = 60.0
    ) -> tuple[dict[str, Any], bytes]:
        """Header and body of the answer.

        Errors: OSError from inside; SandboxDiedError. A caller that is cancelled while it waits has its sandbox
        killed: what it asked for may be half done.
        """
        frame = b"".join((head_of(header, sum(map(len, bodies))), *bodies))
        async with self._lock:
            if self._why_closed is not None:
                raise self._died(self._why_closed)
            try:
                async with asyncio.timeout(timeout_s + _GRACE_S):
                    await asyncio.get_running_loop().sock_sendall(self._host, frame)
                    size = await _read_exactly(self._host, HEAD.size)
                    answer, body = await _read_rest(self._host, size, self._max_body)
            except TimeoutError as error:
                self.kill("it did not answer in time")
                raise self._died("it did not answer in time") from error
            except (EOFError, ConnectionError, ValueError) as error:
                self.kill(str(error))
                raise self._died(str(error)) from error
            except asyncio.CancelledError:
                self.kill("a call was cancelled")
                raise
        if "errno" in answer:
            raise OSError(answer["errno"], answer["why"], answer["path"])
        return answer, body

    def kill(self, why: str) -> None:
        """End every process of the sandbox, now. A question that waits for its answer fails. Idempotent."""
        if self._why_closed is not None:
            return
        self._why_closed = why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._host.shutdown(socket.SHUT_RDWR)

    async def wait_gone(self) -> None:
        """Once, after `kill`: until the kernel has ended process 1 and, before it, all the others."""
        try:
            await readable(self._pidfd)
            async with self._lock:  # until an interrupted question has let go of the socket
                self._host.close()
        finally:
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
