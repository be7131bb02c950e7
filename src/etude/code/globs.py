"""Patterns of paths: `*` and `?` within a name, `**` over folders, `[...]` and `{a,b}` as in a shell."""

from __future__ import annotations

import re
from collections.abc import Callable


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a relative path matches. A pattern without a slash is matched against the last name alone.

    >>> matcher("src/**/*.py")("src/a/b.py"), matcher("*.py")("src/a/b.py"), matcher("src/*.py")("src/a/b.py")
    (True, True, False)
    """
    pattern = pattern.removeprefix("./")
    expression = re.compile(_expression(pattern), re.DOTALL)
    if "/" in pattern:
        return lambda path: expression.fullmatch(path) is not None
    return lambda path: expression.fullmatch(path.rpartition("/")[2]) is not None


def _expression(pattern: str) -> str:
    parts, at, depth = [], 0, 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            parts.append("(?:[^/]+/)*")
            at += 3
        elif rest.startswith("**"):
            parts.append(".*")
            at += 2
        elif rest[0] in "*?":
            parts.append("[^/]*" if rest[0] == "*" else "[^/]")
            at += 1
        elif rest[0] == "[" and (end := rest.find("]", 2)) > 0:
            inside = rest[1:end].replace("\\", "\\\\").replace("[", "\\[")
            parts.append(f"[{'^' + inside[1:] if inside[0] == '!' else inside}]")
            at += end + 1
        elif rest[0] == "{" and "}" in rest:
            parts.append("(?:")
            depth += 1
            at += 1
        elif rest[0] in "}," and depth:
            parts.append(")" if rest[0] == "}" else "|")
            depth -= rest[0] == "}"
            at += 1
        else:
            parts.append(re.escape(rest[0]))
            at += 1
    return "".join(parts)
