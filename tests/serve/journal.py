"""A durable recorder at the outer edge: turns appended to one file and synced, those that come together at once.

recorder = Journal(path); ...; turns_in(path)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from etude.frames import append_bytes, decode, encode
from etude.protocols import Event, Owner, ServedTurn


class Journal:
    """protocols.SessionRecorder. One thread writes: what came while it synced goes with the next sync."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._owners: dict[str, str] = {}
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    async def record(self, turn: ServedTurn) -> None:
        body = encode(turn)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owners[turn.session_id] = turn.owner.tenant
        self._waiting.put((struct.pack(">I", len(body)) + body, done))
        await done

    async def note(self, owner: Owner, event: Event) -> bool:
        return self._owners.get(event.session_id) == owner.tenant

    async def close(self) -> None:
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join)
        os.close(self._file)

    def _write(self) -> None:
        while (first := self._waiting.get()) is not None:
            taken = [first]
            with contextlib.suppress(queue.Empty):
                while (more := self._waiting.get_nowait()) is not None:
                    taken.append(more)
                self._waiting.put(None)
            append_bytes(self._file, b"".join(data for data, _ in taken))
            os.fdatasync(self._file)
            taken[0][1].get_loop().call_soon_threadsafe(_done, [future for _, future in taken])


def _done(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def turns_in(path: Path) -> list[ServedTurn]:
    """Whole turns; a last one that was cut is left out."""
    data, found, at = path.read_bytes(), [], 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        if at + 4 + size > len(data):
            break
        found.append(decode(data[at + 4 : at + 4 + size], ServedTurn))
        at += 4 + size
    return found
