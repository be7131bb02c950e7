"""A person's folder: what is read of it, and what is never written into it."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from etude.code.folder import MAX_FILE_BYTES, apply_changes, read_folder
from etude.errors import WorkspaceError


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    (root / "src").mkdir(parents=True)
    (root / "a.py").write_text("x = 1\n")
    (root / "src" / "b.py").write_text("y = 2\n")
    return root


def test_without_git_all_text_that_is_not_hidden_is_read_and_the_rest_is_named(repo: Path) -> None:
    (repo / ".secret").write_text("no")
    (repo / "image").write_bytes(b"\xff\x00")
    (repo / "large").write_bytes(b"a" * (MAX_FILE_BYTES + 1))
    (repo / "link").symlink_to("/etc/passwd")
    folder = read_folder(repo)
    assert folder.files == {"a.py": "x = 1\n", "src/b.py": "y = 2\n"}
    assert folder.skipped == {"image": "not text", "large": "larger than 1 MB", "link": "a link"}


def test_with_git_what_is_ignored_stays_away(repo: Path) -> None:
    subprocess.run(["git", "init", "-q", repo], check=True)
    (repo / ".gitignore").write_text("*.log\n")
    (repo / "run.log").write_text("noise")
    assert set(read_folder(repo).files) == {".gitignore", "a.py", "src/b.py"}


def test_changes_are_written_with_their_modes_and_files_made_and_deleted(repo: Path) -> None:
    (repo / "a.py").chmod(0o750)
    folder = read_folder(repo)
    written = apply_changes(folder, {"a.py": "x = 9\n", "new/deep/c.py": "z\n", "src/b.py": None})
    assert sorted(written) == ["a.py", "new/deep/c.py", "src/b.py"]
    assert (repo / "a.py").read_text() == "x = 9\n"
    assert stat.S_IMODE((repo / "a.py").stat().st_mode) == 0o750
    assert (repo / "new/deep/c.py").read_text() == "z\n"
    assert not (repo / "src/b.py").exists()
    assert not list(repo.rglob(".*.????????"))


@pytest.mark.parametrize(
    ("path", "why"),
    [("../out.py", "leads out"), ("/etc/x", "leads out"), (".git/hooks/pre-commit", "version control"),
     ("src/.GIT/config", "version control"), ("door/x.py", "through a link"), ("door", "through a link"),
     ("a\0b", "leads out")],
)  # fmt: skip
def test_what_leads_elsewhere_is_refused_and_nothing_is_written(
    path: str, why: str, repo: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (repo / "door").symlink_to(tmp_path / "outside")
    folder = read_folder(repo)
    with pytest.raises(WorkspaceError, match=why):
        apply_changes(folder, {"a.py": "changed\n", path: "evil\n"})
    assert (repo / "a.py").read_text() == "x = 1\n"
    assert os.listdir(tmp_path / "outside") == []


@pytest.mark.parametrize("path", ["a.py", "made.py"])
def test_a_file_that_changed_meanwhile_is_not_overwritten(path: str, repo: Path) -> None:
    folder = read_folder(repo)
    (repo / path).write_text("by hand\n")
    with pytest.raises(WorkspaceError, match="meanwhile"):
        apply_changes(folder, {"src/b.py": "y = 3\n", path: "by machine\n"})
    assert (repo / path).read_text() == "by hand\n"
    assert (repo / "src/b.py").read_text() == "y = 2\n"


def test_a_folder_that_cannot_be_written_is_an_error_and_stays_as_it_was(repo: Path) -> None:
    folder = read_folder(repo)
    (repo / "src" / "taken").write_text("a file")
    with pytest.raises(WorkspaceError, match="cannot be written"):
        apply_changes(folder, {"a.py": "x = 2\n", "src/taken/c.py": "z\n"})
    assert (repo / "a.py").read_text() == "x = 1\n"


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="not a folder"):
        read_folder(tmp_path / "nothing")
