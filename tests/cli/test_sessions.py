"""The commands about sessions, as a person and as a script call them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from etude.cli.main import app
from etude.errors import EtudeError, SessionError
from etude.sessions.store import SessionStore
from sessions import made
from sessions.git_repository import Git
from sessions.logs import FILES
from sessions.planted import planted


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ETUDE_SESSIONS_DB", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    return f"sqlite:///{tmp_path / 'state' / 'etude' / 'sessions' / 'sessions.db'}"


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "logs"


def etude(*arguments: object, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["sessions", *map(str, arguments)], input=typed)


def rows(*arguments: object) -> list[dict[str, object]]:
    result = etude(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_logs_are_imported_listed_and_imported_once(db: str, logs: Path) -> None:
    result = etude("import", logs, "--consent", "train", "--user", "dana")
    assert result.exit_code == 0, result.output
    assert "10 logs, 10 sessions: 31 new turns, 0 known" in result.stdout
    assert "skipped: " in result.stdout
    assert "taken out: " in result.stdout
    again = json.loads(etude("import", logs, "--consent", "train", "--user", "dana", "--json").stdout)
    assert (again["turns"], again["known"]) == (0, 31)
    listed = rows("list")
    assert len(listed) == 10
    assert {row["source"] for row in listed} == {"claude-code", "codex", "opencode", "mini-swe-agent"}
    assert rows("list", "--user", "bob") == []
    assert "dana" in etude("list").stdout
    store = SessionStore(db)
    assert not any("/home/dana" in str(stored.turn) for stored in store.turns())
    store.close()


def test_nothing_is_imported_without_consent_or_from_nowhere(db: str, logs: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("import", logs), "sessions need consent"),
        (("import", logs, "--consent", "none"), "sessions need consent"),
        (("import", tmp_path / "nowhere", "--consent", "keep"), "there is no "),
        (("import", logs, "--consent", "keep", "--format", "claude"), "unknown format"),
    ):
        result = etude(*arguments)
        assert isinstance(result.exception, SessionError), result.output
        assert message in str(result.exception)
        assert result.exception.exit_code == 2
    assert rows("list") == []
    broken = tmp_path / "x.traj.json"
    broken.write_text("{")
    result = etude("import", broken, "--consent", "keep")
    assert result.exit_code == 1
    result = etude("list", "--db", "mysql://x")
    assert isinstance(result.exception, EtudeError)


def test_a_person_sees_what_was_taken_out_and_drops_what_should_go(db: str) -> None:
    store = SessionStore(db)
    text, secret = next(planted("github", 1))
    store.record(made.turn(text, number=0))
    store.record(made.turn("a second turn", number=1))
    store.record(made.turn("another session", session_id="two"))
    result = etude("review", typed="\nnonsense\nt 7\nt 1\nq\n")
    assert result.exit_code == 0, result.output
    assert "session 2 of 2: session-1" in result.stdout
    assert "1 <secret:github>" in result.stdout
    assert secret not in result.stdout
    assert result.stdout.count("there is no such answer or turn") == 2
    assert [stored.turn.number for stored in store.turns("acme", "session-1")] == [0]
    listed = rows("review")
    assert [row["redacted"] for row in listed] == [{}, {"<secret:github>": 1}]
    etude("review", typed="d\nd\n")
    assert rows("review") == []
    store.close()


def test_forgetting_asks_and_names_the_versions(db: str) -> None:
    store = SessionStore(db)
    turn = made.turn()
    store.record(turn)
    store.mark_trained([turn.turn_id], made.version(7))
    refused = etude("forget", "ann", "--tenant", "acme", typed="no\n")
    assert isinstance(refused.exception, SessionError)
    assert len(store.sessions()) == 1
    result = etude("forget", "ann", "--tenant", "acme", typed="ann\n")
    assert "1 turns deleted; versions that were trained on them: 1.7" in result.stdout
    assert store.sessions() == []
    assert json.loads(etude("forget", "ann", "--tenant", "acme", "--yes", "--json").stdout)["trained"] == []
    store.close()


def test_watching_once_joins_commits(db: str, tmp_path: Path) -> None:
    git, now = Git(tmp_path / "shop"), time.time()
    git.commit({"app.py": "a = 1\n"}, at=now - 9000)
    store = SessionStore(db)
    call = made.ToolCall(name="edit_file", arguments={"path": "app.py", "old": "", "new": "brand_new = 2\n"})
    store.record(made.turn(reply=made.reply("", call), started_at=now - 8000))
    git.commit({"app.py": "a = 1\nbrand_new = 2\n"}, at=now - 7000)
    result = etude("watch", "--repo", git.folder, "--once")
    assert "shop:main: 2 new commits, 1 turns landed, 1 shares measured" in result.stdout
    assert [event.kind for event in store.events("acme", "session-1")] == ["retention"]
    store.close()
    result = etude("watch", "--repo", tmp_path, "--once")
    assert isinstance(result.exception, EtudeError)
    assert "is it a git repository" in str(result.exception)


@pytest.mark.slow
def test_ctrl_c_ends_a_watch_cleanly(db: str, tmp_path: Path) -> None:
    git = Git(tmp_path / "shop")
    git.commit({"app.py": "a = 1\n"}, at=time.time())
    command = [
        sys.executable,
        "-m",
        "etude.cli.main",
        "sessions",
        "watch",
        "--repo",
        str(git.folder),
        "--interval",
        "0.2",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert b"1 new commits" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert errors == b""
