"""The ledger: what became of every prompt. One SQLite file, one writer (the orchestrator).

    drawn -> running -> scored -> batched -> trained          trained is derived: batch.step <= newest checkpoint's step
                  \\-> abandoned(reason)

A prompt's key is the hash of prompt, workspace and verifier, so that duplicates collide. Group and batch files are
durable before the row that names them. After a crash `recover` puts running prompts back to drawn, keeps scored groups
whose every token is of the surviving lineage, and leaves batches alone: those after the newest checkpoint are replayed
as stored. `audit` proves from the file that nothing was trained twice and nothing lost.

What it does not do: decide what is drawn or when (admission.py), or write any other file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import RunError
from etude.types import FORMAT, Version

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS prompts (
    key TEXT PRIMARY KEY,
    position INTEGER NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'drawn', 'running', 'scored', 'batched', 'abandoned')),
    admitted_step INTEGER,
    versions TEXT,
    batch INTEGER,
    reason TEXT,
    redrawn INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_state ON prompts (state, position);
CREATE TABLE IF NOT EXISTS batches (step INTEGER PRIMARY KEY, keys TEXT NOT NULL, digest TEXT NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A scored group that waits for a batch."""

    key: str
    admitted_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A durable batch. `digest` is that of its file."""

    step: int
    keys: tuple[str, ...]
    digest: str


class _Database(sqlite3.Connection):
    def execute(self, *args: Any) -> sqlite3.Cursor:
        """Errors: RunError where the disk is full, or the file cannot be written."""
        try:
            return super().execute(*args)
        except sqlite3.OperationalError as error:
            raise RunError(
                "the run's ledger cannot be written", cause=str(error),
                hint="free space on its disk, or make it writable; the same command goes on",
            ) from error  # fmt: skip


class Ledger:
    """Opened by the one process that holds the run's lock."""

    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, factory=_Database)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('format', ?)", (str(FORMAT),))
            number = self.meta("format")
        except sqlite3.DatabaseError as error:
            raise RunError(f"{path} is not a ledger", cause=str(error), hint="restore it or start a new run") from error
        if number != str(FORMAT):
            raise RunError(f"{path} has format {number}", hint=f"this Etude reads format {FORMAT}")

    def close(self) -> None:
        self._db.close()

    def meta(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    # Filling and drawing

    def enroll(self, keys: Sequence[str]) -> None:
        """Enter the pool in its order of drawing. Keys that are there already keep their row: a prompt is used once."""
        with self._db:
            self._db.execute("BEGIN")
            start = self._db.execute("SELECT COALESCE(MAX(position), -1) + 1 FROM prompts").fetchone()[0]
            known = {row[0] for row in self._db.execute("SELECT key FROM prompts")}
            fresh = [key for key in dict.fromkeys(keys) if key not in known]
            rows = [(key, start + number) for number, key in enumerate(fresh)]
            self._db.executemany("INSERT INTO prompts (key, position, state) VALUES (?, ?, 'waiting')", rows)
            self._db.execute("COMMIT")

    def draw(self, admitted_step: int) -> str | None:
        """Take the next prompt: one that came back first, else the next of the pool. None: the epoch is over."""
        row = self._db.execute(
            "SELECT key FROM prompts WHERE state IN ('drawn', 'waiting') ORDER BY state = 'waiting', position LIMIT 1"
        ).fetchone()
        if row is None:
            return None
        self._db.execute(
            "UPDATE prompts SET state = 'running', admitted_step = ? WHERE key = ?", (admitted_step, row[0])
        )
        return str(row[0])

    def scored(self, key: str, versions: Sequence[Version]) -> None:
        """The group's file is durable; `versions` sampled its tokens."""
        text = json.dumps(sorted([v.incarnation, v.n] for v in versions))
        self._move(key, "running", "scored", versions=text)

    def abandoned(self, key: str, reason: str) -> None:
        self._move(key, "running", "abandoned", reason=reason)

    def batched(self, step: int, keys: Sequence[str], digest: str) -> None:
        """The batch's file is durable."""
        with self._db:
            self._db.execute("BEGIN")
            for key in keys:
                self._move(key, "scored", "batched", batch=step)
            self._db.execute("INSERT INTO batches VALUES (?, ?, ?)", (step, json.dumps(list(keys)), digest))
            self._db.execute("COMMIT")

    def _move(self, key: str, before: str, after: str, **columns: object) -> None:
        sets = "".join(f", {name} = ?" for name in columns)
        changed = self._db.execute(
            f"UPDATE prompts SET state = ?{sets} WHERE key = ? AND state = ?", (after, *columns.values(), key, before)
        ).rowcount
        assert changed == 1, f"prompt {key} was not {before} when it became {after}"

    # Reading

    def ready(self) -> list[Ready]:
        """Scored groups, oldest first."""
        rows = self._db.execute(
            "SELECT key, admitted_step FROM prompts WHERE state = 'scored' ORDER BY admitted_step, position"
        )
        return [Ready(key=key, admitted_step=step) for key, step in rows]

    def batches(self) -> list[BatchRow]:
        rows = self._db.execute("SELECT step, keys, digest FROM batches ORDER BY step")
        return [BatchRow(step=step, keys=tuple(json.loads(keys)), digest=digest) for step, keys, digest in rows]

    def counts(self) -> dict[str, int]:
        """Prompts by state, and `redrawn`: how often one went back to drawn."""
        counts = dict(self._db.execute("SELECT state, COUNT(*) FROM prompts GROUP BY state").fetchall())
        counts["redrawn"] = self._db.execute("SELECT COALESCE(SUM(redrawn), 0) FROM prompts").fetchone()[0]
        return counts

    # After a crash

    def recover(self, survives: Callable[[int, int], bool]) -> int:
        """Put back what a crash cut: running prompts, and scored groups with a token of a dead version.

        `survives(incarnation, n)` says whether a version is in the surviving lineage. Returns how many went back.
        """
        back = [row[0] for row in self._db.execute("SELECT key FROM prompts WHERE state = 'running'")]
        for key, versions in self._db.execute("SELECT key, versions FROM prompts WHERE state = 'scored'").fetchall():
            if not all(survives(incarnation, n) for incarnation, n in json.loads(versions)):
                back.append(key)
        with self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "UPDATE prompts SET state = 'drawn', redrawn = redrawn + 1, versions = NULL WHERE key = ?",
                [(key,) for key in back],
            )
            self._db.execute("COMMIT")
        return len(back)

    def audit(self) -> list[str]:
        """Violations of "trained at most once, none lost", each a sentence; empty if the ledger is sound."""
        problems = []
        seen: dict[str, int] = {}
        batches = self.batches()
        for expected, batch in enumerate(batches, start=1):
            if batch.step != expected:
                problems.append(f"batch {batch.step} stands where step {expected} belongs")
            for key in batch.keys:
                if key in seen:
                    problems.append(f"prompt {key} is in batch {seen[key]} and in batch {batch.step}")
                seen[key] = batch.step
        rows = self._db.execute("SELECT key, batch FROM prompts WHERE state = 'batched'").fetchall()
        for key, step in rows:
            if seen.pop(key, None) != step:
                problems.append(f"prompt {key} says batch {step}, which does not hold it")
        problems.extend(f"prompt {key} is in batch {step} but not batched" for key, step in seen.items())
        positions = [row[0] for row in self._db.execute("SELECT position FROM prompts ORDER BY position")]
        if positions != list(range(len(positions))):
            problems.append("a prompt's row is missing")
        return problems
