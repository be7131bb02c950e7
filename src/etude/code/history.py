"""A git repository, read: commits of a branch, what they changed, files at a commit, who last wrote a line.

Only git itself is run, and nothing that a repository's settings name: no hooks, no external diffs, no text filters.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import WorkspaceError

_SAFE = ("-c", "core.quotepath=off", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
         "-c", "diff.external=", "-c", "blame.ignoreRevsFile=", "-c", "log.showSignature=false")  # fmt: skip
MAX_BLOB = 2 << 20
"""Bytes of a file; longer ones are nobody's work by hand."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of the branch's own line of history (first parents)."""

    name: str
    parent: str | None
    at: float
    """When it was committed: seconds since 1970, UTC."""


@dataclass(frozen=True, slots=True)
class Blamed:
    """A line of a file at some commit. `commit` made it, as line `number` (1-based) of `path`; None: it is older than
    the history that was asked for."""

    commit: str | None
    path: str
    number: int
    text: str


class Repository:
    """A folder under git. Errors: WorkspaceError for what git refuses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        top = self._git("rev-parse", "--show-toplevel").strip()
        self.name = Path(top).name

    def branch(self) -> str:
        """The one that is checked out; a commit's name if none is."""
        name = self._git("rev-parse", "--abbrev-ref", "HEAD").strip()
        return name if name != "HEAD" else self._git("rev-parse", "HEAD").strip()

    def commits(self, branch: str, after: str | None = None) -> list[Commit]:
        """Of first parents, oldest first; those after `after` alone if that is still in the branch's history."""
        which = [branch]
        if after is not None and self._is_ancestor(after, branch):
            which = [f"{after}..{branch}"]
        text = self._git("rev-list", "--first-parent", "--reverse", "--timestamp", "--parents", *which, "--")
        found = []
        for line in text.splitlines():
            stamp, name, *parents = line.split()
            found.append(Commit(name, parents[0] if parents else None, float(stamp)))
        return found

    def commit(self, name: str) -> Commit:
        """One commit. Errors: WorkspaceError if it is gone, as after a rewritten history was cleaned up."""
        stamp, full, *parents = self._git("rev-list", "--timestamp", "--parents", "-1", name, "--").split()
        return Commit(full, parents[0] if parents else None, float(stamp))

    def changed(self, old: str | None, new: str) -> list[tuple[str, str]]:
        """(status, path) of files that differ; moved files with their new path."""
        if old is None:
            names = self._git("ls-tree", "-r", "--name-only", "-z", new).split("\0")
            return [("A", name) for name in names if name]
        parts = self._git("diff", "--name-status", "-z", "-M", "--no-ext-diff", "--no-textconv", old, new, "--").split(
            "\0"
        )
        found, at = [], 0
        while at + 1 < len(parts):
            status = parts[at][:1]
            step = 3 if status in "RC" else 2
            found.append((status, parts[at + step - 1]))
            at += step
        return found

    def text(self, commit: str, path: str) -> str | None:
        """A file's text; None if there is none, or it is binary or too long."""
        done = self._run("cat-file", "blob", f"{commit}:{path}")
        if done.returncode != 0 or len(done.stdout) > MAX_BLOB or b"\0" in done.stdout[:8000]:
            return None
        return done.stdout.decode(errors="replace")

    def blame(self, commit: str, path: str, since: str | None) -> list[Blamed]:
        """Who made each line, in order: of the commits after `since` on first parents. Blanks are ignored, and moved
        and copied lines and renamed files followed (git blame -w -M -C)."""
        which = commit if since is None else f"{since}..{commit}"
        done = self._run("blame", "--porcelain", "--no-textconv", "-w", "-M", "-C", "--first-parent", which, "--", path)
        if done.returncode != 0:
            return []
        return _parse_blame(done.stdout.decode(errors="replace"), since is not None)

    def _is_ancestor(self, old: str, new: str) -> bool:
        return self._run("merge-base", "--is-ancestor", old, new).returncode == 0

    def _git(self, *arguments: str) -> str:
        done = self._run(*arguments)
        if done.returncode != 0:
            reason = done.stderr.decode(errors="replace").strip().split("\n")[0]
            raise WorkspaceError(f"cannot read {self.folder}", cause=reason, hint="is it a git repository?")
        return done.stdout.decode(errors="replace")

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command: Sequence[str] = ["git", "--no-optional-locks", *_SAFE, *arguments]
        try:
            return subprocess.run(command, cwd=self.folder, capture_output=True, check=False)
        except OSError as error:
            raise WorkspaceError(f"cannot read {self.folder}", cause=str(error), hint="apt-get install git") from error


def _parse_blame(text: str, is_bounded: bool) -> list[Blamed]:
    """Of `git blame --porcelain`: a head a line, more about a commit where it comes first, then a tab and the line."""
    found: list[Blamed] = []
    paths: dict[str, str] = {}
    outside: set[str] = set()
    commit, number = "", 0
    for line in text.split("\n"):
        if line.startswith("\t"):
            name = None if is_bounded and commit in outside else commit
            found.append(Blamed(name, paths.get(commit, ""), number, line[1:]))
        elif line.startswith("filename "):
            paths[commit] = line.removeprefix("filename ")
        elif line == "boundary":
            outside.add(commit)
        elif len(head := line.split(" ")) >= 3 and len(head[0]) in (40, 64) and head[1].isdigit():
            commit, number = head[0], int(head[1])
    return found
