"""Rows for tests."""

from etude.sessions.found import Landing


def landing(turn_id: str, **changes: object) -> Landing:
    values = {"turn_id": turn_id, "branch": "shop:main", "commit": "c" * 40, "at": 1.0, "lines": 3, "added": 4}
    return Landing(**{**values, **changes})
