"""An engine in another process: protocols.Engine over frames. Loads no torch.

    EngineClient.generate  --{"generate", request}-->  service.handlers  -->  TorchEngine
                           <------- TokenChunk -------

Closing an iterator cancels the request on the other side. What it does not do: restart a dead engine (the run does).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import numpy as np

from etude.frames import Client
from etude.protocols import EngineStats, GenerateRequest, Noun, TokenChunk
from etude.types import Manifest, Routes


class ScoreRequest(Noun, frozen=True):
    """Arguments of `score`."""

    ids: np.ndarray
    routes: Routes | None = None


class ScoreReply(Noun, frozen=True):
    """What `score` answers."""

    logprobs: np.ndarray
    routes: Routes | None


class EngineClient:
    """Errors: those of the engine, by type; EngineError once the process is gone."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def closed(self) -> bool:
        """Whether the process or the connection is gone."""
        return self._client.closed

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        async with contextlib.aclosing(self._client.stream("generate", request, TokenChunk)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    async def score(self, ids: np.ndarray, routes: Routes | None = None) -> tuple[np.ndarray, Routes | None]:
        reply = await self._client.call("score", ScoreRequest(ids=ids, routes=routes), ScoreReply)
        return reply.logprobs, reply.routes

    async def forget(self, context_id: str) -> None:
        await self._client.call("forget", context_id, bool)

    async def load(self, manifest: Manifest) -> None:
        await self._client.call("load", manifest, bool)

    async def stats(self) -> EngineStats:
        return await self._client.call("stats", None, EngineStats)
