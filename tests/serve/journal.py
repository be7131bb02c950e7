"""A durable recorder at the outer edge: turns appended to one file and synced, those that come together at once.

recorder = Journal(path); ...; turns_in(path)
"""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

from etude.frames import append_bytes, decode, encode
from etude.protocols import Event, Owner, ServedTurn


class Journal:
    """protocols.SessionRecorder."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._owners: dict[str, str] = {}

    async def record(self, turn: ServedTurn) -> None:
        body = encode(turn)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((struct.pack(">I", len(body)) + body, done))
        self._owners[turn.session_id] = turn.owner.tenant
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await done

    async def note(self, owner: Owner, event: Event) -> bool:
        return self._owners.get(event.session_id) == owner.tenant

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        os.close(self._file)

    async def _write(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            await asyncio.to_thread(self._sync, b"".join(data for data, _ in taken))
            for _, done in taken:
                done.set_result(None)

    def _sync(self, data: bytes) -> None:
        append_bytes(self._file, data)
        os.fdatasync(self._file)


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
