"""Runs inside a sandbox as its process 1 (standard library only): answers the host, forks once for every run.

    frame = header length, body length (4 bytes each, big-endian), header (JSON), body
    {"op": "run", ...}  -> fork -> child: own process group, pipes as 0 to 3, no control socket -> foreign code
                           loop: feed stdin, drain outputs up to their limits, watch clock, processor, memory
                           first process ends or a limit is hit -> kill(-1): all but process 1 -> drain -> answer
    {"op": "put" | "get" | "list" | "save" | "restore"}  -> inside_files

Process 1 of a pid namespace cannot be killed or stopped from inside; it is not dumpable, so nobody inside can look into
it. One run at a time. What it does not do: judge what a run did; a non-zero exit code is data.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import Any, NamedTuple, NoReturn

from etude.sandbox import inside_child
from etude.sandbox.inside_files import Workspace, encode_error

_HEAD = struct.Struct(">II")
_CHUNK = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WATCH_S = 0.25
_WATCH_MEMORY_S = 0.05


class Config(NamedTuple):  # a dataclass would load `inspect`, and forks pay for memory
    """What the host tells the nest once. The same for all of its sandboxes."""

    disk_bytes: int
    memory_bytes: int
    output_bytes: int
    pids: int
    nice: int
    watch_memory: bool
    """No cgroup counts memory: do it here."""


def read_frame(channel: socket.socket) -> tuple[dict[str, Any], memoryview]:
    """Errors: EOFError if the host has gone."""
    header_size, body_size = _HEAD.unpack(_read_exactly(channel, _HEAD.size))
    header = json.loads(bytes(_read_exactly(channel, header_size)))
    return header, _read_exactly(channel, body_size)


def send_frame(channel: socket.socket, header: dict[str, Any], *bodies: bytes) -> None:
    """Blocks until the other side has taken it."""
    channel.sendall(b"".join((_head(header, sum(map(len, bodies))), *bodies)))


def _head(header: dict[str, Any], body_size: int) -> bytes:
    text = json.dumps(header).encode()
    return _HEAD.pack(len(text), body_size) + text


def _read_exactly(channel: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    at = 0
    while at < size:
        got = channel.recv_into(data[at:])
        if got == 0:
            raise EOFError("the host has gone")
        at += got
    return data


def rehearse(config: Config) -> None:
    """In the nest, once: do what sandboxes do, so that each of them need not do it for the first time."""
    inside_child.prepare()
    ours, theirs = socket.socketpair()
    workspace = Workspace("/run/etude", config.disk_bytes)
    for _ in range(8):
        request = {"op": "run", "argv": [], "env": {}, "stdin": 1, "timeout_s": 5.0}
        send_frame(theirs, request, b"x", b"print(1)")
        answer, bodies = Run(ours, config, *read_frame(ours)).finish()
        send_frame(ours, answer, *bodies)
        read_frame(theirs)
        _files(workspace, {"op": "list"}, memoryview(b""))
    workspace.close()
    ours.close()
    theirs.close()


def serve(channel: socket.socket, config: Config) -> NoReturn:
    """Answer until the host hangs up; then end, and with process 1 everything in the sandbox."""
    workspace = Workspace("/workspace", config.disk_bytes)
    with contextlib.suppress(EOFError, ConnectionError):
        send_frame(channel, {"ready": True})
        while True:
            header, body = read_frame(channel)
            try:
                if header["op"] == "run":
                    answer, bodies = Run(channel, config, header, body).finish()
                    workspace.mend()
                elif header["op"] == "save":
                    entries = workspace.save()
                    size = sum(int(str(size)) for _, kind, _, size in entries if kind == "f")
                    channel.sendall(_head({"entries": entries}, size))
                    for content in workspace.contents(entries):  # one at a time: memory is limited
                        channel.sendall(content)
                    continue
                else:
                    answer, bodies = _files(workspace, header, body)
            except OSError as error:
                answer, bodies = encode_error(error), []
            send_frame(channel, answer, *bodies)
    os._exit(0)


def _files(workspace: Workspace, header: dict[str, Any], body: memoryview) -> tuple[dict[str, Any], list[bytes]]:
    op = header["op"]
    if op == "put":
        at = 0
        for path, size in header["files"]:
            workspace.write(path, body[at : at + size])
            at += size
        return {}, []
    if op == "get":
        return {}, [workspace.read(header["path"])]
    if op == "list":
        return {"files": workspace.files()}, []
    workspace.restore(header["entries"], body)
    return {}, []


class Run:
    """One command, from fork to the last of its processes."""

    def __init__(self, channel: socket.socket, config: Config, header: dict[str, Any], body: memoryview) -> None:
        self._channel = channel
        self._config = config
        self._input = body[: header["stdin"]]
        self._code: int | None = None
        self._killed = False
        self._truncated = False
        self._outputs = [bytearray(), bytearray(), bytearray()]
        self._began = time.monotonic()
        self._timeout_s = float(header["timeout_s"])
        self._before = _spent_by_reaped()
        ours, theirs = self._make_pipes()
        max_data = config.memory_bytes if config.watch_memory else 0
        self._child = os.fork()
        if self._child == 0:
            inside_child.become(theirs, max_data, header["argv"], bytes(body[header["stdin"] :]), header["env"])
        for handle in theirs:
            os.close(handle)
        self._stdin, self._readers = ours[0], dict(zip(ours[1:], self._outputs, strict=True))

    @staticmethod
    def _make_pipes() -> tuple[list[int], list[int]]:
        """Handles of (stdin, stdout, stderr, result): ours, not blocking, and the child's."""
        inputs, *outputs = [os.pipe() for _ in range(4)]
        ours, theirs = [inputs[1]], [inputs[0]]
        for read, write in outputs:
            ours.append(read)
            theirs.append(write)
        for handle in ours:
            os.set_blocking(handle, False)
        return ours, theirs

    def finish(self) -> tuple[dict[str, Any], list[bytes]]:
        """Errors: EOFError if the host has gone meanwhile."""
        timed_out = self._attend()
        self._kill_all()
        for handle, output in self._readers.items():
            while self._drain(handle, output):
                pass
            os.close(handle)
        if self._stdin >= 0:
            os.close(self._stdin)
        answer = {
            "code": self._code,
            "timed_out": timed_out,
            "truncated": self._truncated,
            "wall_s": time.monotonic() - self._began,
            "sizes": [len(output) for output in self._outputs],
        }
        return answer, [bytes(output) for output in self._outputs]

    def _attend(self) -> bool:
        """Until the first process has ended or a limit is hit. True: it ran out of time."""
        poll = select.poll()
        ended = os.pidfd_open(self._child)
        for handle in (ended, *self._readers):
            poll.register(handle, select.POLLIN)
        poll.register(self._channel, select.POLLRDHUP)
        poll.register(self._stdin, select.POLLOUT)
        watch_s = _WATCH_MEMORY_S if self._config.watch_memory else _WATCH_S
        deadline = self._began + self._timeout_s
        next_watch = self._began + watch_s
        try:
            while self._code is None:
                now = time.monotonic()
                if now >= deadline:
                    return True
                if now >= next_watch:
                    if self._spent_s() > self._timeout_s:
                        return True
                    if self._config.watch_memory and self._is_over_memory():
                        return False
                    next_watch = time.monotonic() + watch_s
                for handle, events in poll.poll(max(1.0, (min(deadline, next_watch) - now) * 1000)):
                    if handle == ended:
                        self._reap(os.waitpid(self._child, 0))
                    elif handle == self._channel.fileno():
                        raise EOFError("the host has gone")
                    elif handle == self._stdin:
                        self._feed(poll)
                    elif not self._drain(handle, self._readers[handle]) and events & select.POLLHUP:
                        poll.unregister(handle)
        finally:
            os.close(ended)
        return False

    def _feed(self, poll: select.poll) -> None:
        if self._input:
            try:
                self._input = self._input[os.write(self._stdin, self._input[:_CHUNK]) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._input = self._input[:0]
        if not self._input:
            poll.unregister(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def _drain(self, handle: int, output: bytearray) -> bool:
        """Read once; keep what fits the limit. False: there is nothing now."""
        try:
            data = os.read(handle, _CHUNK)
        except BlockingIOError:
            return False
        room = self._config.output_bytes - len(output)
        output += data[:room]
        self._truncated |= len(data) > room
        return bool(data)

    def _kill_all(self) -> None:
        """Every process but this one, and wait until all are gone."""
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                self._reap(os.waitpid(-1, 0))
            except ChildProcessError:
                return

    def _reap(self, ended: tuple[int, int]) -> None:
        pid, status = ended
        if pid == self._child:
            self._code = os.waitstatus_to_exitcode(status)

    def _spent_s(self) -> float:
        """Processor seconds of the run so far. Orphans that have ended are reaped on the way, and counted."""
        with contextlib.suppress(ChildProcessError):
            while self._code is None:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == self._child:
                    break
                os.waitpid(ended.si_pid, 0)
        ticks = 0
        for text in _read_of_all("stat"):
            fields = text.rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
        return ticks / _TICKS + _spent_by_reaped() - self._before

    def _is_over_memory(self) -> bool:
        resident = sum(int(text.split()[1]) for text in _read_of_all("statm")) * _PAGE
        if resident <= self._config.memory_bytes:
            return False
        # Shared pages were counted once for each process: count them properly before judging.
        proportional = 0
        for text in _read_of_all("smaps_rollup", instead="statm"):
            if b"Pss:" in text:
                proportional += int(text.partition(b"\nPss:")[2].split()[0]) << 10
            else:
                proportional += int(text.split()[1]) * _PAGE
        return proportional > self._config.memory_bytes


def _spent_by_reaped() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_of_all(name: str, instead: str = "") -> list[bytes]:
    """/proc/PID/`name` of every process but this one. `instead` is read where `name` is kept from us."""
    texts = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or pid == "1":
            continue
        for which in (name, instead):
            try:
                with open(f"/proc/{pid}/{which}", "rb") as file:
                    texts.append(file.read())
                break
            except OSError:  # it has ended meanwhile, or hides
                if not instead:
                    break
    return texts
