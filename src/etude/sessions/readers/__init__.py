"""Logs of coding agents, one file a format: each turns a log into served turns without tokens.

    path --detect--> format --read(log, owner, skipped)--> ServedTurn ...      what was left out is counted by reason

Written from the programs' public formats and tolerant of what they add: an unknown record is counted, never an error.
Errors: SessionError for a file that is no log at all; a reader raises nothing else, whatever is in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from etude.errors import SessionError
from etude.protocols import Owner, ServedTurn
from etude.sessions.readers import claude_code, codex, episodes, mini_swe_agent, opencode

FORMATS: dict[str, ModuleType] = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "mini-swe-agent": mini_swe_agent,
    "etude": episodes,
}
"""Name -> module with `is_log(path, head)` and `read(path, owner, skipped)`."""
_HEAD = 16_384
"""Bytes by which a format is told."""


def logs(paths: list[Path]) -> list[Path]:
    """The files of paths: folders are walked, links are not followed. Errors: SessionError for a path that is not."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
            found += [file for file in inside if file.suffix in (".jsonl", ".json", ".mp")]
        elif path.is_file():
            found.append(path)
        else:
            raise SessionError(f"there is no {path}")
    return found


def format_of(path: Path) -> str | None:
    """Which of FORMATS a file is; None: no log, or only a part of one that another file names."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise SessionError(f"cannot read {path}", cause=str(error)) from error
    return next((name for name, module in FORMATS.items() if module.is_log(path, head)), None)


def read_log(path: Path, format: str, owner: Owner, skipped: Counter[str]) -> Iterator[ServedTurn]:
    """The turns of one log, in order. `skipped` counts what was left out, by reason. Errors: SessionError."""
    try:
        yield from FORMATS[format].read(path, owner, skipped)
    except OSError as error:
        raise SessionError(f"cannot read {path}", cause=str(error)) from error
    except RecursionError as error:
        raise SessionError(f"{path} is no log that can be read", cause="nested too deeply") from error
