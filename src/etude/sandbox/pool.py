"""A stock of warm sandboxes (protocols.SandboxPool): taken once, filled, used by one episode or grading, killed.

    stock (spares) --acquire(files)--> in use --close()--> killed, its place is free
       ^-- refilled in the background, several at a time, until `spares` are in stock

What it does not do: use a sandbox twice, or decide whose fault a death is (agent/runner.py, SEMANTICS 6.2).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import resource
import shutil
import tempfile
from collections.abc import Coroutine, Mapping
from pathlib import Path

from etude.errors import SandboxError
from etude.protocols import Snapshot
from etude.sandbox import limits, tree
from etude.sandbox.namespace import NamespaceSandbox, read_snapshot
from etude.sandbox.nest import Nest
from etude.sandbox.recipe import SandboxRecipe

_AT_ONCE = 4
"""Sandboxes that are being started at the same time."""
_TRIES = 3
_PREFIX = "etude-snapshots-"
_DESCRIPTORS = 2
"""That the host holds open for each sandbox."""


class NamespacePool:
    """Use as `async with NamespacePool(recipe) as pool`, or call `start` and `close`.

    One event loop. `max_running` bounds the sandboxes handed out at once; `acquire` waits for a place.
    """

    def __init__(self, recipe: SandboxRecipe, *, max_running: int = 512) -> None:
        self._recipe = recipe
        self._max_running = max_running
        self._places = asyncio.Semaphore(max_running)
        self._stock: collections.deque[NamespaceSandbox] = collections.deque()
        self._waiting: collections.deque[asyncio.Future[NamespaceSandbox]] = collections.deque()
        self._in_use: set[NamespaceSandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._producing = 0
        self._nest: Nest | None = None
        self._nest_lock = asyncio.Lock()
        self._folder: Path | None = None
        self._closed = False

    async def __aenter__(self) -> NamespacePool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Check the machine and begin to stock. `acquire` does it if nobody did. Errors: SandboxError."""
        await self._living_nest()
        self._pump()

    async def acquire(self, files: Mapping[str, str]) -> NamespaceSandbox:
        """A sandbox whose workspace holds `files` (relative path -> text) and nothing else. The caller closes it.

        Errors: SandboxError; OSError for a path that leads out of the workspace or text that its disk cannot hold.
        """
        contents = {path: text.encode() for path, text in files.items()}
        for _ in range(_TRIES):
            sandbox = await self._take()
            try:
                await sandbox.put(contents)
                return sandbox
            except SandboxError as error:  # it died before anyone used it: the machine's fault
                await sandbox.close()
                died = error
            except BaseException:
                await sandbox.close()
                raise
        raise SandboxError(f"{_TRIES} fresh sandboxes died one after the other", cause=died.cause) from died

    async def restore(self, snapshot: Snapshot) -> NamespaceSandbox:
        """A sandbox with a saved workspace. Errors: SandboxError, StoreError if the snapshot's file is gone or cut."""
        entries, body = read_snapshot(snapshot)
        sandbox = await self._take()
        await sandbox.restore(entries, body)
        return sandbox

    async def close(self) -> None:
        """Kill every sandbox, wait until all are gone, and remove what they left. Idempotent."""
        self._closed = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(SandboxError("the pool was closed"))
        if self._nest is not None:
            await self._nest.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for sandbox in (*self._stock, *self._in_use):
            await sandbox.close()
        self._stock.clear()
        if self._nest is not None:
            await self._nest.remove_groups()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _take(self) -> NamespaceSandbox:
        """From the stock, else the next that gets ready."""
        await self._places.acquire()
        sandbox = future = None
        try:
            while self._stock and sandbox is None:
                sandbox = self._stock.popleft()
                if not sandbox.channel.is_open:
                    self._spawn_task(sandbox.close())
                    sandbox = None
            if sandbox is None:
                if self._closed:
                    raise SandboxError("the pool was closed")
                future = asyncio.get_running_loop().create_future()
                self._waiting.append(future)
                self._pump()
                sandbox = await future
        except BaseException:
            self._places.release()
            if future is not None and future.done() and not future.cancelled() and future.exception() is None:
                self._stock.append(future.result())  # it came in the moment in which the caller gave up
            raise
        self._in_use.add(sandbox)
        self._pump()
        return sandbox

    def _pump(self) -> None:
        """Start as many as are missing, a few at a time."""
        missing = len(self._waiting) + self._recipe.spares - len(self._stock)
        while not self._closed and self._producing < min(_AT_ONCE, missing):
            self._producing += 1
            self._spawn_task(self._produce())

    async def _produce(self) -> None:
        try:
            nest = await self._living_nest()
            channel, group = await nest.spawn()
        except Exception as error:  # whatever it is: who waits must learn of it
            self._producing -= 1
            if isinstance(error, OSError):  # who waits takes an OSError for one about the files of its workspace
                hint = "raise the limit of open files: ulimit -n"
                error = SandboxError("no sandbox can be started", cause=str(error), hint=hint)
            if (future := self._next_waiting()) is not None:
                future.set_exception(error)
                self._pump()
            return  # nobody waits: the next `acquire` tries again and reports
        self._producing -= 1
        sandbox = NamespaceSandbox(channel, group, self._recipe, self._snapshots, self._release, self._take)
        if (future := self._next_waiting()) is not None:
            future.set_result(sandbox)
        else:
            self._stock.append(sandbox)
        self._pump()

    def _next_waiting(self) -> asyncio.Future[NamespaceSandbox] | None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                return future
        return None

    async def _living_nest(self) -> Nest:
        """The nest; a new one if it was killed."""
        async with self._nest_lock:
            if self._closed:
                raise SandboxError("the pool was closed")
            if self._nest is not None and self._nest.is_alive():
                return self._nest
            if self._nest is not None:
                await self._nest.close()
                await self._nest.remove_groups()
            if self._nest is None:
                _allow_descriptors(_DESCRIPTORS * (self._max_running + self._recipe.spares))
            groups = limits.find()
            if isinstance(groups, limits.Cgroups):
                groups.sweep()
            nest = Nest(
                self._recipe,
                tree.choose_python(self._recipe),
                groups if isinstance(groups, limits.Cgroups) else None,
            )
            await nest.start()
            if self._closed:  # meanwhile
                await nest.close()
                raise SandboxError("the pool was closed")
            self._nest = nest
            return nest

    def _snapshots(self) -> Path:
        """A private folder, made for the first snapshot and removed with the pool."""
        if self._folder is None:
            _sweep_folders()
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        return self._folder

    def _release(self, sandbox: NamespaceSandbox) -> None:
        if sandbox.group is not None and self._nest is not None:
            self._nest.recycle(sandbox.group)
        if sandbox in self._in_use:
            self._in_use.discard(sandbox)
            self._places.release()

    def _spawn_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sweep_folders() -> None:
    """Remove the snapshots of runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _allow_descriptors(needed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + needed
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
