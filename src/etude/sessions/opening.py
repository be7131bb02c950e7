"""A recipe -> the session database, and what records into it.

SQLAlchemy is loaded by the functions, not by importing this. What it does not do: start a server of PostgreSQL.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import RecipeError
from etude.sessions.recipe import SessionsRecipe
from etude.state import state_folder

if TYPE_CHECKING:
    from etude.sessions.recorder import JournalRecorder
    from etude.sessions.scrub import Decode
    from etude.sessions.store import SessionStore


def open_store(recipe: SessionsRecipe) -> SessionStore:
    """The database that the recipe names, or the person's own. Errors: RecipeError, StoreError."""
    try:
        from etude.sessions.store import SessionStore
    except ModuleNotFoundError as error:
        hint = "pip install 'etude-rl[sessions]'"
        raise RecipeError("sessions need packages that are not here", cause=str(error), hint=hint) from error
    url = recipe.db or f"sqlite:///{state_folder() / 'sessions' / 'sessions.db'}"
    return SessionStore(url, retention_days=recipe.retention_days)


@contextlib.asynccontextmanager
async def open_recorder(recipe: SessionsRecipe, decode: Decode | None) -> AsyncIterator[JournalRecorder]:
    """What keeps what is served, as the recipe says. decode: the text of token ids; without it no ids are kept.

    Errors: RecipeError, StoreError.
    """
    with contextlib.closing(open_store(recipe)) as store:
        from etude.sessions.recorder import JournalRecorder

        journal = Path(recipe.journal) if recipe.journal else state_folder() / "sessions" / "journal"
        recorder = JournalRecorder(store, journal, decode=decode)
        await recorder.start()
        try:
            yield recorder
        finally:
            await recorder.close()
