"""A person's folder: its text as a workspace, and changes to it brought back, all or none.

What is read is what git would track (tracked files and new ones that are not ignored), else every file that is not
hidden. What is written back is checked first, for it comes from where nobody is trusted: nothing outside the folder,
nothing through a link, nothing of git's own (a hook would run), and nothing over a file that changed meanwhile.

What it does not do: ask (agent/interactive.py), or run git for anything else.
"""

from __future__ import annotations

import os
import stat
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from etude.errors import WorkspaceError

MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 24 << 20
"""Of all files together."""
MAX_FILES = 20_000
_NOT_OURS = frozenset({".git", ".hg", ".svn"})


@dataclass(frozen=True, slots=True)
class Folder:
    """What a folder held when it was read."""

    path: Path
    files: Mapping[str, str]
    """Relative path -> text."""
    skipped: Mapping[str, str]
    """Path -> why it is not among them."""


def read_folder(path: Path) -> Folder:
    """Errors: WorkspaceError if it is no folder, or too large."""
    root = path.expanduser().resolve()
    if not root.is_dir():
        raise WorkspaceError(f"{path} is not a folder")
    files: dict[str, str] = {}
    skipped: dict[str, str] = {}
    total = 0
    for name in _names(root):
        try:
            text, why = _text(root / name)
        except OSError as error:
            text, why = None, error.strerror or "unreadable"
        if text is None:
            skipped[name] = why
            continue
        total += len(text)
        if total > MAX_BYTES or len(files) >= MAX_FILES:
            raise WorkspaceError(
                f"{root} is too large for a sandbox",
                cause=f"more than {MAX_BYTES >> 20} MB or {MAX_FILES:,} files of text",
                hint="name a folder inside it with --repo, or ignore what is not code in .gitignore",
            )
        files[name] = text
    return Folder(root, files, skipped)


def _names(root: Path) -> Iterator[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        done = None
    if done is not None and done.returncode == 0:
        yield from sorted({os.fsdecode(name) for name in done.stdout.split(b"\0") if name})
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield str(Path(folder, name).relative_to(root))


def _text(path: Path) -> tuple[str | None, str]:
    """The file's text, or why there is none."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return None, "a link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
    if status.st_size > MAX_FILE_BYTES:
        return None, f"larger than {MAX_FILE_BYTES >> 20} MB"
    try:
        return path.read_bytes().decode(), ""
    except UnicodeDecodeError:
        return None, "not text"


def apply_changes(folder: Folder, changes: Mapping[str, str | None]) -> list[str]:
    """Write changed files (path -> text, None: delete) into the folder; the paths written.

    Errors: WorkspaceError naming the first file that must not, or cannot, be written; nothing has been written then.
    """
    targets = {path: _target(folder, path) for path in changes}
    staged: list[tuple[Path, Path]] = []
    try:
        for path, text in changes.items():
            if text is not None:
                staged.append((_stage(targets[path], text), targets[path]))
        for temporary, target in staged:
            temporary.replace(target)
    except OSError as error:
        raise WorkspaceError(f"{folder.path} cannot be written", cause=str(error)) from error
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
    for path, text in changes.items():
        if text is None:
            targets[path].unlink(missing_ok=True)
    return list(changes)


def _target(folder: Folder, path: str) -> Path:
    """Where `path` may be written. Errors: WorkspaceError."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise WorkspaceError(f"{path!r} leads out of {folder.path}", hint="nothing was written")
    if _NOT_OURS & {part.lower() for part in pure.parts}:
        raise WorkspaceError(f"{path!r} belongs to version control", hint="nothing was written")
    target = folder.path / path
    below = folder.path
    for part in pure.parts:
        below = below / part
        if below.is_symlink():
            raise WorkspaceError(f"{path!r} leads through a link", hint="nothing was written")
    now = target.read_bytes() if target.is_file() else None
    before = folder.files.get(path)
    if now != (None if before is None else before.encode()):
        raise WorkspaceError(
            f"{path} changed in {folder.path} meanwhile", hint="nothing was written; look at both, and ask again"
        )
    return target


def _stage(target: Path, text: str) -> Path:
    """The text in a file beside its place, with the mode of what is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_bytes(text.encode())
    if target.exists():
        temporary.chmod(stat.S_IMODE(target.stat().st_mode))
    return temporary
