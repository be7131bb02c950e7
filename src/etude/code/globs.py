"""Patterns of paths: `*` and `?` within a name, `**` for any folders, `[...]` and `{a,b}` as in a shell.

A model writes them: the work is bounded, whatever the pattern (names are fnmatch's, which never tries a star twice).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

MAX_CHOICES = 256
"""Patterns that braces may stand for."""


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a relative path matches. A pattern without a slash is matched against the last name alone.

    Errors: ValueError for braces that stand for too many patterns.

    >>> matcher("src/**/*.py")("src/a/b.py"), matcher("*.py")("src/a/b.py"), matcher("src/*.py")("src/a/b.py")
    (True, True, False)
    """
    pattern = pattern.removeprefix("./")
    choices = [[None if part == "**" else _name(part) for part in one.split("/")] for one in _choices(pattern)]
    if "/" in pattern:
        return lambda path: any(_matches(parts, path.split("/")) for parts in choices)
    return lambda path: any(_matches(parts, [path.rpartition("/")[2]]) for parts in choices)


def _choices(pattern: str) -> list[str]:
    """What braces stand for, one after the other; one that is not closed is a character."""
    found, todo = [], [pattern]
    while todo:
        one = todo.pop()
        braces = re.search(r"\{([^{}]*)\}", one)  # innermost first
        if braces is None:
            found.append(one)
        else:
            todo += [one[: braces.start()] + choice + one[braces.end() :] for choice in braces[1].split(",")]
        if len(found) + len(todo) > MAX_CHOICES:
            raise ValueError(f"the braces stand for more than {MAX_CHOICES} patterns")
    return found


def _name(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(pattern)).match


def _matches(parts: Sequence[Callable[[str], object] | None], names: Sequence[str]) -> bool:
    """parts: of the pattern; None: any number of names, at its end one or more."""
    ends = {0}
    """How many names the parts so far may stand for."""
    for place, part in enumerate(parts):
        if part is None:
            is_last = place == len(parts) - 1
            ends = set(range(min(ends) + is_last, len(names) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(names) and part(names[end])}
        if not ends:
            return False
    return len(names) in ends
