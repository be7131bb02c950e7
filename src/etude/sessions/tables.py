"""The tables of the session database, for SQLite and PostgreSQL alike.

    meta            format of all the others
    sessions        one a (tenant, session): whose, from where, since when
    turns           one an answered request; `payload` is the whole entry as a frame, columns are what is queried apart
    turn_versions   which policy versions sampled a turn
    events          what became of a turn later
    trained         which versions were trained on a turn
    landings        the commit with which a turn's lines reached a branch
    watched         how far a branch was looked at
    forgotten       digests of people who asked to be forgotten, so that what still waits in a journal is not stored

This, database.py, store.py and landings.py are all that knows of SQLAlchemy.
"""

from __future__ import annotations

import sqlalchemy as sa

metadata = sa.MetaData()

meta = sa.Table(
    "meta", metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)  # fmt: skip

sessions = sa.Table(
    "sessions", metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("user", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("repository", sa.Text, nullable=False),
    sa.Column("started_at", sa.Float(53), nullable=False),
    sa.Column("last_at", sa.Float(53), nullable=False),
    sa.Index("sessions_by_user", "tenant", "user"),
    sa.Index("sessions_by_time", "last_at"),
)  # fmt: skip

turns = sa.Table(
    "turns", metadata,
    sa.Column("turn_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("user", sa.Text, nullable=False),
    sa.Column("consent", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("started_at", sa.Float(53), nullable=False),
    sa.Column("stored_at", sa.Float(53), nullable=False),
    sa.Column("expires_at", sa.Float(53)),
    sa.Column("has_tokens", sa.Boolean, nullable=False),
    sa.Column("redacted", sa.Text, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.ForeignKeyConstraint(["tenant", "session_id"], ["sessions.tenant", "sessions.session_id"]),
    sa.Index("turns_by_session", "tenant", "session_id", "number"),
    sa.Index("turns_by_user", "tenant", "user"),
    sa.Index("turns_by_time", "started_at"),
    sa.Index("turns_by_expiry", "expires_at"),
)  # fmt: skip

turn_versions = sa.Table(
    "turn_versions", metadata,
    sa.Column("turn_id", sa.Text, sa.ForeignKey("turns.turn_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("n", sa.BigInteger, primary_key=True),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Index("turn_versions_by_version", "incarnation", "n"),
)  # fmt: skip

events = sa.Table(
    "events", metadata,
    sa.Column("event_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("turn_id", sa.Text),
    sa.Column("user", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("at", sa.Float(53), nullable=False),
    sa.Column("value", sa.Float(53)),
    sa.Column("after_s", sa.Float(53)),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.ForeignKeyConstraint(["tenant", "session_id"], ["sessions.tenant", "sessions.session_id"]),
    sa.Index("events_by_session", "tenant", "session_id"),
    sa.Index("events_by_turn", "turn_id"),
    sa.Index("events_by_user", "tenant", "user"),
    sa.Index("events_by_kind", "kind", "at"),
)  # fmt: skip

trained = sa.Table(
    "trained", metadata,
    sa.Column("turn_id", sa.Text, sa.ForeignKey("turns.turn_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("incarnation", sa.BigInteger, primary_key=True),
    sa.Column("n", sa.BigInteger, primary_key=True),
    sa.Column("step", sa.BigInteger, nullable=False),
)  # fmt: skip

landings = sa.Table(
    "landings", metadata,
    sa.Column("turn_id", sa.Text, sa.ForeignKey("turns.turn_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("branch", sa.Text, primary_key=True),
    sa.Column("commit", sa.Text, nullable=False),
    sa.Column("at", sa.Float(53), nullable=False),
    sa.Column("lines", sa.BigInteger, nullable=False),
    sa.Column("added", sa.BigInteger, nullable=False),
)  # fmt: skip

watched = sa.Table(
    "watched", metadata,
    sa.Column("branch", sa.Text, primary_key=True),
    sa.Column("commit", sa.Text, nullable=False),
)  # fmt: skip

forgotten = sa.Table(
    "forgotten", metadata,
    sa.Column("person", sa.Text, primary_key=True),
    sa.Column("at", sa.Float(53), nullable=False),
)  # fmt: skip
