"""When an agent's lines land, and how many stay: against a real repository, and against the slow way."""

import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.code.added import edits_of_patch
from etude.code.blame import Written, remaining, written
from etude.code.diff import unified_diff
from etude.code.history import Repository
from etude.code.same_lines import counts
from etude.code.view import split_lines
from etude.protocols import Message, RepositoryState
from etude.sessions.retention import AFTER_S, Watch, Watched
from etude.sessions.store import DAY_S, SessionStore
from etude.types import ToolCall, ToolErrorKind, ToolResult
from sessions import made
from sessions.git_repository import Git
from sessions.reference_blame import follow

Open = Callable[..., SessionStore]
START = 1_700_000_000.0
OLD = "import os\n\n\ndef first():\n    return None\n"
NEW = "def second(value):\n    doubled = value * 2\n    os.remove('x')\n    return doubled + 1\n"


@pytest.fixture
def git(tmp_path: Path) -> Git:
    made_git = Git(tmp_path / "shop")
    made_git.commit({"app.py": OLD}, at=START)
    return made_git


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def edit(path: str, old: str, new: str) -> ToolCall:
    return ToolCall(name="edit_file", arguments={"path": path, "old": old, "new": new})


def record(store: SessionStore, *calls: ToolCall, at: float, **changes: object) -> str:
    turn = made.turn(reply=made.reply("", *calls), started_at=at, **changes)
    store.record(turn)
    return turn.turn_id


def shares(store: SessionStore, session_id: str = "session-1") -> dict[float | None, float | None]:
    return {event.after_s: event.value for event in store.events("acme", session_id) if event.kind == "retention"}


def watch(store: SessionStore, git: Git, clock: Clock) -> Watch:
    return Watch(store, Repository(git.folder), clock=clock)


def test_shares_after_an_hour_a_day_and_a_week(url: str, open_store: Open, git: Git) -> None:
    clock = Clock()
    store = open_store(url, clock=clock)
    turn_id = record(store, edit("/home/dana/shop/app.py", "", NEW), at=START + 10)
    look = watch(store, git, clock).look
    assert look() == Watched(commits=1, landed=0, measured=0)
    landed = START + 100
    git.commit({"app.py": OLD + "\n\n" + NEW}, at=landed)
    clock.now = landed + 50
    assert look() == Watched(commits=1, landed=1, measured=0)
    git.commit({"app.py": OLD + "\n\n" + NEW.replace("    os.remove('x')\n", "")}, at=landed + 1000)
    git.commit({"app.py": OLD + "\n\n" + NEW.replace("    os.remove('x')\n", "").replace(" + 1", "")}, at=landed + 7200)
    clock.now = landed + 3599
    assert look().measured == 0
    clock.now = landed + 3600
    assert look().measured == 1
    assert shares(store) == {3600.0: 0.75}
    git.commit({"app.py": OLD}, at=landed + 5 * DAY_S)
    clock.now = landed + 8 * DAY_S
    assert look() == Watched(commits=1, landed=0, measured=2)
    assert shares(store) == {3600.0: 0.75, DAY_S: 0.5, 7 * DAY_S: 0.0}
    (event, *_) = store.events("acme", "session-1")
    assert (event.turn_id, event.at) == (turn_id, landed + 3600)
    assert look() == Watched(commits=0, landed=0, measured=0)
    assert watch(open_store(url, clock=clock), git, clock).look() == Watched(commits=0, landed=0, measured=0)


