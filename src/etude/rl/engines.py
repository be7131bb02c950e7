"""Engine handles: one that survives its process, and a set that spreads contexts over several.

A request that was running when an engine died fails with EngineError; the runner counts that as a broken machine and
plays the episode again. The handle restarts the process once, whoever notices first.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Sequence

import numpy as np

from etude.errors import EngineError
from etude.frames import Client
from etude.inference.client import EngineClient
from etude.protocols import EngineStats, GenerateRequest, TokenChunk
from etude.rl.processes import Workers
from etude.types import Manifest, Routes, Version


class ManagedEngine:
    """protocols.Engine over a worker process that is restarted when it is gone.

    With a `manifest` the engine is told to load that version at every start; else it follows the store by itself.
    """

    def __init__(self, workers: Workers, role: str, *, manifest: Manifest | None = None) -> None:
        self._workers = workers
        self.role = role
        self._manifest = manifest
        self._client: EngineClient | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        async with self._lock:
            if self._client is None:
                await self._workers.start(self.role, self._greet)

    async def stop(self) -> None:
        """End the process; `start` may follow."""
        async with self._lock:
            self._client = None
            await self._workers.stop(self.role)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        client = await self._live()
        try:
            async for chunk in client.generate(request):
                yield chunk
        except EngineError as error:
            await self._revive(client, error)
            raise

    async def score(self, ids: np.ndarray, routes: Routes | None = None) -> tuple[np.ndarray, Routes | None]:
        return await (await self._live()).score(ids, routes)

    async def forget(self, context_id: str) -> None:
        await (await self._live()).forget(context_id)

    async def load(self, manifest: Manifest) -> None:
        await (await self._live()).load(manifest)

    async def stats(self) -> EngineStats:
        client = await self._live()
        try:
            return await client.stats()
        except EngineError as error:
            await self._revive(client, error)
            raise

    async def _live(self) -> EngineClient:
        if self._client is None:
            await self.start()
        assert self._client is not None
        return self._client

    async def _revive(self, client: EngineClient, error: EngineError) -> None:
        """Restart if the process is gone; an error that it answered itself changes nothing."""
        if type(error) is not EngineError or not client.closed:
            return
        async with self._lock:
            if self._client is client:
                await self._workers.restart(self.role, self._greet)

    async def _greet(self, connection: Client) -> None:
        client = EngineClient(connection)
        if self._manifest is not None:
            await client.load(self._manifest)
        self._client = client


class EngineSet:
    """Several engines as one. Equal prompts go to one engine, which computes their prefix once; a context stays with
    its engine, where its KV is, until it is forgotten."""

    def __init__(self, engines: Sequence[ManagedEngine]) -> None:
        self._engines = engines
        self._homes: dict[str, ManagedEngine] = {}

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self._engines))

    async def stop(self) -> None:
        """End the processes; `start` may follow."""
        self._homes.clear()
        for engine in self._engines:
            await engine.stop()

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        home = self._homes.get(request.context_id)
        if home is None:
            home = self._engines[zlib.crc32(request.ids.tobytes()) % len(self._engines)]
        if request.keep_context:
            self._homes[request.context_id] = home
        return home.generate(request)

    async def score(self, ids: np.ndarray, routes: Routes | None = None) -> tuple[np.ndarray, Routes | None]:
        """By an engine that serves the version that `stats` names."""
        versions = [(await engine.stats()).version for engine in self._engines]
        order = [(0, 0) if version is None else (version.incarnation, version.n) for version in versions]
        return await self._engines[order.index(min(order))].score(ids, routes)

    async def forget(self, context_id: str) -> None:
        home = self._homes.pop(context_id, None)
        if home is not None:
            await home.forget(context_id)

    async def load(self, manifest: Manifest) -> None:
        await asyncio.gather(*(engine.load(manifest) for engine in self._engines))

    async def stats(self) -> EngineStats:
        """Sums; `version` is the oldest one that serves."""
        rows = [await engine.stats() for engine in self._engines]
        versions = [row.version for row in rows]
        oldest: Version | None = None if None in versions else min(v for v in versions if v is not None)
        names = [name for name in EngineStats.__struct_fields__ if name != "version"]
        return EngineStats(version=oldest, **{name: sum(getattr(row, name) for row in rows) for name in names})
