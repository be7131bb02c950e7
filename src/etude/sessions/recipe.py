"""Settings of what is kept of sessions."""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsRecipe:
    """Where sessions go and how long they stay."""

    db: str = ""
    """URL of the database: sqlite:////path/sessions.db, or postgresql://user@host/name. Empty: a file in the user's
    state folder."""
    journal: str = ""
    """Folder in which a turn is durable before the database has it. Empty: beside the user's sessions."""
    retention_days: int | None = None
    """After so many days a session is deleted, unless its owner names another number; none: kept until forgotten."""

    def __post_init__(self) -> None:
        if self.retention_days is not None and self.retention_days < 1:
            raise RecipeError(f"sessions.retention_days = {self.retention_days} must be at least 1")
        if self.db and "://" not in self.db:
            raise RecipeError(
                f"sessions.db = {self.db!r} is no URL", hint="sqlite:////path/to/file, or postgresql://..."
            )
