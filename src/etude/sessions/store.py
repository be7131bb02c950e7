"""The session database: what was said and what became of it, until it expires or somebody is forgotten.

    entries (from the journal, or read from logs) --add--> sessions, turns, events --> rooms that learn from them
    forget(tenant, user), expire(now), drop(...)           take things out again, whole

Everything is idempotent by unique ids, so that a journal may be replayed as often as need be. SQLite by default (WAL,
foreign keys), PostgreSQL by URL. Methods block: call them in a thread. What it does not do: make anything durable
before the database has it (journal.py), or redact (entry.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from etude.errors import MissingError
from etude.protocols import Consent, Event, Owner, ServedTurn
from etude.sessions import tables
from etude.sessions.database import Database, insert, key, text
from etude.sessions.entry import Entry, entry_of_event, entry_of_turn, pack_entry, unpack_entry
from etude.sessions.found import Added, SessionRow, StoredTurn
from etude.types import Version, digest_of

DAY_S = 86_400.0
_BATCH = 500
"""Ids in one statement."""


class SessionStore:
    """One database. Threads may share it. Errors: StoreError, of whose kind UnavailableError may pass (database.py)."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time, retention_days: int | None = None) -> None:
        """clock: seconds since 1970, UTC. retention_days: for owners who named none."""
        self.database = Database(url)
        self.name = self.database.name
        self._clock, self._retention_days = clock, retention_days

    def close(self) -> None:
        self.database.close()

    # Writing

    def record(self, turn: ServedTurn) -> Added:
        """Redact and store one turn; ids are kept as they are only in turns that came through a recorder."""
        if turn.owner.consent == Consent.NONE:
            return Added()
        return self.add([entry_of_turn(turn, self._clock(), None)])

    def note(self, owner: Owner, event: Event) -> bool:
        """Redact and store one event. False: no such session of this tenant, or no consent."""
        if owner.consent == Consent.NONE or not self.has_session(owner.tenant, event.session_id):
            return False
        self.add([entry_of_event(event, owner, self._clock())])
        return True

    def add(self, entries: Sequence[Entry]) -> Added:
        """Store entries in one transaction; those stored before change nothing. What was left out is counted."""
        added = Added()
        with self.database.write() as connection:
            for entry in entries:
                added += self._add(connection, entry)
        return added

    def _add(self, connection: Connection, entry: Entry) -> Added:
        owner = entry.owner
        if owner.consent == Consent.NONE:
            return Added(refused=1)
        person = _person(owner.tenant, owner.user)
        forgotten = connection.scalar(sa.select(tables.forgotten.c.at).where(tables.forgotten.c.person == person))
        if forgotten is not None and entry.at <= forgotten:
            return Added(refused=1)
        if entry.turn is not None:
            return self._add_turn(connection, entry, entry.turn)
        return self._add_event(connection, entry, entry.event) if entry.event is not None else Added()

    def _add_turn(self, connection: Connection, entry: Entry, turn: ServedTurn) -> Added:
        owner, where = turn.owner, turn.repository
        days = owner.retention_days if owner.retention_days is not None else self._retention_days
        tenant, session_id, turn_id = key(owner.tenant), key(turn.session_id), key(turn.turn_id)
        insert(connection, tables.sessions, tenant=tenant, session_id=session_id, user=key(owner.user),
                source=text(turn.source), repository=text(where.root if where else ""),
                started_at=turn.started_at, last_at=turn.started_at)  # fmt: skip
        is_new = insert(connection, tables.turns, turn_id=turn_id, tenant=tenant, session_id=session_id,
                         number=turn.number, user=key(owner.user), consent=str(owner.consent),
                         source=text(turn.source), model=text(turn.model), started_at=turn.started_at,
                         stored_at=entry.at, expires_at=None if days is None else turn.started_at + days * DAY_S,
                         has_tokens=turn.tokens is not None, redacted=json.dumps(dict(entry.redacted)),
                         payload=pack_entry(entry))  # fmt: skip
        if not is_new:
            return Added(known=1)
        for version in {run.version for run in turn.tokens.versions} if turn.tokens else ():
            insert(connection, tables.turn_versions, turn_id=turn_id, incarnation=version.incarnation, n=version.n,
                    step=version.step)  # fmt: skip
        at = tables.sessions.c
        connection.execute(
            tables.sessions.update()
            .where(at.tenant == tenant, at.session_id == session_id)
            .values(
                started_at=sa.case((at.started_at > turn.started_at, turn.started_at), else_=at.started_at),
                last_at=sa.case((at.last_at < turn.started_at, turn.started_at), else_=at.last_at),
            )
        )
        return Added(turns=1)

    def _add_event(self, connection: Connection, entry: Entry, event: Event) -> Added:
        tenant, session_id = key(entry.owner.tenant), key(event.session_id)
        if not _has_session(connection, tenant, session_id):
            return Added(refused=1)
        is_new = insert(connection, tables.events, event_id=key(event.event_id), tenant=tenant,
                         session_id=session_id, turn_id=key(event.turn_id) if event.turn_id else None,
                         user=key(entry.owner.user), kind=text(event.kind), at=event.at, value=event.value,
                         after_s=event.after_s, payload=pack_entry(entry))  # fmt: skip
        return Added(events=1) if is_new else Added(known=1)

    # Reading

    def has_session(self, tenant: str, session_id: str) -> bool:
        with self.database.read() as connection:
            return _has_session(connection, key(tenant), key(session_id))

    def has_event(self, event_id: str) -> bool:
        with self.database.read() as connection:
            at = tables.events.c
            return connection.scalar(sa.select(at.event_id).where(at.event_id == key(event_id))) is not None

    def sessions(
        self, *, tenant: str | None = None, user: str | None = None, limit: int | None = None
    ) -> list[SessionRow]:
        """Newest first."""
        at, turn, event = tables.sessions.c, tables.turns.c, tables.events.c
        same_turns = sa.and_(turn.tenant == at.tenant, turn.session_id == at.session_id)
        num_turns = sa.select(sa.func.count()).where(same_turns).scalar_subquery()
        num_events = (
            sa.select(sa.func.count())
            .where(event.tenant == at.tenant, event.session_id == at.session_id)
            .scalar_subquery()
        )
        model = sa.select(sa.func.max(turn.model)).where(same_turns).scalar_subquery()
        consent = sa.select(sa.func.min(turn.consent)).where(same_turns).scalar_subquery()
        query = sa.select(
            at.session_id, at.tenant, at.user, at.source, at.repository, at.started_at, at.last_at, num_turns,
            num_events, model, consent,
        ).order_by(at.last_at.desc(), at.session_id)  # fmt: skip
        if tenant is not None:
            query = query.where(at.tenant == key(tenant))
        if user is not None:
            query = query.where(at.user == key(user))
        with self.database.read() as connection:
            return [
                SessionRow(
                    session_id=row[0], tenant=row[1], user=row[2], source=row[3], repository=row[4],
                    started_at=row[5], last_at=row[6], num_turns=row[7], num_events=row[8], model=row[9] or "",
                    consent=row[10] or "",
                )
                for row in connection.execute(query.limit(limit))
            ]  # fmt: skip

    def turns(
        self, tenant: str | None = None, session_id: str | None = None, *, consent: Consent | None = None,
        since: float | None = None, until: float | None = None, sampled_by: Version | None = None,
        repositories: Sequence[str] | None = None,
    ) -> Iterator[StoredTurn]:  # fmt: skip
        """Those that match everything given, by session and number. `since` and `until` bound their start.

        Errors: StoreError for a turn that cannot be read, or of another format.
        """
        at = tables.turns.c
        query = sa.select(at.turn_id).order_by(at.tenant, at.session_id, at.number, at.started_at, at.turn_id)
        wanted = {at.tenant: tenant, at.session_id: session_id}
        query = query.where(*(column == key(value) for column, value in wanted.items() if value is not None))
        if consent is not None:
            query = query.where(at.consent == str(consent))
        if since is not None:
            query = query.where(at.started_at >= since)
        if until is not None:
            query = query.where(at.started_at < until)
        if sampled_by is not None:
            by = tables.turn_versions.c
            same = sa.and_(by.incarnation == sampled_by.incarnation, by.n == sampled_by.n)
            query = query.where(at.turn_id.in_(sa.select(by.turn_id).where(same)))
        if repositories is not None:
            of = tables.sessions.c
            here = sa.and_(of.tenant == at.tenant, of.session_id == at.session_id, of.repository.in_(repositories))
            query = query.where(sa.exists().where(here))
        with self.database.read() as connection:
            ids = list(connection.scalars(query))
        for begin in range(0, len(ids), 50):
            yield from self._read_turns(ids[begin : begin + 50])

    def _read_turns(self, ids: Sequence[str]) -> Iterator[StoredTurn]:
        at = tables.turns.c
        query = sa.select(at.turn_id, at.redacted, at.payload).where(at.turn_id.in_(ids))
        with self.database.read() as connection:
            rows = {row[0]: row for row in connection.execute(query)}
        for turn_id in ids:
            if turn_id in rows:
                entry = unpack_entry(rows[turn_id][2], f"turn {turn_id} in {self.name}")
                if entry.turn is not None:
                    yield StoredTurn(turn=entry.turn, redacted=json.loads(rows[turn_id][1]))

    def events(self, tenant: str, session_id: str) -> list[Event]:
        """Of one session, in order of time. Errors: StoreError for one that cannot be read."""
        at = tables.events.c
        query = sa.select(at.event_id, at.payload).where(at.tenant == key(tenant), at.session_id == key(session_id))
        with self.database.read() as connection:
            rows = list(connection.execute(query.order_by(at.at, at.event_id)))
        read = (unpack_entry(row[1], f"event {row[0]} in {self.name}").event for row in rows)
        return [event for event in read if event is not None]

    # Taking out

    def expire(self) -> int:
        """Delete turns past their retention, and sessions left without a turn; the number of turns."""
        with self.database.write() as connection:
            at = tables.turns.c
            ids = list(connection.scalars(sa.select(at.turn_id).where(at.expires_at <= self._clock())))
            _delete_turns(connection, ids)
            return len(ids)

    def forget(self, tenant: str, user: str) -> tuple[Version, ...]:
        """Delete everything of a person, in one transaction; the versions that were trained on any of it, in order.

        What was recorded of them before now and still waits in a journal is refused when it comes.
        """
        tenant_key, user_key = key(tenant), key(user)
        with self.database.write(alone=True) as connection:
            at, by, event = tables.turns.c, tables.trained.c, tables.events.c
            theirs = sa.and_(at.tenant == tenant_key, at.user == user_key)
            ids = list(connection.scalars(sa.select(at.turn_id).where(theirs)))
            rows = connection.execute(
                sa.select(by.incarnation, by.n, by.step)
                .where(by.turn_id.in_(sa.select(at.turn_id).where(theirs)))
                .distinct()
            )
            versions = sorted(Version(incarnation=row[0], n=row[1], step=row[2]) for row in rows)
            connection.execute(tables.events.delete().where(event.tenant == tenant_key, event.user == user_key))
            _delete_turns(connection, ids)
            values = {"person": _person(tenant, user), "at": self._clock()}
            connection.execute(tables.forgotten.delete().where(tables.forgotten.c.person == values["person"]))
            connection.execute(tables.forgotten.insert().values(**values))
        self.database.clean_up()
        return tuple(versions)

    def drop_turn(self, turn_id: str) -> None:
        """Errors: MissingError if there is none."""
        self._drop(tables.turns.c.turn_id == key(turn_id), f"turn {turn_id}")

    def drop_session(self, tenant: str, session_id: str) -> None:
        """With all its turns and events. Errors: MissingError if there is none."""
        at = tables.turns.c
        self._drop(sa.and_(at.tenant == key(tenant), at.session_id == key(session_id)), f"session {session_id}")

    def _drop(self, which: sa.ColumnElement[bool], name: str) -> None:
        with self.database.write() as connection:
            ids = list(connection.scalars(sa.select(tables.turns.c.turn_id).where(which)))
            if not ids:
                raise MissingError(f"no {name} in {self.name}", hint="etude sessions list")
            _delete_turns(connection, ids)

    # What later rooms write down

    def mark_trained(self, turn_ids: Sequence[str], version: Version) -> None:
        """That `version` was trained on these turns. Errors: MissingError if one is gone: it must not be trained on."""
        with self.database.write() as connection:
            at = tables.turns.c
            for turn_id in turn_ids:
                if connection.scalar(sa.select(at.turn_id).where(at.turn_id == key(turn_id))) is None:
                    raise MissingError(f"turn {turn_id} is gone", cause="forgotten, expired or dropped")
                insert(connection, tables.trained, turn_id=key(turn_id), incarnation=version.incarnation,
                        n=version.n, step=version.step)  # fmt: skip


