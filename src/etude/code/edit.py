"""The edit that the agent's edit_file tool makes: replace one exact piece of text, named so that it cannot be mistaken.

Pure: text in, text out. Which file, and whether it may be written, is decided by the tool.
"""

from __future__ import annotations

from etude.code.view import split_lines

MAX_LINES_NAMED = 5
"""So many lines are listed in a message; more would only cost the model tokens."""


class EditError(ValueError):
    """The edit cannot be made. The message is for the model: what is wrong and what would work."""


def apply_edit(text: str, old: str, new: str, line: int | None = None) -> str:
    r"""`text` with the one occurrence of `old` replaced by `new`.

    Without `line`, `old` must occur exactly once in `text`. With `line` (1-based), exactly one occurrence must begin on
    that line. Overlapping occurrences count apart. Errors: EditError.

    >>> apply_edit("a < b\na < c\n", "<", "<=", line=2)
    'a < b\na <= c\n'
    """
    if not old:
        raise EditError("old is empty")
    if old == new:
        raise EditError("old and new are equal")
    starts = _occurrences(text, old)
    if not starts:
        raise EditError("old does not occur in the file")
    if line is not None:
        num_lines = len(split_lines(text))
        if not 1 <= line <= num_lines:
            raise EditError(f"no line {line}: the file has {num_lines} lines")
        begin = sum(len(one) + 1 for one in text.split("\n", line - 1)[: line - 1])
        end = text.find("\n", begin) + 1 or len(text) + 1
        on_line = [start for start in starts if begin <= start < end]
        if not on_line:
            raise EditError(f"old does not begin on line {line}, but on {_name_lines(text, starts)}")
        starts = on_line
        if len(starts) > 1:
            raise EditError(f"old occurs {len(starts)} times on line {line}: give more of it")
    if len(starts) > 1:
        raise EditError(f"old occurs {len(starts)} times, on {_name_lines(text, starts)}: give line or more text")
    return text[: starts[0]] + new + text[starts[0] + len(old) :]


def _occurrences(text: str, old: str) -> list[int]:
    starts = []
    start = text.find(old)
    while start >= 0:
        starts.append(start)
        start = text.find(old, start + 1)
    return starts


def _line_of(text: str, start: int) -> int:
    return text.count("\n", 0, start) + 1


def _name_lines(text: str, starts: list[int]) -> str:
    lines = sorted({_line_of(text, start) for start in starts[: 10 * MAX_LINES_NAMED]})
    named = ", ".join(str(number) for number in lines[:MAX_LINES_NAMED])
    more = ", ..." if len(lines) > MAX_LINES_NAMED else ""
    return f"line{'s' if len(lines) > 1 else ''} {named}{more}"
