"""JSON from strangers: lines and files with limits, and values that are of a type or are not there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from etude.errors import SessionError

MAX_LINE = 64 << 20
"""Bytes of one line; a longer one is skipped."""
MAX_FILE = 1 << 30
"""Bytes of a file that is one JSON value."""
Record = dict[str, Any]


def records(path: Path, skipped: Counter[str]) -> Iterator[Record]:
    """The objects of a file with one a line. Lines that are none are counted: broken, cut (the last one), too long."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            is_whole = line.endswith(b"\n")
            if len(line) > MAX_LINE and not is_whole:
                skipped["line too long"] += 1
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE)
                continue
            if not line.strip():
                continue
            try:
                value = _decode(line)
            except ValueError:
                skipped["broken JSON" if is_whole else "cut line"] += 1
                continue
            if isinstance(value, dict):
                yield value
            else:
                skipped["not an object"] += 1


def whole(path: Path) -> Any:
    """The value of a file that is one JSON value. Errors: SessionError."""
    if path.stat().st_size > MAX_FILE:
        raise SessionError(f"{path} is too long", cause=f"the limit is {MAX_FILE} bytes")
    try:
        return _decode(path.read_bytes())
    except ValueError as error:
        raise SessionError(f"{path} is not JSON", cause=str(error)) from error


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def text_at(record: Any, *keys: str) -> str:
    """The text under keys, one inside the other; empty if it is not there or no text."""
    value = at(record, *keys)
    return value if isinstance(value, str) else ""


def at(record: Any, *keys: str) -> Any:
    """The value under keys, one inside the other; None if it is not there."""
    for key in keys:
        if not isinstance(record, dict):
            return None
        record = record.get(key)
    return record


def objects(value: Any) -> list[Record]:
    """The objects of a list; none if it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def number_at(record: Any, *keys: str) -> float | None:
    """A finite number under keys."""
    value = at(record, *keys)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if is_number and math.isfinite(value) else None


def time_at(record: Any, *keys: str) -> float | None:
    """Seconds since 1970 of an ISO text, or of a number of seconds or milliseconds."""
    value = at(record, *keys)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError, OSError):
            return None
    number = number_at(record, *keys)
    return None if number is None or number < 0 else number / 1000 if number > 1e11 else number


def arguments_of(value: Any) -> tuple[Record, str | None]:
    """A call's arguments, and why they could not be read: an object, or its JSON as text."""
    if isinstance(value, str):
        try:
            value = _decode(value.encode(errors="replace"))
        except ValueError as error:
            return {"text": value}, f"arguments are not JSON: {error}"
    if isinstance(value, dict):
        return value, None
    return {"value": value}, None if value is None else "arguments are no object"
