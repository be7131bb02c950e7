import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.code.diff import unified_diff


def applied(before: dict[str, str], patch: str, folder: Path) -> dict[str, str]:
    """What git makes of the patch."""
    for path, text in before.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    subprocess.run(["git", "apply", "-"], input=patch.encode(), cwd=folder, check=True, capture_output=True)
    return {str(p.relative_to(folder)): p.read_bytes().decode() for p in folder.rglob("*") if p.is_file()}


def test_equal_workspaces_have_no_diff() -> None:
    assert unified_diff({"a.py": "x\n"}, {"a.py": "x\n"}) == ""


def test_a_changed_line_reads_as_in_git() -> None:
    assert unified_diff({"a.py": "x\ny\n"}, {"a.py": "x\nz\n"}) == (
        "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": "x\n", "b": "y\n"}, {"a": "x\n", "sub/c": "new\n"}),
        ({"a": "x"}, {"a": "x\n"}),
        ({"a": "x\r\ny\fz\n"}, {"a": "x\r\ny\fzz\n"}),
        ({"a": "x\n"}, {"a": "x\n", "empty": ""}),
        ({"a": "x\n", "empty": ""}, {"a": "x\n"}),
        ({"with space.py": "x\n"}, {"with space.py": "y\n"}),
        ({"a": "1\n"}, {"a": "1\n", 'q"\t\\é\nfile': "x\n"}),
    ],
)
def test_git_applies_what_is_written(before: dict[str, str], after: dict[str, str], tmp_path: Path) -> None:
    assert applied(before, unified_diff(before, after), tmp_path) == after


TEXTS = st.text("ab\n", max_size=30)


@settings(max_examples=15, deadline=None)
@given(TEXTS, TEXTS)
def test_git_applies_any_change_of_a_file(tmp_path_factory: pytest.TempPathFactory, old: str, new: str) -> None:
    if old == new:
        return
    folder = tmp_path_factory.mktemp("tree")
    assert applied({"f": old}, unified_diff({"f": old}, {"f": new}), folder) == {"f": new}


def test_a_hostile_name_cannot_forge_lines() -> None:
    patch = unified_diff({}, {"a\n+++ b/evil": "x\n", "b\udcff": "y\n"})
    assert "\n+++ b/evil" not in patch
    patch.encode()
