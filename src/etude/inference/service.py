"""The engine's side of the frames: method name -> handler, for the worker process that serves an engine.

What it does not do: listen on a socket (`frames.Server` does), or follow the weight store (`build` wires that).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from etude.errors import RequestError
from etude.frames import Handler, decode, encode
from etude.inference.client import ScoreReply, ScoreRequest
from etude.protocols import Engine, GenerateRequest
from etude.types import Manifest

T = TypeVar("T")


def handlers(engine: Engine) -> dict[str, Handler]:
    """Handlers for generate, score, forget, load and stats. Malformed arguments are a RequestError."""

    async def generate(args: Any) -> AsyncIterator[object]:
        chunks = engine.generate(_convert(args, GenerateRequest))
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            async for chunk in chunks:
                yield chunk

    async def score(args: Any) -> AsyncIterator[object]:
        request = _convert(args, ScoreRequest)
        logprobs, routes = await engine.score(request.ids, request.routes)
        yield ScoreReply(logprobs=logprobs, routes=routes)

    async def forget(args: Any) -> AsyncIterator[object]:
        await engine.forget(_convert(args, str))
        yield True

    async def load(args: Any) -> AsyncIterator[object]:
        await engine.load(_convert(args, Manifest))
        yield True

    async def stats(_: Any) -> AsyncIterator[object]:
        yield await engine.stats()

    return {"generate": generate, "score": score, "forget": forget, "load": load, "stats": stats}


def _convert(args: Any, kind: type[T]) -> T:
    try:
        return decode(encode(args), kind)
    except (ValueError, TypeError) as error:
        raise RequestError(f"malformed {kind.__name__}", cause=str(error)) from error
