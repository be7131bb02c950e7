"""A connection to SQLite or PostgreSQL, with what differs between the two: transactions, inserts, ids, errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine

from etude.errors import RecipeError, StoreError
from etude.sessions import tables
from etude.sessions.found import UnavailableError
from etude.types import FORMAT, digest_of

MAX_KEY = 255
"""Characters of an id that is stored as it is; a longer one is stored as its digest, for the sake of indexes."""
_SETTING_UP, _FORGETTING = 7083, 7084
"""Names of PostgreSQL's advisory locks."""


class Database:
    """Threads may share it. Errors: StoreError, of whose kind UnavailableError may pass."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._is_ready = False

    def close(self) -> None:
        self._engine.dispose()

    @property
    def name(self) -> str:
        """The URL without its password, for messages."""
        return self._engine.url.render_as_string(hide_password=True)

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        self._prepare()
        with self._transaction(writes=False) as connection:
            yield connection

    @contextlib.contextmanager
    def write(self, *, alone: bool = False) -> Iterator[Connection]:
        """Committed at the end, or not at all. alone: no other writer is in the middle of one."""
        self._prepare()
        with self._transaction(writes=True) as connection:
            if connection.dialect.name == "postgresql":
                kind = "pg_advisory_xact_lock" if alone else "pg_advisory_xact_lock_shared"
                connection.execute(sa.text(f"SELECT {kind}({_FORGETTING})"))
            yield connection

    def clean_up(self) -> None:
        """Let nothing of deleted rows stay in SQLite's log. PostgreSQL's own vacuum does so in its time."""
        if self._engine.dialect.name == "sqlite":
            with contextlib.suppress(sa.exc.OperationalError), self._engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def _prepare(self) -> None:
        """Make the tables if need be. Errors: StoreError if they are of another format."""
        if self._is_ready:
            return
        with self._transaction(writes=True) as connection:
            if connection.dialect.name == "postgresql":  # two that start at once must not both create
                connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({_SETTING_UP})"))
            if not sa.inspect(connection).has_table("meta"):
                tables.metadata.create_all(connection)
                connection.execute(tables.meta.insert().values(name="format", value=str(FORMAT)))
            number = connection.scalar(sa.select(tables.meta.c.value).where(tables.meta.c.name == "format"))
            if number != str(FORMAT):
                hint = f"this Etude reads format = {FORMAT}"
                raise StoreError(f"{self.name} is of another format", cause=f"format = {number}", hint=hint)
        self._is_ready = True

    @contextlib.contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[Connection]:
        try:
            with self._engine.connect().execution_options(writes=writes) as connection, connection.begin():
                yield connection
        except (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError) as error:
            hint = None if self._is_ready else "is it running, and is the URL right?"
            raise UnavailableError(f"cannot use {self.name}", cause=_reason(error), hint=hint) from error
        except sa.exc.DBAPIError as error:
            kind = UnavailableError if error.connection_invalidated else StoreError
            raise kind(f"{self.name} refused", cause=_reason(error)) from error
        except (sa.exc.SQLAlchemyError, OverflowError) as error:
            raise StoreError(f"{self.name} refused", cause=_reason(error)) from error


def insert(connection: Connection, table: sa.Table, **values: Any) -> bool:
    """Whether the row is new; one that is there already stays as it is."""
    return connection.execute(_insertion(table, connection.dialect.name), values).first() is not None


@functools.cache
def _insertion(table: sa.Table, dialect: str) -> sa.Executable:
    """Built once: SQLAlchemy takes longer to build a statement than SQLite to execute it."""
    make = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return make(table).on_conflict_do_nothing().returning(sa.literal(1))


def text(value: str) -> str:
    """As both databases take it: PostgreSQL has no text with a zero byte."""
    return value.replace("\0", "�").encode(errors="replace").decode()


def key(value: str) -> str:
    """An id as it is stored and looked up."""
    clean = text(value)
    return clean if len(clean) <= MAX_KEY else f"digest:{digest_of(clean)}"


def _engine(url: str) -> Engine:
    try:
        parsed = sa.make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise RecipeError(f"{url!r} is a database of an unknown kind", hint="sqlite:///file or postgresql://...")
        if parsed.get_backend_name() == "postgresql":
            return sa.create_engine(parsed, pool_pre_ping=True, connect_args={"connect_timeout": 10})
        engine = sa.create_engine(parsed, connect_args={"timeout": 30})
    except (sa.exc.ArgumentError, ModuleNotFoundError) as error:
        hint = "sqlite:////path/to/file or postgresql://user@host/name"
        raise RecipeError(f"{url!r} is no database", cause=_reason(error), hint=hint) from error
    if parsed.database and parsed.database != ":memory:":
        _make_private(Path(parsed.database))
    sa.event.listen(engine, "connect", _set_up_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _make_private(path: Path) -> None:
    """What people said is for the owner of the file alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}", cause=str(error)) from error


def _set_up_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # Python's own BEGIN comes too late: after the first reads of a transaction
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")  # the journal lets go of what was committed here
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA secure_delete = ON")  # what is forgotten leaves no bytes in free pages
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _reason(error: BaseException) -> str:
    return str(getattr(error, "orig", None) or error).strip().split("\n")[0]
