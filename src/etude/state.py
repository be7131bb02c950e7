"""The folder of what belongs to a person and to no run: conversations, sessions."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """$XDG_STATE_HOME/etude, by default ~/.local/state/etude."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "etude"
