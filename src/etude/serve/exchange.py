"""One request over HTTP: let in, read, answered whole or as events, and given up when the client goes away.

    admit -> body -> Ask -> Turn.start --+-- stream: head, events as they come, the end once the turn is kept
                                         `-- whole: JSON once the turn is kept

Until the first token is there nothing is sent, so that a refusal has its own status. A client that does not take what
it is sent for `send_timeout_s` is gone. What it does not do: know an API's words (openai_chat.py and its siblings).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from etude.errors import EtudeError
from etude.serve.conversation import Ask
from etude.serve.gate import Gate, Visit, body_of, pins_of
from etude.serve.refusal import Refusal, refusal_of, status_of
from etude.serve.refusal import body_of as refusal_body
from etude.serve.turn import Delta, Parts, Turn

_log = logging.getLogger(__name__)
EVENTS = (b"text/event-stream; charset=utf-8", b"no-store")
JSON = (b"application/json", b"no-store")


class Api(Protocol):
    """How one API asks and answers."""

    name: str
    """openai or anthropic: whose shape errors have."""
    endpoint: str
    """For the metrics."""
    body: type[Any]

    def ask(self, body: Any, parts: Parts) -> Ask:
        """Errors: Refusal naming what cannot be honoured."""
        ...

    def is_stream(self, body: Any) -> bool: ...

    def events(self, turn: Turn, body: Any) -> AsyncIterator[bytes]:
        """The stream, but for its last part until the turn is kept. Errors: Refusal."""
        ...

    def whole(self, turn: Turn, body: Any, delta: Delta) -> bytes: ...

    def failed(self, refusal: Refusal) -> bytes:
        """The event that ends a stream which has begun."""
        ...


class Outlet:
    """Sends an answer, and gives up on a client that does not take it."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self.status = 0

    async def head(self, status: int, kind: tuple[bytes, bytes], headers: dict[str, str], size: int | None) -> None:
        self.status = status
        lines = [(b"content-type", kind[0]), (b"cache-control", kind[1])]
        lines += [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        if size is not None:
            lines.append((b"content-length", str(size).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": lines})

    async def part(self, data: bytes, *, more: bool) -> None:
        """Errors: TimeoutError."""
        async with asyncio.timeout(self._timeout_s):
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def refuse(self, refusal: Refusal, api: str) -> None:
        data = msgspec.json.encode(refusal_body(refusal, api))
        await self.head(status_of(refusal, api), JSON, refusal.headers(), len(data))
        await self.part(data, more=False)


class Exchange(Response):
    """A response that reads its request itself."""

    def __init__(self, parts: Parts, gate: Gate, api: Api, request: Request) -> None:
        self._parts, self._gate, self._api, self._request = parts, gate, api, request
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api, measures = self._api, self._parts.measures
        outlet = Outlet(send, self._parts.recipe.send_timeout_s)
        try:
            visit = self._gate.admit(self._request)
        except Refusal as refusal:
            await outlet.refuse(refusal, api.name)
            measures.requests.labels(api.endpoint, str(outlet.status)).inc()
            return
        measures.in_flight.set(self._gate.running)
        try:
            await self._answer(outlet, visit, receive)
        finally:
            self._gate.leave(visit)
            measures.in_flight.set(self._gate.running)
            measures.requests.labels(api.endpoint, str(outlet.status or 499)).inc()

    async def _answer(self, outlet: Outlet, visit: Visit, receive: Receive) -> None:
        turn: Turn | None = None
        try:
            body = await body_of(self._request, self._api.body, self._parts.recipe)
            pins = await pins_of(self._request.headers, self._parts.engine)
            ask = self._api.ask(body, self._parts)
            turn = Turn(self._parts, ask, visit.caller.owner, pins)
            await while_connected(receive, self._speak(outlet, turn, body, ask))
        except Refusal as refusal:
            await self._refuse(outlet, refusal)
        except EtudeError as error:
            await self._refuse(outlet, refusal_of(error))
        except TimeoutError:
            _log.info("a client did not take its answer")
        finally:
            if turn is not None:
                await asyncio.shield(turn.close())
                visit.tokens = turn.usage.prompt + turn.usage.sampled

    async def _speak(self, outlet: Outlet, turn: Turn, body: Any, ask: Ask) -> None:
        await turn.start()
        headers = {"x-etude-session": turn.session_id, "x-etude-turn": turn.turn_id,
                   "x-etude-version": turn.versions[0].version.name if turn.versions else ""}  # fmt: skip
        if ask.ignored:
            headers["x-etude-ignored"] = ", ".join(ask.ignored)
            for option in ask.ignored:
                self._parts.measures.ignored.labels(option).inc()
        if self._api.is_stream(body):
            await outlet.head(200, EVENTS, headers, None)
            async with contextlib.aclosing(self._api.events(turn, body)) as events:  # type: ignore[type-var]
                async for data in events:
                    await outlet.part(data, more=True)
            return await outlet.part(b"", more=False)
        last = [delta async for delta in turn.deltas(live=False)][-1]
        data = self._api.whole(turn, body, last)
        headers["x-etude-versions"] = ", ".join(run.version.name for run in turn.versions)
        await outlet.head(200, JSON, headers, len(data))
        await outlet.part(data, more=False)

    async def _refuse(self, outlet: Outlet, refusal: Refusal) -> None:
        """As a status, or as the last event of a stream that has begun."""
        if not outlet.status:
            return await outlet.refuse(refusal, self._api.name)
        with contextlib.suppress(TimeoutError):
            await outlet.part(self._api.failed(refusal), more=False)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or give it up once the client is gone. The request's body has been read."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
    finally:
        watcher.cancel()
