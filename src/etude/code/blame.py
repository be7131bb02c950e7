"""Which of a repository's lines an agent wrote, and how many of them are still there.

    an agent's edits (added.py) --> lines it added, by path
    commit -- git blame -w -M -C, bounded by the history since --> lines that are new, with who committed them
    both -- same_lines.match --> each new line's writer; of each writer's lines, those that are there

Blame says which lines are new at all, so that `return None` of ten years ago is nobody's today; matching says whose
they are, also where a formatter has rewritten them since. Cost: a blame for every file that changed since the agent's
commit's parent and holds one of its lines; the blame walks those commits alone, not the repository's whole history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from etude.code.added import Edit
from etude.code.history import Blamed, Repository
from etude.code.same_lines import counts, match, normal
from etude.code.view import split_lines


@dataclass(frozen=True, slots=True)
class Written:
    """The lines that one writer, as a turn, added to files."""

    writer: str
    at: float
    """Seconds since 1970: only later commits can hold them."""
    files: Mapping[str, tuple[str, ...]]
    """Path -> lines that count."""
    whole: frozenset[str] = frozenset()
    """Paths that were written whole: what was in them before is not the writer's."""

    @property
    def num_lines(self) -> int:
        return sum(map(len, self.files.values()))


def written(
    sessions: Iterable[tuple[str, float, Sequence[Edit]]], normalise: Callable[[str], str] = normal
) -> list[Written]:
    """What each of one session's writers, in order, left behind: lines that a later one took away are nobody's."""
    kept: list[dict[str, list[str]]] = []
    writers: list[tuple[str, float, set[str]]] = []
    for writer, at, edits in sessions:
        mine: dict[str, list[str]] = {}
        whole: set[str] = set()
        for edit in edits:
            if edit.is_whole or edit.deletes:
                for lines in (*(old.get(edit.path, []) for old in kept), mine.get(edit.path, [])):
                    lines.clear()
                whole.add(edit.path)
            for gone in edit.removed:
                _take(gone, [mine.get(edit.path, []), *(old.get(edit.path, []) for old in reversed(kept))], normalise)
            mine.setdefault(edit.path, []).extend(line for line in edit.added if counts(line))
        kept.append(mine)
        writers.append((writer, at, whole))
    return [
        Written(writer, at, {path: tuple(lines) for path, lines in mine.items() if lines}, frozenset(whole))
        for (writer, at, whole), mine in zip(writers, kept, strict=True)
    ]


def _take(line: str, heaps: Sequence[list[str]], normalise: Callable[[str], str]) -> None:
    wanted = normalise(line)
    for heap in heaps:
        for place, other in enumerate(heap):
            if normalise(other) == wanted:
                del heap[place]
                return


@dataclass(frozen=True, slots=True)
class Claim:
    """A line of a file (0-based) and whose it is: which of the writer's lines of which path."""

    line: int
    writer: str
    source: tuple[str, int]


def claims(
    paths: Iterable[str], lines: Sequence[str], new: Sequence[bool], writers: Sequence[Written],
    normalise: Callable[[str], str] = normal,
) -> list[Claim]:  # fmt: skip
    """Who wrote which of a file's new lines; where several did, the last. `paths`: the file's names now and before,
    relative to the repository.

    A writer's path may have folders of another machine before it. Lines that moved to another file are its writer's
    too, if at least three of them did, so that a chance likeness of short lines is not taken for a move.
    """
    places = [place for place, is_new in enumerate(new) if is_new]
    texts = [lines[place] for place in places]
    normals = {normalise(text) for text in texts}
    found: dict[int, Claim] = {}
    for one in sorted(writers, key=lambda writer: -writer.at):
        for source, theirs in one.files.items():
            is_same = any(same_file(source, path) for path in paths)
            if not is_same and sum(normalise(line) in normals for line in theirs) < 3:
                continue
            left = [place for place in range(len(texts)) if places[place] not in found]
            for place, hit in zip(left, match(theirs, [texts[place] for place in left], normalise), strict=True):
                if hit is not None:
                    found[places[place]] = Claim(places[place], one.writer, (source, hit))
    return sorted(found.values(), key=lambda claim: claim.line)