def _has_session(connection: Connection, tenant: str, session_id: str) -> bool:
    at = tables.sessions.c
    query = sa.select(at.session_id).where(at.tenant == tenant, at.session_id == session_id)
    return connection.scalar(query) is not None


def _delete_turns(connection: Connection, ids: Sequence[str]) -> None:
    """With their events, versions and landings, and sessions that are empty then."""
    turn, event, session = tables.turns.c, tables.events.c, tables.sessions.c
    touched: set[tuple[str, str]] = set()
    for begin in range(0, len(ids), _BATCH):
        some = ids[begin : begin + _BATCH]
        rows = connection.execute(sa.select(turn.tenant, turn.session_id).where(turn.turn_id.in_(some)).distinct())
        touched |= {(row[0], row[1]) for row in rows}
        connection.execute(tables.events.delete().where(event.turn_id.in_(some)))
        connection.execute(tables.turns.delete().where(turn.turn_id.in_(some)))
    for tenant, session_id in touched:
        left = sa.select(turn.turn_id).where(turn.tenant == tenant, turn.session_id == session_id).limit(1)
        if connection.scalar(left) is None:
            connection.execute(tables.events.delete().where(event.tenant == tenant, event.session_id == session_id))
            connection.execute(
                tables.sessions.delete().where(session.tenant == tenant, session.session_id == session_id)
            )


def _person(tenant: str, user: str) -> str:
    return digest_of(tenant, user)
