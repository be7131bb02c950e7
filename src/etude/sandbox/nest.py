"""The host's side of the nest: one bubblewrap a pool, from which every sandbox of the pool is forked.

    start()  -> bubblewrap (as a user without rights if we are root) -> Python in it -> rules and limits -> ready
    spawn()  -> one end of a socket over to the nest -> the new sandbox speaks -> its cgroup -> Channel

Everything below dies with this process: bubblewrap is told so, the nest is process 1 of bubblewrap's pid namespace,
and every sandbox ends when its socket closes. What it does not do: keep a stock (pool.py).
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import signal
import socket
import subprocess

from etude.errors import SandboxError
from etude.sandbox import limits, seccomp, tree
from etude.sandbox.channel import Channel, first_words, make_socket, readable, send_end
from etude.sandbox.inside_wire import Config, head_of
from etude.sandbox.recipe import SandboxRecipe

_NUMBERS = itertools.count()
"""Of sandboxes: names of groups must not meet those of another pool of this process."""
START_S = 60.0
"""For a start that takes a fraction of a second on an idle machine."""
_LOG_BYTES = 4096
"""Of bubblewrap's messages that are read."""
_BASE_MEMORY = 16 << 20
"""Bytes beside the recipe's, for process 1."""
_OURS = 1
"""Processes beside the recipe's: process 1."""


