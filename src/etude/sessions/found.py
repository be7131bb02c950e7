"""Rows that the session database gives and takes, and how it fails for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.errors import StoreError
from etude.protocols import ServedTurn
from etude.types import Noun


class UnavailableError(StoreError):
    """The database cannot be reached, or not now: the same call may succeed later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What became of entries. They add up: `a + b`."""

    turns: int = 0
    events: int = 0
    known: int = 0
    """Stored before."""
    refused: int = 0
    """Without consent, of a forgotten person, or events of no session."""

    def __add__(self, other: Added) -> Added:
        return Added(turns=self.turns + other.turns, events=self.events + other.events,
                     known=self.known + other.known, refused=self.refused + other.refused)  # fmt: skip


class SessionRow(Noun, frozen=True, kw_only=True):
    """A session in a list. Times are seconds since 1970, UTC."""

    session_id: str
    tenant: str
    user: str
    source: str
    repository: str
    started_at: float
    last_at: float
    num_turns: int
    num_events: int
    model: str
    consent: str


class StoredTurn(Noun, frozen=True, kw_only=True):
    """A turn as it is stored, and what was taken out of it, by mark."""

    turn: ServedTurn
    redacted: Mapping[str, int]


class Landing(Noun, frozen=True, kw_only=True):
    """The first commit of a branch that holds lines of a turn."""

    turn_id: str
    branch: str
    """Repository and branch: `name:branch`."""
    commit: str
    at: float
    """When it was committed: seconds since 1970, UTC."""
    lines: int
    """Of the turn's lines, so many are in it."""
    added: int
    """Lines that the turn added."""
