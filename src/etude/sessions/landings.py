"""Which turns' lines reached which branch, and how far a branch was looked at: the memory of retention.py."""

from __future__ import annotations

import sqlalchemy as sa

from etude.sessions import tables
from etude.sessions.database import Database, insert, key
from etude.sessions.found import Landing


class Landings:
    """In the session database. Threads may share it. Errors: StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def land(self, landing: Landing) -> bool:
        """That a turn's lines reached a branch. False: that was known, or the turn is gone."""
        with self._database.write() as connection:
            at = tables.turns.c
            if connection.scalar(sa.select(at.turn_id).where(at.turn_id == key(landing.turn_id))) is None:
                return False
            return insert(connection, tables.landings, turn_id=key(landing.turn_id), branch=landing.branch,
                           commit=landing.commit, at=landing.at, lines=landing.lines, added=landing.added)  # fmt: skip

    def landings(self, branch: str) -> list[Landing]:
        """Of one branch, oldest first."""
        at = tables.landings.c
        query = sa.select(at.turn_id, at.branch, at.commit, at.at, at.lines, at.added).where(at.branch == branch)
        with self._database.read() as connection:
            return [
                Landing(turn_id=row[0], branch=row[1], commit=row[2], at=row[3], lines=row[4], added=row[5])
                for row in connection.execute(query.order_by(at.at, at.turn_id))
            ]

    def watched(self, branch: str) -> str | None:
        """The last commit of the branch that was looked at."""
        with self._database.read() as connection:
            at = tables.watched.c
            commit: str | None = connection.scalar(sa.select(at.commit).where(at.branch == branch))
            return commit

    def watch(self, branch: str, commit: str) -> None:
        with self._database.write() as connection:
            connection.execute(tables.watched.delete().where(tables.watched.c.branch == branch))
            connection.execute(tables.watched.insert().values(branch=branch, commit=commit))