class Nest:
    """Starts sandboxes. Use: `await nest.start()`, any number of `spawn()`, `await nest.close()`."""

    def __init__(self, recipe: SandboxRecipe, python: tree.Python, groups: limits.Cgroups | None) -> None:
        self._recipe = recipe
        self._python = python
        self._groups = groups
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log = -1
        self._words = ""
        self._used_groups: collections.deque[limits.Group] = collections.deque()

    async def start(self) -> None:
        """Errors: SandboxError with bubblewrap's own words and what to do about them."""
        try:
            rules = seccomp.program(memory_is_counted=self._groups is not None)
        except (ImportError, OSError, RuntimeError) as error:
            raise SandboxError(
                "no sandbox can be started", cause=f"no system-call filter: {error}", hint=seccomp.HINT
            ) from error
        self._log = os.memfd_create("log")
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        try:
            with theirs:  # closed here as soon as bubblewrap has it: then its end is seen
                self._process = self._launch(theirs.fileno())
            ready = await self._greet(self._control, rules)
        except BaseException:
            await self.close()
            raise
        if not ready:
            await self.close()
            words = self._last_words() or "bubblewrap did not answer"
            raise SandboxError("no sandbox can be started", cause=words, hint=hint_for(words))

    def _launch(self, control: int) -> subprocess.Popen[bytes]:
        """Not asyncio's: who is cancelled there in the middle leaves half a bubblewrap, and nobody knows its pid."""
        nobody = tree.ROOT_RUNS_AS if os.geteuid() == 0 else None
        open_files: list[int] = []
        try:
            return subprocess.Popen(
                tree.command(self._python, open_files),
                stdin=control,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=open_files,
                env={},
                cwd="/",
                process_group=0,  # Ctrl-C is for Etude; a session of its own would defeat `nice` (autogroups)
                user=nobody,
                group=nobody,
                extra_groups=None if nobody is None else [],
            )
        except OSError as error:
            raise SandboxError("bubblewrap cannot be started", cause=str(error), hint=tree.BWRAP_HINT) from error
        finally:
            for handle in open_files:
                os.close(handle)

    async def _greet(self, control: socket.socket, rules: bytes) -> bool:
        header = head_of(self._config()._asdict(), len(rules))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(START_S):
                await loop.sock_sendall(control, header + rules)
                return await loop.sock_recv(control, 1) != b""
        except (TimeoutError, ConnectionError):
            return False

    def _config(self) -> Config:
        recipe = self._recipe
        return Config(
            disk_bytes=recipe.disk_mb << 20,
            memory_bytes=recipe.memory_mb << 20,
            output_bytes=recipe.output_kb << 10,
            pids=recipe.pids,
            nice=recipe.nice,
            watch_memory=self._groups is None,
        )

    def is_alive(self) -> bool:
        """Its end of the control socket closes before the kernel kills the first of its sandboxes."""
        if self._control is None:
            return False
        try:
            return self._control.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def spawn(self) -> tuple[Channel, limits.Group | None]:
        """A sandbox that nobody has used. Errors: SandboxError."""
        if self._control is None or not self.is_alive():
            raise SandboxError("no sandbox can be started", cause=self._last_words() or "the nest has ended")
        number = next(_NUMBERS)
        host, inside = make_socket()
        try:
            with inside:
                send_end(self._control, inside)
            async with asyncio.timeout(START_S):
                pid, said = await first_words(host)
            if "failed" in said:
                raise SandboxError("a sandbox did not start", cause=str(said["failed"]), hint=hint_for(str(said)))
            channel = Channel(f"{os.getpid()}-{number}", host, pid, self._max_body(), self.is_alive)
        except (OSError, EOFError, ValueError) as error:
            host.close()
            words = self._last_words() or str(error) or f"no answer in {START_S:.0f} s"
            raise SandboxError("a sandbox did not start", cause=words, hint=hint_for(words)) from error
        except BaseException:
            host.close()
            raise
        try:
            return channel, self._limit(number, pid)
        except OSError as error:
            channel.kill("it has no cgroup")
            await channel.wait_gone()
            raise SandboxError("a sandbox got no cgroup", cause=str(error)) from error

    def _limit(self, number: int, pid: int) -> limits.Group | None:
        if self._groups is None:
            return None
        group = self._free_group() or self._make_group(number, self._groups)
        try:
            group.add(pid)
        except OSError:
            self.recycle(group)
            raise
        return group

    def recycle(self, group: limits.Group) -> None:
        """Of a sandbox that has ended: making one takes as long as a fork."""
        self._used_groups.append(group)

    def _free_group(self) -> limits.Group | None:
        for _ in range(len(self._used_groups)):
            group = self._used_groups.popleft()
            if group.is_empty():
                return group
            self._used_groups.append(group)
        return None

    def _make_group(self, number: int, groups: limits.Cgroups) -> limits.Group:
        recipe = self._recipe
        memory = ((recipe.memory_mb + recipe.disk_mb) << 20) + _BASE_MEMORY
        return groups.make(number, limits.Limits(memory_bytes=memory, pids=recipe.pids + _OURS, nice=recipe.nice))

    def _max_body(self) -> int:
        return (self._recipe.disk_mb << 20) + 3 * (self._recipe.output_kb << 10) + (1 << 20)

    async def close(self) -> None:
        """End the nest and with it every sandbox of it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            # The whole group: a child of bubblewrap that still waits for its user map does not die with its parent yet.
            process, self._process = self._process, None
            os.killpg(process.pid, signal.SIGKILL)
            ended = os.pidfd_open(process.pid)
            try:
                await readable(ended)
                process.wait()
            finally:
                os.close(ended)
        if self._log >= 0:
            self._words = self._last_words()
            os.close(self._log)
            self._log = -1

    async def remove_groups(self) -> None:
        """After the last sandbox has ended."""
        for _ in range(100):
            self._used_groups = collections.deque(group for group in self._used_groups if not group.remove())
            if not self._used_groups:
                break
            await asyncio.sleep(0.01)  # the kernel is still ending processes

    def _last_words(self) -> str:
        """What bubblewrap and the nest had to say; of much, the end."""
        if self._log < 0:
            return self._words
        size = os.fstat(self._log).st_size
        return os.pread(self._log, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace").strip()


def hint_for(words: str) -> str | None:
    """What to do about bubblewrap's message, for the refusals that machines are known for."""
    if "proc" in words and "mount" in words:
        return "a container hides parts of /proc: start it with --security-opt systempaths=unconfined, or run outside"
    if "uid map" in words or "user namespace" in words or "unshare" in words or "Operation not permitted" in words:
        return (
            "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 (old Debian), "
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and newer), "
            "sysctl user.max_user_namespaces=15000, or docker run --security-opt seccomp=unconfined"
        )
    if "No space left" in words:
        return "too many namespaces: raise sysctl user.max_user_namespaces and user.max_mnt_namespaces"
    return None
