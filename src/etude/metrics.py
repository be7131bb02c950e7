"""Where rows of numbers go: a JSONL file that survives kill -9, the terminal, or both.

    loop  --record(kind, row)-->  Tee  -->  JsonlRecorder    metrics.jsonl: one object a line {time, kind, row}
                                       -->  ConsoleRecorder  stderr: a live panel, or one plain line a step
    report  <--read_rows--  metrics.jsonl

`progress` is the bar of every other command. All of it speaks on stderr: stdout is data.
What it does not do: aggregate, decide which rows matter, promise a row over a power cut (rows are not synced).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from etude.errors import StoreError
from etude.frames import append_bytes
from etude.protocols import Recorder

Row = Mapping[str, float | int | str | None]
PLAIN_EVERY_S = 10.0
"""Seconds between two lines of a plain progress."""


# A file


class JsonlRecorder:
    """Appends rows to `path`, each with the time of day in seconds since the epoch. One writer at a time.

    A row reaches the kernel in one write, so that killing the process loses nothing that was recorded. What a kill in
    the middle of a write left behind is cut off when the file is opened again. NaN and infinities become null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _drop_cut_line(self._file)
        except OSError as error:
            raise StoreError(f"cannot write {path}", cause=str(error), hint="is the run's folder there?") from error

    def record(self, kind: str, row: Row) -> None:
        """Errors: StoreError if the disk is full."""
        line = msgspec.json.encode({"time": time.time(), "kind": kind, "row": row}, enc_hook=_plain) + b"\n"
        try:
            append_bytes(self._file, line)
        except OSError as error:
            raise StoreError(f"cannot write {self.path}", cause=str(error), hint="free space on its disk") from error

    def close(self) -> None:
        os.close(self._file)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a number or a text")


def _drop_cut_line(file: int) -> None:
    """Truncate after the last line feed."""
    end = os.fstat(file).st_size
    position = end
    while position > 0:
        start = max(0, position - 65_536)
        found = os.pread(file, position - start, start).rfind(b"\n")
        if found >= 0:
            position = start + found + 1
            break
        position = start
    if position != end:
        os.ftruncate(file, position)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file, `{"time": s, "kind": name, "row": {...}}`, oldest first; none if there is no file.

    A last line without line feed was cut and is ignored. Errors: StoreError naming the line that is no row.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {path}", cause=str(error)) from error
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            entry = msgspec.json.decode(line, type=_Entry)
        except (msgspec.MsgspecError, RecursionError) as error:
            hint = "delete that line"
            raise StoreError(f"{path}: line {number} is not a row", cause=str(error), hint=hint) from error
        rows.append({"time": entry.time, "kind": entry.kind, "row": entry.row})
    return rows


class _Entry(msgspec.Struct):
    time: float
    kind: str
    row: dict[str, Any]


# Several at once


