"""Logs on disk into the session database: found, told apart, read, redacted, stored once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import SessionError
from etude.protocols import Consent, Owner
from etude.sessions.entry import Entry, entry_of_turn
from etude.sessions.found import Added
from etude.sessions.readers import FORMATS, format_of, logs, read_log
from etude.sessions.store import SessionStore

BATCH = 200
"""Turns in one transaction."""


@dataclass(slots=True)
class Imported:
    """What an import did."""

    files: int = 0
    """That were logs."""
    sessions: set[str] = field(default_factory=set)
    added: Added = field(default_factory=Added)
    skipped: Counter[str] = field(default_factory=Counter)
    """By reason: records, and files that are no logs or cannot be read."""
    redacted: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    """Files that are damaged, and why."""


def import_logs(
    store: SessionStore, paths: Sequence[Path], owner: Owner, *, format: str = "auto",
    advance: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.time,
) -> Imported:  # fmt: skip
    """Store what the files and folders hold. `advance` is called after each file.

    Errors: SessionError for a path that is not there, an unknown format, or no consent; StoreError.
    """
    if format not in ("auto", *FORMATS):
        raise SessionError(f"unknown format {format!r}", hint=f"one of: auto, {', '.join(FORMATS)}")
    if owner.consent == Consent.NONE:
        raise SessionError("nothing is imported without consent", hint="--consent keep, or --consent train")
    done = Imported()
    for path in logs(list(paths)):
        _import_file(store, path, owner, format, clock, done)
        advance()
    return done


def _import_file(
    store: SessionStore, path: Path, owner: Owner, format: str, clock: Callable[[], float], done: Imported
) -> None:
    name = format_of(path) if format == "auto" else format
    if name is None:
        done.skipped["file of no known format"] += 1
        return
    waiting: list[Entry] = []
    try:
        for turn in read_log(path, name, owner, done.skipped):
            entry = entry_of_turn(turn, clock(), None)
            done.redacted.update(entry.redacted)
            done.sessions.add(turn.session_id)
            waiting.append(entry)
            if len(waiting) >= BATCH:
                done.added += store.add(waiting)
                waiting = []
    except SessionError as error:
        done.skipped["file that cannot be read"] += 1
        done.refused.append(f"{path}: {error.cause or error.message}")
    else:
        done.files += 1
    if waiting:
        done.added += store.add(waiting)
