"""Which lines of a file are an agent's lines, however they were formatted since.

Two steps: lines that are equal without blanks and with one kind of quotes, in the same order; between them, lines whose
tokens lie together in the same order on both sides, so that a wrapped or a joined line is still itself. Commas before a
closing bracket do not count. Lines without a letter or a digit (blank, brackets) are nobody's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

_TOKEN = re.compile(r"\w+|[^\w\s]")
_CLOSING = {")", "]", "}"}
MAX_GAP = 1500
"""Tokens on one side of a gap that are compared one by one; longer gaps are compared by lines alone."""


MIN_MOVED = 12
"""Characters that are not blank, for a line out of order to be the same one: `try:` is everywhere."""


def normal(line: str) -> str:
    """Without blanks, quotes alike, no comma at the end."""
    return "".join(line.split()).replace("'", '"').rstrip(",")


def counts(line: str) -> bool:
    """Whether a line is anybody's: it has a letter or a digit."""
    return any(char.isalnum() for char in line)


def match(agent: Sequence[str], lines: Sequence[str], normalise: Callable[[str], str] = normal) -> list[int | None]:
    """For each of `lines` the agent's line that it is, or None. No line of the agent counts twice, but for a line that
    was wrapped: each of its pieces names it.

    >>> match(["x = f(a, b)"], ["y = 1", "x = f(", "    a,", "    b,", ")"])
    [None, 0, 0, 0, None]
    """
    theirs, ours = [normalise(line) for line in agent], [normalise(line) for line in lines]
    found: list[int | None] = [None] * len(lines)
    blocks = difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_matching_blocks()
    at_agent = at_line = 0
    for begin, start, size in blocks:
        _match_tokens(agent, lines, (at_agent, begin), (at_line, start), found)
        for offset in range(size):
            if counts(lines[start + offset]):
                found[start + offset] = begin + offset
        at_agent, at_line = begin + size, start + size
    taken = {place for place in found if place is not None}
    free = {theirs[place]: place for place in range(len(agent) - 1, -1, -1) if place not in taken}
    for place, line in enumerate(ours):  # moved lines: out of order, and equal
        if found[place] is None and len(line) >= MIN_MOVED and line in free:
            found[place] = free.pop(line)
    return found


def _match_tokens(
    agent: Sequence[str], lines: Sequence[str], theirs: tuple[int, int], ours: tuple[int, int],
    found: list[int | None],
) -> None:  # fmt: skip
    """Inside a gap: lines all of whose tokens lie in one matching run."""
    if theirs[0] == theirs[1] or ours[0] == ours[1]:
        return
    left, right = _tokens(agent, *theirs), _tokens(lines, *ours)
    if not 0 < len(left) <= MAX_GAP or not 0 < len(right) <= MAX_GAP:
        return
    sizes: dict[int, int] = {}
    for _, line in right:
        sizes[line] = sizes.get(line, 0) + 1
    matcher = difflib.SequenceMatcher(None, [token for token, _ in left], [token for token, _ in right], autojunk=False)
    for begin, start, size in matcher.get_matching_blocks():
        inside: dict[int, int] = {}
        for offset in range(size):
            line = right[start + offset][1]
            inside[line] = inside.get(line, 0) + 1
        places = {right[start + offset][1]: left[begin + offset][1] for offset in range(size - 1, -1, -1)}
        if size < min(3, len(left)):
            continue  # a bracket or a name by itself proves nothing
        for line, number in inside.items():
            if number == sizes[line] and counts(lines[line]):
                found[line] = places[line]


def _tokens(lines: Sequence[str], begin: int, end: int) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for place in range(begin, end):
        for token in _TOKEN.findall(lines[place].replace("'", '"')):
            if token in _CLOSING and found and found[-1][0] == ",":
                found.pop()
            found.append((token, place))
    return found
