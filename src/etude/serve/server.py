"""Listening: uvicorn with limits on heads and time, and an end that loses no answer.

    SIGTERM, SIGINT --> draining: /readyz and new requests say 503 and when to come again, running ones go on
                    --> all answered, or drain_s later: closed (a second signal: at once)

What it does not do: know paths (app.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from asyncio.events import TimerHandle
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from etude.errors import RunError
from etude.serve.gate import Gate
from etude.serve.recipe import ServeRecipe

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers."""
_BACKLOG = 512
_SWITCH_S = 0.001
"""How long a thread that redacts or stores may hold up answers before the interpreter switches back."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """A server's process, from its first step to its last."""
    sys.setswitchinterval(_SWITCH_S)
    uvloop.run(main)


class HttpServer:
    """One listening server, in the event loop that starts it."""

    def __init__(self, app: Any, gate: Gate, recipe: ServeRecipe) -> None:
        self._gate, self._recipe = gate, recipe
        config = uvicorn.Config(
            app, http=_protocol(recipe), ws="none", lifespan="off", log_config=None, log_level="error",
            access_log=False, server_header=False, timeout_keep_alive=max(1, round(recipe.idle_timeout_s)),
            timeout_graceful_shutdown=2, proxy_headers=False, backlog=_BACKLOG,
        )  # fmt: skip
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None
        self._endings: list[Callable[[], Awaitable[None]]] = []
        self.url = ""

    def at_end(self, ending: Callable[[], Awaitable[None]]) -> None:
        """Something to do once the last request is over."""
        self._endings.append(ending)

    async def start(self) -> None:
        """Listen; `url` says where. Errors: RunError if the address cannot be had."""
        listening = _listen(self._recipe.host, self._recipe.port)
        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)

    async def until_told_to_end(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain and close."""
        told, again = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: again.set() if told.is_set() else told.set())
        await told.wait()
        closing = asyncio.create_task(self.close())
        hurrying = asyncio.create_task(again.wait())
        await asyncio.wait({closing, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not closing.done():
            self._server.force_exit = True
            closing.cancel()
            await self._stop()

    async def close(self) -> None:
        """Let running requests finish for at most drain_s, refusing new ones; then close."""
        self._gate.is_draining = True
        if not self._server.force_exit:  # else somebody is in a hurry
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gate.idle.wait(), self._recipe.drain_s)
        await self._stop()

    async def _stop(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        for ending in self._endings:
            await ending()


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        hint = "is another server there? --port 0 takes a free one"
        raise RunError(f"cannot listen on {host}:{port}", cause=str(error), hint=hint) from error
    listening.setblocking(False)
    return listening


def _protocol(recipe: ServeRecipe) -> type[asyncio.Protocol]:
    """uvicorn's, with an end to heads that are too long or come too slowly."""

    class Protocol(HttpToolsProtocol):
        _timer: TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes = 0
            self._wait_for_head()

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._count(len(name) + len(value))

        def on_headers_complete(self) -> None:
            self._stop_timer()
            super().on_headers_complete()

        def _count(self, size: int) -> None:
            self._head_bytes += size + 4
            if self._head_bytes > MAX_HEAD_BYTES:
                raise ValueError("the head is too long")  # the parser's caller answers 400 and closes

        def _wait_for_head(self) -> None:
            self._stop_timer()
            self._timer = self.loop.call_later(recipe.body_timeout_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Protocol