class Tee:
    """Records every row in each of `recorders`, in order."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def record(self, kind: str, row: Row) -> None:
        for recorder in self._recorders:
            recorder.record(kind, row)


# The terminal


@functools.cache
def stderr_console() -> Console:
    """The console of all progress: one, so that a bar and a live panel share the screen."""
    return Console(stderr=True, highlight=False)


_SHOWN = (
    ("reward_mean", "reward", "{:+.3f}"),
    ("solve_rate", "solved", "{:.0%}"),
    ("staleness_mean", "stale", "{:.2f}"),
    ("turns_mean", "turns", "{:.1f}"),
    ("tokens_per_s", "tokens/s", "{:,.0f}"),
)
"""What of a step is shown: key, label, format."""


def _cells(row: Row) -> list[tuple[str, str]]:
    """(label, text) of what `_SHOWN` names and the row has."""
    return [(label, form.format(row[key])) for key, label, form in _SHOWN if isinstance(row.get(key), float | int)]


def _rate(before: Row, now: Row) -> float | None:
    """Tokens that the engine sampled a second between two rows, from its counter; None where that is not known."""
    names = ("engine_sampled_tokens", "wall_s")
    pairs = [(before.get(name), now.get(name)) for name in names]
    (tokens, seconds) = (
        new - old if isinstance(old, float | int) and isinstance(new, float | int) else -1.0 for old, new in pairs
    )
    return tokens / seconds if tokens >= 0 and seconds > 0 else None


def _eval_line(row: Row) -> str:
    names = {"before": "before training", "after": "after training", "control": "before, until a test passes"}
    words = [f"{names.get(str(row.get('when')), row.get('when'))}:"]
    words += [f"{name} {row[key]:.1%}" for key, name in (("pass1", "pass@1"),) if isinstance(row.get(key), float | int)]
    if isinstance(row.get("passk"), float | int):
        words.append(f"pass@{row['k']} {row['passk']:.1%}")
    if row.get("n") is not None:
        words.append(f"on {row['n']} tasks")
    return " ".join(words)


class ConsoleRecorder:
    """Shows a training run on stderr: `step` rows as they come, `eval` rows as lines that stay, and no other kind.

    On a terminal a panel with the clock against `budget_s` (seconds, None without a limit) moves on between rows;
    anywhere else each step is one line. Use as a context manager, so that the panel is put away.
    """

    def __init__(self, budget_s: float | None, *, console: Console | None = None) -> None:
        self._budget_s = budget_s
        self._console = console or stderr_console()
        self._row: Row = {}
        self._wall_s = 0.0
        self._at = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            # stdout is data and must not be drawn into the panel
            self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def record(self, kind: str, row: Row) -> None:
        if isinstance(wall_s := row.get("wall_s"), float | int):
            self._wall_s, self._at = float(wall_s), time.monotonic()
        if kind == "eval":
            self._print(_eval_line(row))
        elif kind in ("fault", "watchdog"):
            self._print(f"{kind}: " + ", ".join(f"{name} {value}" for name, value in row.items()))
        elif kind == "step":
            row = {**row, "tokens_per_s": row.get("tokens_per_s", _rate(self._row, row))}
            self._row = row
            if self._live is None:
                words = [f"step {row.get('step', '?')}", *(f"{label} {text}" for label, text in _cells(row))]
                self._print("  ".join([f"{self._wall_s:6.0f} s", *words]))

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _panel(self) -> Table:
        wall_s = self._wall_s + time.monotonic() - self._at
        grid = Table.grid(padding=(0, 2))
        clock = Table.grid(padding=(0, 1))
        if not self._row:
            clock.add_row(Text("starting"), Text(f"{wall_s:.0f} s"))
        elif self._budget_s:
            bar = ProgressBar(total=self._budget_s, completed=min(wall_s, self._budget_s), width=30)
            clock.add_row(Text("training"), bar, Text(f"{wall_s:.0f} of {self._budget_s:.0f} s"))
        else:
            clock.add_row(Text("training"), Text(f"{wall_s:.0f} s"))
        grid.add_row(clock)
        cells = [("step", str(self._row.get("step", "-"))), *_cells(self._row)]
        grid.add_row(Text("   ").join(Text.assemble((label, "dim"), " ", (text, "bold")) for label, text in cells))
        return grid


# The bar of other commands


class Bar:
    """Handed out by `progress`. Without a total (None) it counts."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description = description
        self.total = total
        self.done = 0

    def advance(self, count: int = 1) -> None:
        """`count` more are done."""
        self.done += count
        self._draw()

    def describe(self, text: str) -> None:
        """Say what is being done now."""
        self.description = text
        self._draw()

    def _draw(self) -> None:
        """Silent."""


class _PlainBar(Bar):
    """A line at the start, every `PLAIN_EVERY_S` seconds, and at the end."""

    def __init__(self, description: str, total: int | None, console: Console) -> None:
        super().__init__(description, total)
        self._console = console
        self._next = 0.0
        self._last = ""
        self._draw()

    def _draw(self) -> None:
        if time.monotonic() >= self._next:
            self.print_line()
            self._next = time.monotonic() + PLAIN_EVERY_S

    def print_line(self) -> None:
        line = f"{self.description} {self.done}" + (f" of {self.total}" if self.total is not None else "")
        if line != self._last:
            self._console.print(Text(line), soft_wrap=True)
            self._last = line


class _RichBar(Bar):
    def __init__(self, description: str, total: int | None, bars: Progress) -> None:
        super().__init__(description, total)
        self._bars = bars
        self._task = bars.add_task("", total=total, label=Text(description))

    def _draw(self) -> None:
        self._bars.update(self._task, completed=self.done, label=Text(self.description))


class _LabelColumn(TextColumn):
    """The description as plain text: markup in it stays text."""

    def render(self, task: Any) -> Text:
        return task.fields["label"]


@contextlib.contextmanager
def progress(
    description: str, total: int | None = None, *, quiet: bool = False, console: Console | None = None
) -> Iterator[Bar]:
    """A bar on stderr while the body runs; a few plain lines where that is no terminal; nothing if `quiet`.

    >>> with progress("grade", total=len(tasks)) as bar:
    ...     for task in tasks:
    ...         bar.advance()
    """
    console = console or stderr_console()
    if quiet:
        yield Bar(description, total)
    elif console.is_interactive:
        columns = (_LabelColumn(""), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, refresh_per_second=4, redirect_stdout=False) as bars:
            yield _RichBar(description, total, bars)
    else:
        bar = _PlainBar(description, total, console)
        try:
            yield bar
        finally:
            bar.print_line()