def test_a_watch_that_starts_late_finds_the_same(open_store: Open, git: Git, tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(f"sqlite:///{tmp_path / 's.db'}", clock=clock)
    record(store, edit("app.py", "", NEW), at=START + 10)
    git.commit({"app.py": OLD + "\n\n" + NEW}, at=START + 100)
    git.commit({"app.py": OLD + "\n\n" + NEW.replace("    os.remove('x')\n", "")}, at=START + 2 * DAY_S)
    clock.now = START + 9 * DAY_S
    assert watch(store, git, clock).look() == Watched(commits=3, landed=1, measured=3)
    assert shares(store) == {3600.0: 1.0, DAY_S: 1.0, 7 * DAY_S: 0.75}


def test_edits_that_failed_or_were_taken_back_do_not_count(open_store: Open, git: Git, tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(f"sqlite:///{tmp_path / 's.db'}", clock=clock)
    failed = ToolResult(text="no", error=ToolErrorKind.UNEXPECTED_ENVIRONMENT)
    first = record(
        store, edit("app.py", "", "kept = 1\nreplaced = 2\n"), edit("app.py", "", "never = 3\n"), at=START + 1
    )
    record(
        store, edit("app.py", "replaced = 2", "replaced = 22"), at=START + 2, number=1, opened=None,
        messages=(Message(role="tool", results=(ToolResult(text="ok"), failed)),),
    )  # fmt: skip
    git.commit({"app.py": OLD + "kept = 1\nreplaced = 22\nnever = 3\n"}, at=START + 100)
    clock.now = START + 2 * DAY_S
    look = watch(store, git, clock).look()
    assert (look.landed, look.measured) == (2, 4)
    events = [event for event in store.events("acme", "session-1") if event.turn_id == first]
    assert [event.value for event in events] == [1.0, 1.0]


def test_only_later_commits_of_the_same_repository_are_joined(open_store: Open, git: Git, tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(f"sqlite:///{tmp_path / 's.db'}", clock=clock)
    git.commit({"app.py": OLD + NEW}, at=START + 100)
    record(store, edit("app.py", "", NEW), at=START + 500)
    elsewhere = RepositoryState(root="elsewhere", commit="")
    record(store, edit("app.py", "", "third = 3\n"), at=START + 5, session_id="e", repository=elsewhere)
    git.commit({"app.py": OLD + NEW + "third = 3\n"}, at=START + 600)
    clock.now = START + 700
    assert watch(store, git, clock).look() == Watched(commits=3, landed=0, measured=0)


def test_redacted_lines_are_still_recognised(open_store: Open, git: Git, tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(f"sqlite:///{tmp_path / 's.db'}", clock=clock)
    line = "DATA = '/home/dana/shop/data'  # ask dana@acme.io\n"
    record(store, edit("app.py", "", line), at=START + 5)
    git.commit({"app.py": OLD + line}, at=START + 100)
    clock.now = START + 4000
    assert watch(store, git, clock).look() == Watched(commits=2, landed=1, measured=1)


def test_a_rewritten_history_and_merges_are_taken_as_they_are(open_store: Open, git: Git, tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(f"sqlite:///{tmp_path / 's.db'}", clock=clock)
    record(store, edit("app.py", "", NEW), at=START + 5)
    git.run("switch", "-qc", "side")
    git.commit({"app.py": OLD + "\n\n" + NEW}, at=START + 50)
    git.run("switch", "-q", "main")
    git.commit({"other.py": "x = 1\n"}, at=START + 60)
    clock.now = START + 70
    assert watch(store, git, clock).look().landed == 0, "it is on another branch"
    git.run("merge", "-q", "--no-edit", "side", at=START + 100)
    clock.now = START + 4000
    assert watch(store, git, clock).look() == Watched(commits=1, landed=1, measured=1)
    git.run("commit", "-q", "--amend", "-m", "another", at=START + 200)
    clock.now = START + 2 * DAY_S
    assert watch(store, git, clock).look().measured == 1
    assert shares(store) == {3600.0: 1.0, DAY_S: 1.0}


# The slow way


def made_states(seed: int) -> tuple[list[tuple[float, dict[str, str]]], list[Written]]:
    """A repository's states, where an agent and a person take turns in adding, changing, moving and deleting lines."""
    dice = random.Random(seed)
    files = {f"m{n}.py": [f"old_{n}_{k} = {k}" for k in range(12)] for n in range(3)}
    states, sessions = [(START, {path: "\n".join(lines) + "\n" for path, lines in files.items()})], []
    for step in range(1, 14):
        before = dict(states[-1][1])
        path = dice.choice(sorted(files))
        lines, is_agent = files[path], dice.random() < 0.6
        kind = dice.choice(["add", "add", "change", "delete", "move", "other file"])
        if kind == "add" or len(lines) < 6:
            place = dice.randrange(len(lines) + 1)
            lines[place:place] = [f"line_{step}_{k} = call({dice.randrange(99)})" for k in range(dice.randrange(1, 6))]
        elif kind == "change":
            lines[dice.randrange(len(lines))] = f"changed_{step} = {dice.randrange(99)}"
        elif kind == "delete":
            del lines[dice.randrange(len(lines))]
        else:
            place = dice.randrange(len(lines) - 4)
            block = lines[place : place + 4]
            del lines[place : place + 4]
            target = files[dice.choice(sorted(files))] if kind == "other file" else lines
            place = dice.randrange(len(target) + 1)
            target[place:place] = block
        after = {path: "\n".join(lines) + "\n" for path, lines in files.items()}
        states.append((START + step * 100, after))
        if is_agent and kind in ("add", "change"):
            sessions.append((f"turn-{step}", START + step * 100 - 50, edits_of_patch(unified_diff(before, after))))
    return states, [one for name, at, edits in sessions for one in written([(name, at, edits)]) if one.num_lines]


def compare(
    git: Git, states: list[tuple[float, dict[str, str]]], names: list[str], writers: list[Written]
) -> tuple[int, int, list[str]]:
    """Lines that count at the last commit, how many have the same writer both ways, and those that do not."""
    slow = follow([(at, {path: split_lines(text) for path, text in files.items()}) for at, files in states], writers)[
        -1
    ]
    fast = remaining(Repository(git.folder), names[-1], names[0], writers)
    total, same, different = 0, 0, []
    for path, text in states[-1][1].items():
        ours = {claim.line: claim.writer for claim in fast.get(path, [])}
        for place, line in enumerate(split_lines(text)):
            if counts(line):
                owner = slow[path][place]
                total += 1
                same += (expected := owner[0] if owner else None) == ours.get(place)
                if expected != ours.get(place):
                    different.append(f"{path}:{place + 1}: {ours.get(place)}, slowly {expected}: {line.strip()}")
    return total, same, different


@pytest.mark.slow
def test_blame_agrees_with_the_slow_way_on_made_repositories(tmp_path: Path) -> None:
    total = same = 0
    different: list[str] = []
    for seed in range(6):
        states, writers = made_states(seed)
        git = Git(tmp_path / str(seed))
        names = [git.commit(files, at) for at, files in states]
        counted = compare(git, states, names, writers)
        total, same, different = total + counted[0], same + counted[1], different + counted[2]
    print(f"{same} of {total} lines have the same writer")
    assert same >= 0.99 * total, different[:10]


RELEASES = ("7.0", "7.1.2", "8.0.0", "8.0.1", "8.0.4", "8.1.0", "8.1.3", "8.1.7")


def released(folder: Path) -> list[tuple[float, dict[str, str]]]:
    """The source of consecutive releases of a real package; skips the test where they cannot be had."""
    states = []
    for number, version in enumerate(RELEASES):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check",
                   "--only-binary", ":all:", "-d", str(folder / version), f"click=={version}"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode != 0:
            pytest.skip(f"click {version} cannot be downloaded: {done.stderr.strip()[-200:]}")
        (wheel,) = (folder / version).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}
        states.append((START + number * DAY_S, files))
    return states


@pytest.mark.slow
def test_blame_agrees_with_the_slow_way_on_real_releases(tmp_path: Path) -> None:
    """Every second release is an agent's, the others a person's."""
    states = released(tmp_path / "wheels")
    git = Git(tmp_path / "click")
    names, texts = [], {}
    for at, files in states:
        gone = {path: None for path in texts if path not in files}
        names.append(git.commit({**files, **gone}, at))
        texts = files
    edits = [
        (f"release-{RELEASES[place]}", at - 100, edits_of_patch(unified_diff(states[place - 1][1], files)))
        for place, (at, files) in enumerate(states)
        if place % 2
    ]
    writers = [one for each in edits for one in written([each])]
    began = time.perf_counter()
    total, same, different = compare(git, states, names, writers)
    seconds = time.perf_counter() - began
    began = time.perf_counter()
    fast = remaining(Repository(git.folder), names[-1], names[0], writers)
    fast_s = time.perf_counter() - began
    claimed = sum(map(len, fast.values()))
    print(f"{same} of {total} lines ({100 * same / total:.2f}%) have the same writer, {claimed} an agent's; blame took "
          f"{fast_s:.1f} s, both {seconds:.1f} s")  # fmt: skip
    print("\n".join(different[:40]))
    assert claimed > 500
    assert same >= 0.95 * total


def test_the_times_are_an_hour_a_day_and_a_week() -> None:
    assert AFTER_S == (3600.0, 86400.0, 604800.0)
