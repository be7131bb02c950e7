"""An agent's lines are found in real repositories, however they were moved and formatted."""

from pathlib import Path

import pytest

from etude.code.added import Edit, edits_of_call, edits_of_text
from etude.code.blame import Written, remaining, same_file, without_old, written
from etude.code.history import Repository
from etude.code.same_lines import match
from etude.errors import WorkspaceError
from etude.types import ToolCall
from sessions.git_repository import Git
from sessions.logs import PATCH

FUNCTION = (
    "def total_price(items, rate):",
    "    subtotal = sum(item.price * item.count for item in items)",
    "    return round(subtotal * (1 + rate), 2)",
)
OLD = "import os\n\n\ndef first():\n    return None\n"


def call(name: str, **arguments: object) -> list[Edit]:
    return edits_of_call(ToolCall(name=name, arguments=arguments))


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (call("edit_file", path="a.py", old="x = 1\ny", new="x = 2\ny"), [Edit("a.py", ("x = 2",), ("x = 1",))]),
        (call("edit_file", path="a.py", old="", new="a\nb\n"), [Edit("a.py", ("a", "b"))]),
        (call("edit_file", path="a.py", edits=[{"old": "a", "new": "b"}, {"old": "c", "new": "c\nd"}]),
         [Edit("a.py", ("b",), ("a",)), Edit("a.py", ("d",))]),
        (call("Edit", file_path="/h/a.py", old_string="a", new_string="b"), [Edit("/h/a.py", ("b",), ("a",))]),
        (call("MultiEdit", file_path="a.py", edits=[{"old_string": "a", "new_string": "b"}]),
         [Edit("a.py", ("b",), ("a",))]),
        (call("Write", file_path="a.py", content="a\nb\n"), [Edit("a.py", ("a", "b"), is_whole=True)]),
        (call("edit", filePath="a.py", oldString="a", newString="b"), [Edit("a.py", ("b",), ("a",))]),
        (call("apply_patch", input=PATCH), [Edit("src/app.py", ("    return 2",), ("    return 1",))]),
        (call("apply_patch", patch="--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"),
         [Edit("x.py", ("c",), ("b",))]),
        (call("shell", command=["bash", "-lc", f"apply_patch <<'EOF'\n{PATCH}\nEOF\n"]),
         [Edit("src/app.py", ("    return 2",), ("    return 1",))]),
        (call("bash", command="cat <<'EOF' > new.py\nx = 1\nEOF\npython new.py"),
         [Edit("new.py", ("x = 1",), is_whole=True)]),
        (call("bash", command="cat > a/b.txt << END\none\ntwo\nEND"), [Edit("a/b.txt", ("one", "two"), is_whole=True)]),
        (call("bash", command="cat >> log.txt <<EOF\none\nEOF"), [Edit("log.txt", ("one",))]),
        (call("Read", file_path="a.py"), []),
        (call("bash", command="pytest -q"), []),
        (call("TodoWrite", todos=[{"content": "x"}]), []),
        (edits_of_text("*** Begin Patch\nnonsense"), []),
        (edits_of_call(ToolCall(name="Edit", arguments={"file_path": "a", "new_string": "b"}, error="broken")), []),
    ],
)  # fmt: skip
def test_edits_are_read_from_calls_of_many_agents(edits: list[Edit], expected: list[Edit]) -> None:
    assert edits == expected


@pytest.mark.parametrize(
    ("agent", "lines", "expected"),
    [
        (["a = 1", "b = 2"], ["a = 1", "x()", "b = 2"], [0, None, 1]),
        (["x = 'a'"], ['    x   =  "a"'], [0]),
        (["x = f(a, b)"], ["y = 1", "x = f(", "    a,", "    b,", ")"], [None, 0, 0, 0, None]),
        (["x = f(", "    a,", "    b,", ")"], ["x = f(a, b)"], [0]),
        (["first_value = 1", "second_value = 2"], ["second_value = 2", "first_value = 1"], [1, 0]),
        (["x()", "try:"], ["try:", "x()"], [None, 0]),
        (["return x"], ["return x", "return x"], [0, None]),
        (["", ")", "x"], ["", ")", "x"], [None, None, 2]),
        (["value = compute(one, two)"], ["value = compute(one, three)"], [None]),
        ([], ["a"], [None]),
    ],
)
def test_lines_are_recognised_after_formatting(agent: list[str], lines: list[str], expected: list[int | None]) -> None:
    found = match(agent, lines)
    if expected == [1, 0]:
        assert sorted(place for place in found if place is not None) == [0, 1]
    else:
        assert found == expected


def test_what_a_session_takes_back_is_nobody_s() -> None:
    first = ("t1", 1.0, [Edit("a.py", ("x = 1", "y = 2", ""))])
    second = ("t2", 2.0, [Edit("a.py", ("x = 3",), ("x = 1",))])
    rewritten = ("t3", 3.0, [Edit("b.py", ("z = 1",)), Edit("b.py", ("z = 2", "w = 1"), is_whole=True)])
    found = {one.writer: one.files for one in written([first, second, rewritten])}
    assert found == {"t1": {"a.py": ("y = 2",)}, "t2": {"a.py": ("x = 3",)}, "t3": {"b.py": ("z = 2", "w = 1")}}


