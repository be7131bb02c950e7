"""What is kept of one answered request or one later event: the same bytes in the journal and in the database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from etude.errors import StoreError
from etude.frames import decode, encode
from etude.protocols import Event, Owner, ServedTurn
from etude.sessions.scrub import Decode, scrub_event, scrub_turn
from etude.types import FORMAT, Noun


class Entry(Noun, frozen=True, kw_only=True):
    """Exactly one of `turn` and `event` is set, free of what must not be stored."""

    owner: Owner
    at: float
    """When it was recorded: seconds since 1970, UTC."""
    turn: ServedTurn | None = None
    event: Event | None = None
    redacted: Mapping[str, int] = {}
    """Finds by mark."""
    format: int = FORMAT

    @property
    def unique_id(self) -> str:
        """Of the turn or the event."""
        return self.turn.turn_id if self.turn is not None else self.event.event_id if self.event is not None else ""


def entry_of_turn(turn: ServedTurn, at: float, decoder: Decode | None) -> Entry:
    """A turn, redacted. decoder: text of its ids; without one they are dropped."""
    clean, found = scrub_turn(turn, decoder)
    return Entry(owner=turn.owner, at=at, turn=clean, redacted=_counts(found))


def entry_of_event(event: Event, owner: Owner, at: float) -> Entry:
    """An event, redacted."""
    clean, found = scrub_event(event)
    return Entry(owner=owner, at=at, event=clean, redacted=_counts(found))


def _counts(found: Counter[str]) -> dict[str, int]:
    return dict(sorted(found.items()))


class _Formatted(msgspec.Struct):
    """All that is read before the format is known."""

    format: int = FORMAT


def pack_entry(entry: Entry) -> bytes:
    """Errors: StoreError for what cannot be encoded, as an argument of an unknown type."""
    try:
        return encode(entry)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise StoreError(f"{entry.unique_id or 'an entry'} cannot be stored", cause=str(error)) from error


def unpack_entry(data: bytes, where: str) -> Entry:
    """Errors: StoreError naming `where` if the bytes are no entry, or one of another format."""
    try:
        number = decode(data, _Formatted).format
        if number != FORMAT:
            hint = f"this Etude reads format = {FORMAT}"
            raise StoreError(f"{where} is of another format", cause=f"format = {number}", hint=hint)
        return decode(data, Entry)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{where} cannot be read", cause=str(error)) from error
