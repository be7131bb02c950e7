"""Unified diffs between two states of a workspace, in the form that `git apply` and `patch` take.

Text files only, and no renames: a moved file is one deleted and one made.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

CONTEXT_LINES = 3


def unified_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The diff that turns `before` into `after` (path -> text), files in path order; empty if they are equal."""
    paths = sorted(before.keys() | after.keys())
    return "".join(_file_diff(path, before.get(path), after.get(path)) for path in paths)


def diff_of(before: Mapping[str, str], changes: Mapping[str, str | None]) -> str:
    """The diff that turns `before` into what `changes` (path -> text, None: gone) make of it."""
    old = {path: before[path] for path in changes if path in before}
    return unified_diff(old, {path: text for path, text in changes.items() if text is not None})


def _file_diff(path: str, old: str | None, new: str | None) -> str:
    if old == new:
        return ""
    old_name, new_name = _quoted("a/" + path), _quoted("b/" + path)
    head = f"diff --git {old_name} {new_name}\n"
    if old is None:
        head += "new file mode 100644\n"
    elif new is None:
        head += "deleted file mode 100644\n"
    hunks = "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
        for line in _hunks(_lines(old or ""), _lines(new or ""))
    )
    if not hunks:
        return head
    return (
        f"{head}--- {'/dev/null' if old is None else _marked(old_name)}\n"
        f"+++ {'/dev/null' if new is None else _marked(new_name)}\n{hunks}"
    )


def _hunks(old: list[str], new: list[str]) -> list[str]:
    """difflib's lines without its two heads, which know neither quoting nor /dev/null."""
    return list(difflib.unified_diff(old, new, n=CONTEXT_LINES))[2:]


def _lines(text: str) -> list[str]:
    """Lines with their line feeds; other line ends belong to the text, as for git."""
    pieces = text.split("\n")
    return [piece + "\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


def _quoted(name: str) -> str:
    """Names with control characters, quotes or backslashes in git's C style; a hostile name cannot forge a line."""
    if not any(char < " " or char in '"\\\x7f' or "\ud800" <= char <= "\udfff" for char in name):
        return name
    data = name.encode(errors="surrogateescape")
    escaped = "".join(
        f"\\{byte:03o}" if byte < 0x20 or byte in (0x22, 0x5C) or byte >= 0x7F else chr(byte) for byte in data
    )
    return f'"{escaped}"'


def _marked(name: str) -> str:
    """A tab after a name with a space, so that `patch` sees where it ends."""
    return name + "\t" if " " in name and not name.startswith('"') else name
