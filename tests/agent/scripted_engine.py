"""An engine at the outer edge: says what it was told, as ids, with all the records that a real one would give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from etude.errors import VersionError
from etude.protocols import EngineStats, GenerateRequest, TokenChunk
from etude.types import KVEpoch, Manifest, Routes, Run, StopReason, Version

V1 = Version(incarnation=1, n=1, step=1)
Replies = Sequence[Sequence[int]] | Callable[[GenerateRequest], Sequence[int]]


class ScriptedEngine:
    """Answers every request with the next list of ids (or what a function of the request gives), in chunks of two.

    A reply longer than max_new_tokens is cut. `errors` maps the number of a request to an exception raised halfway.
    """

    def __init__(self, replies: Replies, *, version: Version = V1, errors: dict[int, Exception] | None = None) -> None:
        self._replies = replies
        self.version = version
        self.errors = errors or {}
        self.requests: list[GenerateRequest] = []
        self.forgotten: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        number = len(self.requests)
        self.requests.append(request)
        if request.exact is not None and request.exact != self.version:
            raise VersionError("another version serves")
        reply = list(self._replies(request) if callable(self._replies) else self._replies[number])
        stop = StopReason.END if len(reply) <= request.max_new_tokens else StopReason.LENGTH
        reply = reply[: request.max_new_tokens]
        start = len(request.ids)
        runs = (Run(start=start, version=self.version),)
        for place in range(0, len(reply), 2):
            if place and number in self.errors:
                raise self.errors[number]
            ids = np.array(reply[place : place + 2], np.int32)
            is_last = place + 2 >= len(reply)
            yield TokenChunk(
                request_id=request.request_id,
                ids=ids,
                logprobs=np.full(len(ids), -0.5, np.float32),
                versions=runs,
                stop=stop if is_last else None,
                kv_epochs=(KVEpoch(first=start, runs=(Run(start=0, version=self.version),)),) if is_last else (),
                routes=self._routes(start + len(reply) - 1) if is_last else None,
            )

    def _routes(self, rows: int) -> Routes:
        """Row r of request i chooses expert i in both layers: who wrote a row can be read off it."""
        experts = np.full((rows, 2, 1), len(self.requests), np.uint8)
        return Routes(experts=experts, valid=np.ones(rows, bool))

    async def score(self, ids: np.ndarray, routes: Routes | None = None) -> tuple[np.ndarray, Routes | None]:
        return np.zeros(len(ids), np.float32), routes

    async def forget(self, context_id: str) -> None:
        self.forgotten.append(context_id)

    async def load(self, manifest: Manifest) -> None:
        self.version = manifest.version

    async def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version, running=0, waiting=0, prefilled_tokens=0, reused_tokens=0, stale_reused_tokens=0,
            sampled_tokens=0, swaps=0, swap_pause_s=0.0, busy_s=0.0,
        )  # fmt: skip
