"""Patches as coding agents write them, read and applied in memory: all of one, or nothing.

    unified diff                       --- a/path, +++ b/path, @@ -12,5 +12,6 @@, lines with ' ', '-', '+' *** Begin
    Patch ... *** End Patch  *** Add File:, *** Update File: (with *** Move to:), *** Delete File:; hunks begin
                                       with @@, which may name a line that comes before them

A hunk's place is where its old lines stand: numbers in `@@` are only a hint, the nearest place to it is taken, and a
place that is not the only one without such a hint is an error. Pure. What it does not do: read or write files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class PatchError(ValueError):
    """The patch cannot be read or applied. The message is for the model."""


@dataclass(slots=True)
class Hunk:
    """Old lines that become new lines. `near`: 0-based line where the patch believes them; `after`: a line before."""

    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    near: int | None = None
    after: str = ""


@dataclass(slots=True)
class Change:
    """What happens to one file. `kind`: add, update, delete."""

    kind: str
    path: str
    moved_to: str | None = None
    hunks: list[Hunk] = field(default_factory=list)
    ends_with_newline: bool | None = None
    """Whether the new text does; None: as the old one, and a new file does."""


def parse_patch(text: str) -> list[Change]:
    """Errors: PatchError naming the line that cannot be read."""
    lines = text.split("\n")
    begin = next((number for number, line in enumerate(lines) if line.startswith("*** Begin Patch")), None)
    changes = _parse_sections(lines[begin + 1 :]) if begin is not None else _parse_unified(lines)
    if not changes:
        raise PatchError("the patch changes no file: it needs --- and +++ lines, or *** Begin Patch")
    return changes


def apply_patch(files: Mapping[str, str | None], changes: Sequence[Change]) -> dict[str, str | None]:
    """Path -> text after the patch; None: gone. `files`: path -> text before, None where there is no file.

    Errors: PatchError naming the file and the hunk that does not fit.
    """
    after = dict(files)
    for change in changes:
        text = after.get(change.path)
        if change.kind == "add":
            if text is not None:
                raise PatchError(f"{change.path} exists already: update it")
            lines = change.hunks[0].new if change.hunks else []
            after[change.path] = _joined(lines, change.ends_with_newline is not False)
            continue
        if text is None:
            raise PatchError(f"{change.path} does not exist")
        if change.kind == "delete":
            after[change.path] = None
            continue
        changed = _with_hunks(text, change)
        if change.moved_to and change.moved_to != change.path:
            if after.get(change.moved_to) is not None:
                raise PatchError(f"{change.moved_to} exists already")
            after[change.path] = None
        after[change.moved_to or change.path] = changed
    return after


def _joined(lines: Sequence[str], ends_with_newline: bool) -> str:
    return "\n".join(lines) + "\n" * (ends_with_newline and bool(lines))


def _with_hunks(text: str, change: Change) -> str:
    lines = text.split("\n")
    ends_with_newline = lines[-1] == ""
    if ends_with_newline:
        lines.pop()
    moved, start = 0, 0
    for number, hunk in enumerate(change.hunks, 1):
        place = _place(lines, hunk, start, moved, f"{change.path}: hunk {number}")
        lines[place : place + len(hunk.old)] = hunk.new
        moved += len(hunk.new) - len(hunk.old)
        start = place + len(hunk.new)
    return _joined(lines, ends_with_newline if change.ends_with_newline is None else change.ends_with_newline)


def _place(lines: Sequence[str], hunk: Hunk, start: int, moved: int, where: str) -> int:
    """Index of the hunk's first old line, at `start` or later."""
    if hunk.after:
        named = [number for number in range(start, len(lines)) if lines[number].strip() == hunk.after.strip()]
        if not named:
            raise PatchError(f"{where}: no line {hunk.after.strip()!r}")
        start = named[0] + 1
    if not hunk.old:
        return min(len(lines), hunk.near + moved) if hunk.near is not None else start if hunk.after else len(lines)
    count = len(hunk.old)
    places = [n for n in range(start, len(lines) - count + 1) if list(lines[n : n + count]) == hunk.old]
    if not places:  # blanks at the ends of lines are the commonest slip
        bare = [line.rstrip() for line in hunk.old]
        places = [n for n in range(start, len(lines) - count + 1) if [x.rstrip() for x in lines[n : n + count]] == bare]
    if not places:
        raise PatchError(f"{where} does not fit: its old lines, from {hunk.old[0].strip()!r} on, are not in the file")
    if hunk.near is not None:
        wanted = hunk.near + moved
        return min(places, key=lambda place: abs(place - wanted))
    if len(places) > 1 and not hunk.after:
        raise PatchError(f"{where} fits at {len(places)} places: give more of the lines around it")
    return places[0]


