"""Keeps what is served (protocols.SessionRecorder): redacted, durable at once, in the database soon after.

    record(turn) -> redact -> waits for a sync that others share -> returns          the turn survives kill -9 now
                                      |
                                journal on disk -> mover -> database                  again and again while it is away
    restart: what the journal holds comes again; unique ids make it stored once

Who waits for whom: `record` for the journal alone, never for the database. `note` asks the database whether a session
exists if this process has not seen it; while the database is away the mover decides. What it does not do: expire or
forget (store.py); what a person said who is forgotten meanwhile is refused when the mover brings it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from etude.errors import StoreError
from etude.protocols import Consent, Event, Owner, ServedTurn
from etude.sessions.entry import Entry, entry_of_event, entry_of_turn, pack_entry, unpack_entry
from etude.sessions.found import Added, UnavailableError
from etude.sessions.journal import Batch, Journal
from etude.sessions.redact import find
from etude.sessions.scrub import Decode

T = TypeVar("T")
MAX_KNOWN = 100_000
"""Sessions that are remembered, so that an event costs no query."""
SHORT = 1_000
"""Tokens of a turn that is redacted at once, in half a millisecond; a longer one goes to a thread, so as not to hold up
other answers."""
GATHER_S = 0.25
"""Seconds that the mover waits after news: turns that end meanwhile share a transaction, and requests that come right
after an answer do not share the processor with it."""
DRAIN_S = 10.0
"""Seconds that closing waits for the database; what is left then stays in the journal."""


class Store(Protocol):
    """What the recorder needs of the database (store.SessionStore)."""

    def add(self, entries: list[Entry]) -> Added: ...
    def has_session(self, tenant: str, session_id: str) -> bool: ...


class JournalRecorder:
    """A SessionRecorder. Call `start` before anything else; it needs a running event loop."""

    def __init__(
        self, store: Store, folder: Path, *, decode: Decode | None, clock: Callable[[], float] = time.time,
        retry_s: tuple[float, float] = (0.1, 30.0),
    ) -> None:  # fmt: skip
        """folder: the journal's. decode: text of token ids; without it no ids are kept. retry_s: first and longest wait
        between two attempts at a database that is away. Errors: StoreError, as of Journal."""
        self._store, self._decode, self._clock, self._retry_s = store, decode, clock, retry_s
        self._journal = Journal(folder)
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._moving: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._threads = {name: ThreadPoolExecutor(1, f"sessions-{name}") for name in ("redact", "journal", "store")}
        self.counts: Counter[str] = Counter()
        """recorded, noted; stored, known, refused by the database; set_aside; redacted by mark; tokens: lost ids."""
        self.last_error: str | None = None
        """Why the database could not take something, while it cannot."""

    async def start(self) -> None:
        """Begin to move what is in the journal, also from an earlier life."""
        await self._run("redact", find, "")  # reads the patterns now, not while somebody waits
        await self._run("journal", self._recall)
        self._moving = asyncio.create_task(self._move())

    async def record(self, turn: ServedTurn) -> None:
        """Without consent nothing is stored anywhere. Errors: StoreError if the journal cannot take it."""
        if turn.owner.consent == Consent.NONE:
            return
        if turn.tokens is not None and len(turn.tokens.ids) <= SHORT:
            entry, data = self._prepare_turn(turn)
        else:
            entry, data = await self._run("redact", self._prepare_turn, turn)
        await self._keep(data)
        self._remember(turn.owner.tenant, turn.session_id)
        self.counts["recorded"] += 1
        self.counts.update(entry.redacted)

    async def note(self, owner: Owner, event: Event) -> bool:
        """False: no such session of this tenant, or no consent. Errors: StoreError if the journal cannot take it."""
        if owner.consent == Consent.NONE or not await self._exists(owner.tenant, event.session_id):
            return False
        entry, data = await self._run("redact", self._prepare_event, event, owner)
        await self._keep(data)
        self.counts["noted"] += 1
        self.counts.update(entry.redacted)
        return True

    async def close(self) -> None:
        """Sync what is waiting, give the database a moment to take it, and keep the rest for the next start."""
        if self._writing is not None:
            await self._writing
        if self._moving is not None:
            deadline = time.monotonic() + DRAIN_S
            while self._journal.waiting() and not self._moving.done() and time.monotonic() < deadline:
                self._news.set()
                await asyncio.sleep(0.02)
                if self.last_error is not None:
                    break  # it is away: no use in waiting
            self._moving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._moving
        for threads in self._threads.values():
            await asyncio.to_thread(threads.shutdown)
        self._journal.close()

    def waiting(self) -> int:
        """Bytes that the database does not have yet."""
        return self._journal.waiting()

    def _recall(self) -> None:
        """Sessions that only the journal knows."""
        for body in self._journal.bodies():
            with contextlib.suppress(StoreError):  # the mover sets it aside
                entry = unpack_entry(body, "a record of the journal")
                if entry.turn is not None:
                    self._remember(entry.owner.tenant, entry.turn.session_id)

    def _prepare_turn(self, turn: ServedTurn) -> tuple[Entry, bytes]:
        entry = entry_of_turn(turn, self._clock(), self._decode)
        return entry, pack_entry(entry)

    def _prepare_event(self, event: Event, owner: Owner) -> tuple[Entry, bytes]:
        entry = entry_of_event(event, owner, self._clock())
        return entry, pack_entry(entry)

    async def _keep(self, data: bytes) -> None:
        """Returns when the journal has synced it, together with whatever else was waiting."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((data, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await written

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            try:
                await self._run("journal", self._journal.append, [data for data, _ in group])
            except StoreError as error:
                for _, written in group:
                    if not written.done():
                        written.set_exception(error)
                continue
            for _, written in group:
                if not written.done():
                    written.set_result(None)
            self._news.set()

    async def _move(self) -> None:
        wait_s = self._retry_s[0]
        while True:
            self._news.clear()
            try:
                batch = await self._run("store", self._journal.batch)
                if batch is None:
                    await self._news.wait()
                    await asyncio.sleep(GATHER_S)
                    continue
                await self._run("store", self._move_batch, batch)
            except StoreError as error:  # away, or its disk is full: the journal holds it meanwhile
                self.last_error = str(error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self._retry_s[1])
                continue
            self._journal.done(batch)
            self.last_error = None
            wait_s = self._retry_s[0]

    def _move_batch(self, batch: Batch) -> None:
        """Errors: UnavailableError; then it must come again."""
        entries = []
        for body in batch.bodies:
            try:
                entries.append(unpack_entry(body, "a record of the journal"))
            except StoreError as error:
                self._set_aside(body, error)
        try:
            added = self._store.add(entries)
        except UnavailableError:
            raise
        except StoreError:  # one of them is not to its taste: the others must not wait for it
            added = Added()
            for entry in entries:
                added += self._move_one(entry)
        self.counts.update(stored=added.turns + added.events, known=added.known, refused=added.refused)

    def _move_one(self, entry: Entry) -> Added:
        try:
            return self._store.add([entry])
        except UnavailableError:
            raise
        except StoreError as error:
            self._set_aside(pack_entry(entry), error)
            return Added()

    def _set_aside(self, body: bytes, error: StoreError) -> None:
        """Beside the journal, for a person to look at."""
        self.counts["set_aside"] += 1
        self.last_error = str(error)
        path = self._journal.folder / f"set-aside-{time.time_ns()}.mp"
        try:
            path.touch(mode=0o600)
            path.write_bytes(body)
        except OSError as full:
            raise StoreError(f"cannot write {path}", cause=str(full)) from full

    async def _exists(self, tenant: str, session_id: str) -> bool:
        if (tenant, session_id) in self._known:
            return True
        try:
            exists = await asyncio.to_thread(self._store.has_session, tenant, session_id)
        except UnavailableError:
            return True
        if exists:
            self._remember(tenant, session_id)
        return exists

    def _remember(self, tenant: str, session_id: str) -> None:
        self._known[tenant, session_id] = None
        self._known.move_to_end((tenant, session_id))
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _run(self, thread: str, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[thread], work, *args)
