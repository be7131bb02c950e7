"""What the engine's thread has to tell event loops: collected during a step, handed over once.

Waking a loop costs more than appending to a list, so everything that a step produced for one loop crosses together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from etude.errors import EtudeError
from etude.inference.requests import Sink
from etude.protocols import TokenChunk

T = TypeVar("T")


class Outbox:
    """Filled and flushed by the engine's thread alone."""

    def __init__(self) -> None:
        self._actions: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    def send(self, sink: Sink | None, item: TokenChunk | EtudeError) -> None:
        if sink is not None:
            self._add(sink.loop, lambda: sink.queue.put_nowait(item))

    def resolve(self, future: asyncio.Future[T], value: T) -> None:
        self._add(future.get_loop(), lambda: None if future.done() else future.set_result(value))

    def reject(self, future: asyncio.Future[T], error: EtudeError) -> None:
        self._add(future.get_loop(), lambda: None if future.done() else future.set_exception(error))

    def flush(self) -> None:
        """Hand everything over. A loop that was closed in the meantime has nobody left to tell."""
        if not self._actions:
            return
        actions, self._actions = self._actions, {}
        for loop, items in actions.items():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_do_all, items)

    def _add(self, loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
        self._actions.setdefault(loop, []).append(action)


def _do_all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