def test_paths_of_other_machines_name_the_file() -> None:
    assert same_file("/home/dana/shop/src/app.py", "src/app.py")
    assert same_file("app.py", "src/app.py")
    assert same_file("~\\shop\\src\\app.py", "src/app.py")
    assert not same_file("src/map.py", "app.py")
    assert not same_file("src/app.py", "src/other.py")


@pytest.fixture
def git(tmp_path: Path) -> Git:
    made = Git(tmp_path / "shop")
    made.commit({"shop.py": OLD, "other.py": "\n".join(FUNCTION) + "\n"}, at=100)
    return made


def lines_of(git: Git, commit: str, since: str, *writers: Written) -> dict[str, list[tuple[str, int]]]:
    found = remaining(Repository(git.folder), commit, since, writers)
    return {path: [(claim.writer, claim.line) for claim in claimed] for path, claimed in found.items()}


AGENT = Written("turn", 150.0, {"/home/dana/shop/shop.py": FUNCTION})


def test_a_commit_s_lines_are_told_from_those_that_were_there(git: Git) -> None:
    since = git.run("rev-parse", "HEAD")
    human = "def by_hand():\n    return None\n"
    commit = git.commit({"shop.py": OLD + "\n\n" + "\n".join(FUNCTION) + "\n\n\n" + human}, at=200)
    assert lines_of(git, commit, since, AGENT) == {"shop.py": [("turn", 7), ("turn", 8), ("turn", 9)]}
    repeated = Written("turn", 150.0, {"shop.py": ("    return None",)})
    assert lines_of(git, commit, since, repeated) == {"shop.py": [("turn", 13)]}, "not the one of the first commit"


def test_moved_renamed_and_reformatted_lines_are_followed(git: Git) -> None:
    since = git.run("rev-parse", "HEAD")
    git.commit({"shop.py": OLD + "\n\n" + "\n".join(FUNCTION) + "\n"}, at=200)
    moved = git.commit({"shop.py": "\n".join(FUNCTION) + "\n\n\n" + OLD}, at=300)
    assert len(lines_of(git, moved, since, AGENT)["shop.py"]) == 3
    git.run("mv", "shop.py", "renamed.py")
    renamed = git.commit({}, at=400)
    assert len(lines_of(git, renamed, since, AGENT)["renamed.py"]) == 3
    wrapped = (
        "def total_price(\n    items,\n    rate,\n):\n    subtotal = sum(\n"
        "        item.price * item.count for item in items\n"
        "    )\n    return round(subtotal * (1 + rate), 2)\n"
    )
    formatted = git.commit({"renamed.py": wrapped + "\n\n" + OLD}, at=500)
    claimed = remaining(Repository(git.folder), formatted, since, [AGENT])["renamed.py"]
    assert {claim.source[1] for claim in claimed} == {0, 1, 2}
    gone = git.commit({"renamed.py": OLD}, at=600)
    assert lines_of(git, gone, since, AGENT) == {}


def test_lines_that_moved_to_another_file_are_followed(git: Git) -> None:
    since = git.run("rev-parse", "HEAD")
    git.commit({"shop.py": OLD + "\n\n" + "\n".join(FUNCTION) + "\n"}, at=200)
    commit = git.commit({"shop.py": OLD, "prices.py": "\n".join(FUNCTION) + "\n"}, at=300)
    assert lines_of(git, commit, since, AGENT) == {"prices.py": [("turn", 0), ("turn", 1), ("turn", 2)]}


def test_the_last_writer_of_a_line_has_it(git: Git) -> None:
    since = git.run("rev-parse", "HEAD")
    commit = git.commit({"shop.py": OLD + "\n".join(FUNCTION) + "\n"}, at=200)
    second = Written("later", 160.0, {"shop.py": FUNCTION[:1]})
    assert [writer for writer, _ in lines_of(git, commit, since, AGENT, second)["shop.py"]] == ["later", "turn", "turn"]


def test_a_file_written_whole_adds_what_it_did_not_have(git: Git) -> None:
    whole = Written("turn", 150.0, {"~/shop/shop.py": ("import os", "def first():", "    return 1")},
                    frozenset(["~/shop/shop.py"]))  # fmt: skip
    head = git.run("rev-parse", "HEAD")
    assert without_old(Repository(git.folder), head, whole).files == {"~/shop/shop.py": ("    return 1",)}
    assert without_old(Repository(git.folder), None, whole).num_lines == 3


def test_what_is_no_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="is it a git repository"):
        Repository(tmp_path)


def test_a_repository_s_settings_run_nothing(git: Git, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    script = tmp_path / "evil"
    script.write_text(f"#!/bin/sh\ntouch {mark}\n")
    script.chmod(0o755)
    (git.folder / ".gitattributes").write_text("*.py diff=evil filter=evil\n")
    since = git.run("rev-parse", "HEAD")
    commit = git.commit({"shop.py": OLD + "\n".join(FUNCTION) + "\n"}, at=200)
    for key in ("diff.external", "diff.evil.command", "diff.evil.textconv", "core.fsmonitor", "core.pager"):
        git.run("config", key, str(script))
    assert lines_of(git, commit, since, AGENT)
    assert not mark.exists()
