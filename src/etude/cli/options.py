"""Options and output that several commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from etude.errors import RunError

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder of runs.", envvar="ETUDE_RUNS")]
RunName = Annotated[str, typer.Argument(help="A run's name, or its folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value ...", show_default=False)]
RUNS = Path("runs")
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tabs and line feeds, and marks that turn the direction of writing."""


def stderr() -> Console:
    return Console(stderr=True)


def find_run(name: str, runs: Path) -> Path:
    """The run's folder. Errors: RunError."""
    for path in (runs / name, Path(name)):
        if (path / "run.json").is_file():
            return path
    known = sorted(path.parent.name for path in runs.glob("*/run.json")) if runs.is_dir() else []
    raise RunError(f"no run {name!r}", hint=f"runs in {runs}: {', '.join(known) or 'none yet'}")


def visible(text: str) -> str:
    r"""Text of a model, a file or a log, fit for a terminal: what would steer it, or hide something, is spelled out.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def show(rows: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """A table for a person, or JSON for a script."""
    if as_json:
        print(json.dumps(list(rows)))
        return
    if not rows:
        stderr().print("nothing to show")
        return
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)
