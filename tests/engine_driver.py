"""Driving a real engine in tests: start one, ask it, and compute by plain transformers what it should have answered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etude.inference.recipe import EngineRecipe
from etude.inference.torch_engine import TorchEngine
from etude.models.load import Model
from etude.models.routing import replay
from etude.protocols import Engine, GenerateRequest, TokenChunk
from etude.types import Manifest, Routes, Run, StopReason, Version

_numbers = itertools.count()


def version(n: int) -> Version:
    return Version(incarnation=1, n=n, step=n)


def manifest(n: int) -> Manifest:
    return Manifest(version=version(n), parent=None, parts=(), changes=(), digest="", nonce=str(n))


START = version(0)


@contextlib.asynccontextmanager
async def serving(
    model: Model,
    *,
    fetch: Callable[[Manifest], Awaitable[Mapping[str, np.ndarray | torch.Tensor]]] | None = None,
    serves: Version | None = START,
    records_routes: bool = True,
    **recipe: object,
) -> AsyncIterator[TorchEngine]:
    """An engine of its own over `model`, closed at the end."""
    settings = EngineRecipe(**{"max_concurrent": 8, **recipe})  # type: ignore[arg-type]
    engine = TorchEngine(model, settings, fetch=fetch, records_routes=records_routes)
    try:
        if serves is not None:
            await engine.set_version(serves)
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class Reply:
    """A whole reply. `window`: prompt and reply."""

    window: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    versions: list[Version]
    """Of every token of the reply."""
    chunks: list[TokenChunk]

    @property
    def last(self) -> TokenChunk:
        return self.chunks[-1]

    @property
    def stop(self) -> StopReason | None:
        return self.last.stop


def ask(ids: np.ndarray | Sequence[int], *, context: str = "c", tokens: int = 8, **fields: object) -> GenerateRequest:
    """A request with an id of its own."""
    array = np.asarray(ids, np.int32) if not isinstance(ids, np.ndarray) else ids
    return GenerateRequest(
        request_id=f"r{next(_numbers)}",
        context_id=context,
        ids=array,
        max_new_tokens=tokens,
        **{"stop_ids": (), **fields},  # type: ignore[arg-type]
    )


async def reply(engine: Engine, ids: np.ndarray | Sequence[int], **fields: object) -> Reply:
    """Ask and wait for all of it. Fields as in `ask`."""
    request = ask(ids, **fields)  # type: ignore[arg-type]
    chunks = [chunk async for chunk in engine.generate(request)]
    return whole(request, chunks)


def whole(request: GenerateRequest, chunks: list[TokenChunk]) -> Reply:
    ids = np.concatenate([chunk.ids for chunk in chunks])
    start = len(request.ids)
    return Reply(
        window=np.concatenate([request.ids, ids]),
        ids=ids,
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        versions=expand([run for chunk in chunks for run in chunk.versions], start, start + len(ids)),
        chunks=chunks,
    )


def expand(runs: Sequence[Run], start: int, end: int) -> list[Version]:
    """The version at each position of [start, end)."""
    return [[run.version for run in runs if run.start <= position][-1] for position in range(start, end)]


def teacher_forced(model: Model, ids: np.ndarray, routes: Routes | None = None) -> np.ndarray:
    """[n] log-probs by plain transformers, entry 0 is 0; with routes forced where given."""
    inputs = torch.from_numpy(ids.astype(np.int64))[None]
    context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if routes is not None:
        experts = np.concatenate([routes.experts, np.zeros_like(routes.experts[:1])]).astype(np.int64)
        valid = np.concatenate([routes.valid, [False]])
        context = replay(model, torch.from_numpy(experts), torch.from_numpy(valid))
    with torch.no_grad(), context:
        logprobs = model.network(inputs, use_cache=False).logits[0].float().log_softmax(-1)
    taken = logprobs[:-1].gather(-1, inputs[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], taken.numpy()]).astype(np.float32)
