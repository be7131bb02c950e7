from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox import tree
from etude.sandbox.recipe import SandboxRecipe


def bound_from(argv: list[str]) -> list[str]:
    """Host paths that the arguments make visible."""
    flags = ("--ro-bind", "--ro-bind-try", "--dev-bind", "--bind")
    return [argv[i + 1] for i, word in enumerate(argv) if word in flags]


def test_only_the_system_the_python_and_a_few_files_of_etc_are_bound_read_only() -> None:
    files: list[int] = []
    argv = tree.command(tree.Python(executable="/opt/py/bin/python3", prefix="/opt/py", why=""), files)
    for handle in files:
        os.close(handle)
    bound = bound_from(argv)
    allowed = {"/usr", "/opt/py", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}
    rest = [path for path in bound if path not in allowed and not path.startswith(("/dev/", "/etc/"))]
    assert rest == []
    etc = {path for path in bound if path.startswith("/etc/") and not path.startswith("/etc/python3")}
    assert etc == {"/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"}
    assert "--bind" not in argv
    assert argv.index("--remount-ro") > argv.index("/opt/py")
    assert argv[argv.index("PATH") + 1].startswith("/opt/py/bin:")


def test_the_asked_python_is_used_or_refused_by_name(tmp_path: Path) -> None:
    system = next(path for path in tree.SYSTEM_PYTHONS if Path(path).exists())
    chosen = tree.choose_python(SandboxRecipe(python=system))
    assert (chosen.executable, chosen.prefix) == (os.path.realpath(system), "")
    with pytest.raises(SandboxError, match="/no/such/python") as caught:
        tree.choose_python(SandboxRecipe(python="/no/such/python"))
    assert caught.value.hint


def test_a_python_in_a_closed_folder_is_not_chosen_for_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "private" / "bin"
    closed.mkdir(parents=True)
    own = closed / "python3"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    (tmp_path / "private").chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "_base_executable", str(own))
    chosen = tree.choose_python(SandboxRecipe())
    assert chosen.executable.startswith("/usr")
    assert str(own) in chosen.why


def test_a_prefix_that_would_show_a_home_is_not_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "_PRIVATE", ())
    (tmp_path / "bin").mkdir()
    own = tmp_path / "bin" / "python3"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "_base_executable", str(own))
    monkeypatch.setenv("HOME", "/elsewhere")
    assert tree.choose_python(SandboxRecipe()).prefix == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tree.choose_python(SandboxRecipe()).prefix == ""


def test_a_prefix_that_a_sandbox_covers_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    own = tmp_path / "bin" / "python3"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "_base_executable", str(own))
    monkeypatch.setattr(tree, "_PRIVATE", (str(tmp_path.parent),))
    assert tree.choose_python(SandboxRecipe()).executable.startswith("/usr")
