"""Who wrote which line, the slow and obvious way: difflib through every commit, no git blame.

Every line of every file carries its writer. At a commit equal lines keep theirs, and so do pieces of lines that were
replaced at the same place (they were formatted); a line that is new takes the writer of an equal line that vanished in
the same commit (it moved), else of a writer's line that nobody has claimed yet.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from etude.code.blame import Written, same_file
from etude.code.same_lines import counts, normal

Files = Mapping[str, Sequence[str]]
Owners = dict[str, list[tuple[str, str] | None]]
"""Path -> for each line its writer and the writer's normal line, or None."""


def follow(states: Sequence[tuple[float, Files]], writers: Sequence[Written]) -> list[Owners]:
    """Owners at each state. The first one is before anybody wrote."""
    before: Files = states[0][1]
    owners: Owners = {path: [None] * len(lines) for path, lines in before.items()}
    found = [owners]
    free = {
        one.writer: [(path, normal(line)) for path, lines in one.files.items() for line in lines] for one in writers
    }
    for at, after in states[1:]:
        owners = _step(before, after, owners, _claimer(at, writers, free))
        found.append(owners)
        before = after
    return found


def _claimer(
    at: float, writers: Sequence[Written], free: dict[str, list[tuple[str, str]]]
) -> Callable[[str, str], tuple[str, str] | None]:
    able = sorted((one for one in writers if one.at <= at), key=lambda one: -one.at)

    def claim(path: str, line: str) -> tuple[str, str] | None:
        for one in able:
            for place, (where, wanted) in enumerate(free[one.writer]):
                if wanted == line and same_file(where, path):
                    del free[one.writer][place]
                    return one.writer, line
        return None

    return claim


def _step(before: Files, after: Files, owners: Owners, claim: Callable[[str, str], tuple[str, str] | None]) -> Owners:
    new: Owners = {}
    fresh: list[tuple[str, int]] = []
    vanished: dict[str, list[tuple[str, str] | None]] = {}
    for path in after:
        new[path] = [None] * len(after[path])
        old = before.get(path, ())
        a, b = [normal(line) for line in old], [normal(line) for line in after[path]]
        for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if kind == "equal":
                new[path][k:m] = owners[path][i:j]
                continue
            for place in range(i, j):
                vanished.setdefault(a[place], []).append(owners[path][place])
            joined = "".join(line.replace(",", "") for line in a[i:j])
            for place in range(k, m):
                piece = b[place].replace(",", "")
                if len(piece) < 8 or piece not in joined:
                    fresh.append((path, place))
                    continue
                until = joined.index(piece)  # wrapped or joined: it is the line that holds its first character
                ends = [len("".join(line.replace(",", "") for line in a[i : row + 1])) for row in range(i, j)]
                new[path][place] = owners[path][i + next(n for n, end in enumerate(ends) if until < end)]
    for path in before.keys() - after.keys():
        for line, owner in zip(before[path], owners[path], strict=True):
            vanished.setdefault(normal(line), []).append(owner)
    for path, place in fresh:
        line = normal(after[path][place])
        if not counts(line):
            continue
        moved = vanished.get(line)
        new[path][place] = moved.pop(0) if moved else claim(path, line)
    return new
