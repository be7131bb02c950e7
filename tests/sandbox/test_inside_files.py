"""The file part of what runs inside, on a folder of this machine: it is standard library only and runs anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.sandbox.inside_files import Workspace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.mark.parametrize("path", ["link", "folder/outside", "../outside", "a/../../outside", "/etc/passwd", "loop"])
def test_nothing_outside_is_read_or_changed(root: Path, path: str) -> None:
    (root / "link").symlink_to("../outside")
    (root / "folder").symlink_to("..")
    (root / "loop").symlink_to("loop")
    files = Workspace(str(root), 1 << 20)
    with pytest.raises((PermissionError, FileNotFoundError)):
        files.read(path)
    with pytest.raises(PermissionError):
        files.write(path, b"changed")
    assert (root.parent / "outside").read_text() == "secret"


def test_a_dangling_link_in_place_of_a_folder_is_refused(root: Path) -> None:
    (root / "d").symlink_to("../new")
    (root / "e").symlink_to("nowhere")
    files = Workspace(str(root), 1 << 20)
    for path in ("d/x", "e/x"):
        with pytest.raises(PermissionError):
            files.write(path, b"x")
    assert sorted(path.name for path in root.parent.iterdir()) == ["outside", "work"]


def test_writing_keeps_the_permissions_and_leaves_no_half_file(root: Path) -> None:
    script = root / "run.sh"
    script.write_text("old")
    script.chmod(0o750)
    files = Workspace(str(root), 1 << 20)
    files.write("run.sh", b"new")
    assert (script.read_text(), script.stat().st_mode & 0o777) == ("new", 0o750)
    (root / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write("taken", b"x")
    assert sorted(os.listdir(root)) == ["run.sh", "taken"]


def test_a_file_larger_than_the_limit_is_refused(root: Path) -> None:
    (root / "big").write_bytes(bytes(2000))
    with pytest.raises(OSError, match="larger than 1000 bytes"):
        Workspace(str(root), 1000).read("big")


def test_a_path_with_thousands_of_folders_is_an_error_not_a_crash(root: Path) -> None:
    files = Workspace(str(root), 1 << 20)
    with pytest.raises(OSError, match="too long"):
        files.write("d/" * 3000 + "x", b"")
    files.write("d/" * 300 + "x", b"deep")
    assert files.files() == ["d/" * 300 + "x"]


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=50), max_size=6))
def test_what_is_saved_is_restored(tmp_path_factory: pytest.TempPathFactory, contents: dict[str, bytes]) -> None:
    first, second = (tmp_path_factory.mktemp("w") for _ in range(2))
    files, copy = Workspace(str(first), 1 << 20), Workspace(str(second), 1 << 20)
    written: dict[str, bytes] = {}
    for path, data in contents.items():
        try:
            files.write(path, data)
        except OSError:  # one path is a folder of another
            continue
        written[path] = data
    entries = files.save()
    copy.restore(entries, memoryview(b"".join(files.contents(entries))))
    assert {path: copy.read(path) for path in copy.files()} == written
    assert copy.save() == entries
    files.close()
    copy.close()


def test_a_file_that_changes_while_it_is_saved_does_not_move_the_next_one(tmp_path: Path) -> None:
    files = Workspace(str(tmp_path), 1 << 20)
    for name in "abcd":
        files.write(name, name.encode() * 4)
    entries = files.save()
    (tmp_path / "a").write_bytes(b"longer than it was")
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "c").unlink()
    assert list(files.contents(entries)) == [b"long", b"b\0\0\0", b"\0\0\0\0", b"dddd"]