_RANGE = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def _parse_unified(lines: Sequence[str]) -> list[Change]:
    changes: list[Change] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- ") or at + 1 == len(lines) or not lines[at + 1].startswith("+++ "):
            at += 1
            continue
        old, new = _name(lines[at][4:]), _name(lines[at + 1][4:])
        if old is None and new is None:
            raise PatchError("a diff from /dev/null to /dev/null names no file")
        kind = "add" if old is None else "delete" if new is None else "update"
        change = Change(kind, old or new or "", moved_to=new if kind == "update" and new != old else None)
        at = _read_hunks(lines, at + 2, change)
        changes.append(change)
    return changes


def _name(text: str) -> str | None:
    path = text.split("\t")[0].strip()
    if path == "/dev/null":
        return None
    return path[2:] if path.startswith(("a/", "b/")) else path


def _read_hunks(lines: Sequence[str], at: int, change: Change) -> int:
    """Of a unified diff, from line `at` on; the line after them.

    The counts of a head tell what belongs to the hunk, also lines that look like heads; where they are too small, as
    models often write them, lines that can only be a hunk's are taken too.
    """
    hunk: Hunk | None = None
    old_left = new_left = 0
    while at < len(lines):
        line = lines[at]
        if hunk is not None and (old_left > 0 or new_left > 0) and _take(hunk, line, is_last=at == len(lines) - 1):
            old_left -= line[:1] != "+"
            new_left -= line[:1] != "-"
        elif match := _RANGE.match(line):
            hunk = Hunk(near=max(0, int(match[1]) - 1))
            old_left, new_left = (1 if match[place] is None else int(match[place]) for place in (2, 3))
            if old_left == 0:
                hunk.near = int(match[1])
            change.hunks.append(hunk)
        elif line.startswith("@@"):
            hunk = Hunk(after=line.strip("@ "))
            change.hunks.append(hunk)
        elif line.startswith("\\"):
            _note_end(change, lines[at - 1][:1])
        elif hunk is None or line.startswith(("--- ", "+++ ")) or line == "" or not _take(hunk, line, is_last=False):
            break
        at += 1
    return at


def _note_end(change: Change, sign: str) -> None:
    """After a line that says that the one before it, of this sign, ends without a line feed."""
    if sign == "-" and change.ends_with_newline is None:
        change.ends_with_newline = True
    elif sign != "-":
        change.ends_with_newline = False


def _take(hunk: Hunk, line: str, *, is_last: bool) -> bool:
    """One line of a hunk's body; False if it is none."""
    if line[:1] == "+":
        hunk.new.append(line[1:])
    elif line[:1] == "-":
        hunk.old.append(line[1:])
    elif line[:1] == " " or (line == "" and not is_last):
        hunk.old.append(line[1:])
        hunk.new.append(line[1:])
    else:
        return False
    return True


def _parse_sections(lines: Sequence[str]) -> list[Change]:
    changes: list[Change] = []
    for number, line in enumerate(lines):
        if line.startswith("*** End Patch"):
            return changes
        if match := re.match(r"\*\*\* (Add|Update|Delete) File: (.+)", line):
            changes.append(Change(match[1].lower(), match[2].strip()))
        elif not changes:
            if line.strip():
                raise PatchError(f"line {number + 2} of the patch stands before any *** Add, Update or Delete File:")
        elif match := re.match(r"\*\*\* Move to: (.+)", line):
            changes[-1].moved_to = match[1].strip()
        elif line.startswith("*** End of File"):
            continue
        else:
            _take_section_line(changes[-1], line, number + 2)
    raise PatchError("*** End Patch is missing: the patch was cut off")


def _take_section_line(change: Change, line: str, number: int) -> None:
    if change.kind == "delete":
        if line.strip():
            raise PatchError(f"line {number} of the patch: nothing belongs under *** Delete File:")
        return
    if change.kind == "add":
        if not line.startswith("+"):
            raise PatchError(f"line {number} of the patch: lines of a new file begin with +")
        if not change.hunks:
            change.hunks.append(Hunk())
        change.hunks[0].new.append(line[1:])
        return
    if line.startswith("@@"):
        change.hunks.append(Hunk(after=line[2:].strip()))
        return
    if not change.hunks:
        change.hunks.append(Hunk())
    if not _take(change.hunks[-1], line, is_last=False):
        raise PatchError(f"line {number} of the patch begins with neither a blank, + nor -")
