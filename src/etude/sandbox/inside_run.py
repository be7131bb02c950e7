"""Runs inside a sandbox (standard library only): one command, and the end of what it started, unless it may stay.

    Fork: a process that has its pipes and limits and waits --start--> foreign code, own process group, no socket
    Run:  loop: feed stdin, drain outputs up to their limits, watch clock, processor, memory
          first process ends or a limit is hit -> kill(-1): all but process 1 -> drain -> answer

A run that `leaves` kills nothing at its end but its own process group, and that only if it hit a limit: what it started
in the background lives on, through later runs, until a run goes over its memory or the sandbox ends. Otherwise only
process 1 and one waiting fork exist between two runs. What it does not do: several runs at once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from etude.sandbox import inside_child
from etude.sandbox.inside_wire import Config

_CHUNK = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_WATCH_S = 0.25
_WATCH_MEMORY_S = 0.05


class Fork:
    """A process that waits to be told what to become. Handles of ours do not block, but the one that starts it."""

    def __init__(self, config: Config) -> None:
        (start, self._start), (stdin, self.stdin), *outputs = [os.pipe() for _ in range(5)]
        self.outputs = [read for read, _ in outputs]
        theirs = [stdin, *(write for _, write in outputs), start]
        for handle in (self.stdin, *self.outputs):
            os.set_blocking(handle, False)
        self.pid = os.fork()
        if self.pid == 0:
            inside_child.wait(theirs, config.memory_bytes if config.watch_memory else 0)
        for handle in theirs:
            os.close(handle)

    def is_waiting(self) -> bool:
        """False if something has ended it; its handles are closed then."""
        with contextlib.suppress(ChildProcessError):  # it was reaped with others that had ended
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                return True
        for handle in (self._start, self.stdin, *self.outputs):
            os.close(handle)
        return False

    def start(self, argv: list[str], source: bytes, env: dict[str, str]) -> None:
        """Execute `argv`, or Python `source` if `argv` is empty."""
        rest = inside_child.encode(argv, source, env)
        with contextlib.suppress(BrokenPipeError):  # it ended this moment: the run will find it dead
            while rest:
                rest = rest[os.write(self._start, rest) :]
        os.close(self._start)


class Run:
    """One command, from its first process to the last."""

    def __init__(
        self, fork: Fork, channel: socket.socket, config: Config, header: dict[str, Any], body: memoryview,
        kept: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """kept: processes that earlier runs left; they and what they start are spared."""
        self._kept = kept
        self._leaves = bool(header.get("leaves"))
        self._is_over = False
        self._channel = channel
        self._config = config
        self._input = body[: header["stdin"]]
        self._code: int | None = None
        self._truncated = False
        self._outputs = [bytearray(), bytearray(), bytearray()]
        self._began = time.monotonic()
        self._timeout_s = float(header["timeout_s"])
        self._before = _spent_by_reaped()
        self._child = fork.pid
        self._stdin, self._readers = fork.stdin, dict(zip(fork.outputs, self._outputs, strict=True))
        fork.start(header["argv"], bytes(body[header["stdin"] :]), header["env"])

    def finish(self) -> tuple[dict[str, Any], list[bytes]]:
        """Errors: EOFError if the host has gone meanwhile."""
        timed_out = self._attend()
        self._end_processes()
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
                    if self._config.watch_memory and is_over_memory(self._config.memory_bytes):
                        self._is_over = True
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

    def _end_processes(self) -> None:
        if self._leaves and not self._is_over:
            self._end_group()
        elif self._kept and not self._is_over:
            self._kill_strangers()
        else:
            kill_all(self._reap)

    def _end_group(self) -> None:
        """If the first process has not ended by itself: it, and all of its process group."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGKILL)
            self._reap(os.waitpid(self._child, 0))

    def _kill_strangers(self) -> None:
        """Everything but what descends from a kept process, and wait until it is gone."""
        while strangers := _strangers(self._kept):
            for pid in strangers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            reap_orphans(self._reap)
            time.sleep(0.001)

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
        for text in _read_of_all("stat", spared=self._kept):
            fields = text.rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
        return ticks / _TICKS + _spent_by_reaped() - self._before


def kill_all(reap: Callable[[tuple[int, int]], None]) -> None:
    """Every process but this one, and wait until all are gone. `reap` hears of each that is a child."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            reap(os.waitpid(-1, 0))
        except ChildProcessError:
            return


def reap_orphans(reap: Callable[[tuple[int, int]], None]) -> None:
    """Children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            reap(ended)


def others() -> frozenset[int]:
    """All processes but this one."""
    return frozenset(int(pid) for pid in os.listdir("/proc") if pid.isdigit() and pid != "1")


def is_over_memory(limit: int) -> bool:
    """Whether all processes but this one hold more than `limit` bytes."""
    resident = sum(int(text.split()[1]) for text in _read_of_all("statm")) * _PAGE
    if resident <= limit:
        return False
    # Shared pages were counted once for each process: count them properly before judging.
    proportional = 0
    for text in _read_of_all("smaps_rollup", instead="statm"):
        if b"Pss:" in text:
            proportional += int(text.partition(b"\nPss:")[2].split()[0]) << 10
        else:
            proportional += int(text.split()[1]) * _PAGE
    return proportional > limit


def _strangers(kept: frozenset[int]) -> list[int]:
    """Processes without a kept one among their ancestors."""
    parents = {}
    for text in _read_of_all("stat"):
        fields = text.rpartition(b")")[2].split()
        parents[int(text.partition(b" ")[0])] = int(fields[1])
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor > 1 and ancestor not in kept:
            ancestor = parents.get(ancestor, 0)
        if ancestor <= 1:
            found.append(pid)
    return found


def _spent_by_reaped() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_of_all(name: str, instead: str = "", spared: frozenset[int] = frozenset()) -> list[bytes]:
    """/proc/PID/`name` of every process but this one and the `spared`. `instead` is read where `name` is kept from
    us."""
    texts = []
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or pid == "1" or int(pid) in spared:
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
