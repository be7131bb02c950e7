"""Every text of a turn or an event through `redact`, before it is written anywhere.

A token id is its text in another form: where a text of a turn held something, or the text that its ids stand for did,
the ids are dropped, and the turn's window can no longer be trained on (sessions.windows says which piece is missing).
Ids that nobody can read back are dropped too: thinking and broken calls are in no text of a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from etude.errors import StoreError
from etude.protocols import Event, ServedTurn
from etude.sessions.redact import find, redact

Decode = Callable[[np.ndarray], str]
"""The text that ids stand for."""
TOKENS = "tokens"
"""Counts turns that lost their ids."""
T = TypeVar("T", bound=msgspec.Struct)
MAX_DEPTH = 100
"""Of lists and mappings in each other: more could be written but not be read back."""
_KEPT = {
    "ServedTurn": ("turn_id", "session_id", "owner", "source", "model", "tokens", "opened"),
    "Event": ("event_id", "session_id", "turn_id", "kind"),
    "RepositoryState": ("commit",),
}
"""Fields that name things: a name that is changed would name nothing."""


def scrub_turn(turn: ServedTurn, decode: Decode | None) -> tuple[ServedTurn, Counter[str]]:
    """The turn as it may be stored, and how many finds of each mark there were; `tokens` counts lost ids."""
    found: Counter[str] = Counter()
    clean = _scrub_struct(turn, found)
    if turn.tokens is not None and (found or decode is None or find(decode(turn.tokens.ids))):
        clean = msgspec.structs.replace(clean, tokens=None)
        found[TOKENS] += 1
    return clean, found


def scrub_event(event: Event) -> tuple[Event, Counter[str]]:
    """The event as it may be stored, and how many finds of each mark there were."""
    found: Counter[str] = Counter()
    return _scrub_struct(event, found), found


def _scrub_struct(value: T, found: Counter[str]) -> T:
    kept = _KEPT.get(type(value).__name__, ())
    changed = {}
    for name in value.__struct_fields__:
        old = getattr(value, name)
        new = storable(old) if name in kept and isinstance(old, str) else old if name in kept else _scrub(old, found)
        if new is not old:
            changed[name] = new
    return msgspec.structs.replace(value, **changed) if changed else value


def _scrub(value: Any, found: Counter[str], depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise StoreError("a turn cannot be stored", cause=f"its arguments are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        if len(value) < 6 or type(value) is not str:  # too short for anything; an enum's value
            return storable(value)
        text, here = redact(storable(value))
        found.update(here)
        return text if here else storable(value)
    if isinstance(value, msgspec.Struct):
        return _scrub_struct(value, found)
    if isinstance(value, Mapping):
        pairs = {_scrub(key, found, depth): _scrub_under(key, item, found, depth) for key, item in value.items()}
        return pairs if any(pairs.get(key) is not item for key, item in value.items()) else value
    if isinstance(value, list | tuple):
        items = [_scrub(item, found, depth + 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return items if isinstance(value, list) else tuple(items)
    return value


def _scrub_under(key: object, item: Any, found: Counter[str], depth: int) -> Any:
    """A value whose key says what it is: {"password": "..."} is an assignment in another form."""
    if isinstance(item, str) and isinstance(key, str) and "\n" not in item and len(item) < 400:
        text, here = redact(f'{key}: "{storable(item)}"')
        if here and text.startswith(f'{key}: "') and text.endswith('"'):
            found.update(here)
            return text[len(key) + 3 : -1]
    return _scrub(item, found, depth + 1)


def storable(text: str) -> str:
    """Without lone surrogates, which no encoding takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
