"""The host's side of the nest: one bubblewrap a pool, from which every sandbox of the pool is forked.

    start()  -> bubblewrap (as a user without rights if we are root) -> Python in it -> rules and limits -> ready
    spawn()  -> one end of a socket over to the nest -> the new sandbox speaks -> its cgroup -> Channel

Everything below dies with this process: bubblewrap is told so, the nest is process 1 of bubblewrap's pid namespace,
and every sandbox ends when its socket closes. What it does not do: keep a stock (pool.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import os
import socket

from etude.errors import SandboxError
from etude.sandbox import limits, seccomp, tree
from etude.sandbox.channel import Channel, first_words, make_socket, send_end
from etude.sandbox.inside_wire import Config, head_of
from etude.sandbox.recipe import SandboxRecipe

_NUMBERS = itertools.count()
"""Of sandboxes: names of groups must not meet those of another pool of this process."""
START_S = 60.0
"""For a start that takes a fraction of a second on an idle machine."""
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
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._log = bytearray()
        self._reading: asyncio.Task[None] | None = None
        self._used_groups: collections.deque[limits.Group] = collections.deque()

    async def start(self) -> None:
        """Errors: SandboxError with bubblewrap's own words and what to do about them."""
        try:
            rules = seccomp.program(memory_is_counted=self._groups is not None)
        except (ImportError, OSError, RuntimeError) as error:
            raise SandboxError(
                "no sandbox can be started", cause=f"no system-call filter: {error}", hint=seccomp.HINT
            ) from error
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        try:
            with theirs:  # closed here as soon as bubblewrap has it: then its end is seen
                self._process = await self._launch(theirs.fileno())
            self._reading = asyncio.create_task(self._read_log(self._process))
            ready = await self._greet(self._control, rules)
        except BaseException:
            await self.close()
            raise
        if not ready:
            await self.close()
            words = self._last_words() or "bubblewrap did not answer"
            raise SandboxError("no sandbox can be started", cause=words, hint=hint_for(words))

    async def _launch(self, control: int) -> asyncio.subprocess.Process:
        nobody = tree.ROOT_RUNS_AS if os.geteuid() == 0 else None
        open_files: list[int] = []
        try:
            return await asyncio.create_subprocess_exec(
                *tree.command(self._python, open_files),
                stdin=control,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
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
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def remove_groups(self) -> None:
        """After the last sandbox has ended."""
        for _ in range(100):
            self._used_groups = collections.deque(group for group in self._used_groups if not group.remove())
            if not self._used_groups:
                break
            await asyncio.sleep(0.01)  # the kernel is still ending processes

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(4096):
            self._log += data
            del self._log[:-4096]

    def _last_words(self) -> str:
        return self._log.decode(errors="replace").strip()


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