def same_file(written_as: str, path: str) -> bool:
    """Whether a path as an agent wrote it can be this file of the repository."""
    clean = written_as.replace("\\", "/").removeprefix("./")
    return clean == path or clean.endswith(f"/{path}") or path.endswith(f"/{clean}")


def remaining(
    repository: Repository, commit: str, since: str | None, writers: Sequence[Written],
    normalise: Callable[[str], str] = normal,
) -> dict[str, list[Claim]]:  # fmt: skip
    """Of the lines that writers added after the commit `since` (None: from the beginning), those that are there at
    `commit`: path -> claims on its lines. With its parent as `since` it says which lines of a commit are whose."""
    wanted = {normalise(line) for one in writers for lines in one.files.values() for line in lines}
    tokens = {piece for line in wanted for piece in _pieces(line)}
    found: dict[str, list[Claim]] = {}
    if not wanted:
        return found
    for status, path in repository.changed(since, commit):
        text = None if status == "D" else repository.text(commit, path)
        if text is None or not _may_hold(text, wanted, tokens, normalise):
            continue
        blamed = repository.blame(commit, path, since)
        if blamed:
            lines = [one.text for one in blamed]
            names = {path, *(one.path for one in blamed)}
            new = _new_lines(repository, since, blamed, normalise)
            if claimed := claims(names, lines, new, writers, normalise):
                found[path] = claimed
    return found


def _new_lines(
    repository: Repository, since: str | None, blamed: Sequence[Blamed], normalise: Callable[[str], str]
) -> list[bool]:
    """Which lines are new: not those that blame finds before, nor those that a formatter made of them."""
    new = [one.commit is not None for one in blamed]
    kept = {(one.path, one.number) for one in blamed if one.commit is None}
    for path in {one.path for one in blamed if one.commit is None} if since is not None else ():
        old = split_lines(repository.text(since or "", path) or "")
        gone = [line for number, line in enumerate(old, 1) if (path, number) not in kept]
        places = [place for place, is_new in enumerate(new) if is_new]
        for place, hit in zip(places, match(gone, [blamed[place].text for place in places], normalise), strict=True):
            new[place] = hit is None
    return new


def _may_hold(text: str, wanted: set[str], tokens: set[str], normalise: Callable[[str], str]) -> bool:
    """Whether a file has one of the lines, or a piece long enough to be one that was wrapped."""
    return any(
        normalise(line) in wanted or not tokens.isdisjoint(_pieces(normalise(line))) for line in split_lines(text)
    )


def _pieces(line: str) -> list[str]:
    """Identifiers long enough to be telling."""
    return [piece for piece in "".join(char if char.isalnum() or char == "_" else " " for char in line).split()
            if len(piece) >= 6]  # fmt: skip


def without_old(
    repository: Repository, commit: str | None, one: Written, normalise: Callable[[str], str] = normal
) -> Written:
    """Without the lines of files that were written whole which had been in them at `commit`: nobody added those."""
    files = dict(one.files)
    for path in one.whole & files.keys():
        old = None if commit is None else _old_text(repository, commit, path)
        if old is not None:
            before = {place for place in match(files[path], split_lines(old), normalise) if place is not None}
            files[path] = tuple(line for place, line in enumerate(files[path]) if place not in before)
    return Written(one.writer, one.at, {path: lines for path, lines in files.items() if lines}, one.whole)


def _old_text(repository: Repository, commit: str, path: str) -> str | None:
    """Of the file that the path, or an end of it, names."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "~")]
    ends = ("/".join(parts[begin:]) for begin in range(len(parts)))
    return next((text for end in ends if (text := repository.text(commit, end)) is not None), None)
