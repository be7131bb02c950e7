"""`etude agent` as a person uses it: a process of its own, a scripted endpoint, a folder, and Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agent.chat_server import Entry, Server, calls, chat_server, says
from etude.frames import read_file
from etude.types import Episode

EDIT = ("edit_file", {"path": "a.py", "old": "1", "new": "2"})


@contextlib.contextmanager
def endpoint(script: Sequence[Entry]) -> Iterator[Server]:
    """A chat server in a thread."""
    started, stop = threading.Event(), threading.Event()
    box: list[Server] = []

    async def serve() -> None:
        async with chat_server(script) as server:
            box.append(server)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(10)
    try:
        yield box[0]
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    (root / "a.py").write_text("x = 1\n")
    return root


def start(server: Server, repo: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "etude.cli.main", "agent", *words]
    command += ["--repo", str(repo), "--url", server.url, "--model", "m"]
    environment = dict(os.environ) | {"COLUMNS": "100", "TERM": "dumb", "XDG_STATE_HOME": str(repo.parent / "state")}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def run(server: Server, repo: Path, *words: str, typed: str = "") -> tuple[int, str, str]:
    process = start(server, repo, *words)
    out, err = process.communicate(typed, timeout=60)
    return process.returncode, out, err


def test_changes_are_shown_asked_about_and_written(repo: Path) -> None:
    with endpoint(
        [calls(EDIT, ("shell", {"command": "python3 a.py && echo fine"}), text="Let me."), says("Done.")]
    ) as server:
        code, out, err = run(server, repo, "make it two", typed="\nyes\n")
    assert code == 0, err
    assert (repo / "a.py").read_text() == "x = 2\n"
    for words in (
        "Let me.",
        "> edit_file a.py",
        "-x = 1",
        "+x = 2",
        "fine",
        "Done.",
        "write 1 file into",
        "written: a.py",
    ):
        assert words in out
    asked = server.requests[0]["messages"]
    assert asked[1]["content"] == "make it two\n\nFiles:\na.py"
    assert {tool["function"]["name"] for tool in server.requests[0]["tools"]} >= {"shell", "apply_patch", "grep"}
    (kept,) = (repo.parent / "state/etude/agent").glob("*/*/episode.mp")
    episode = read_file(kept, Episode)
    assert (len(episode.turns), episode.contexts) == (2, ())
    assert "+x = 2" in episode.patch


PRICES = "[m]\ninput = 3.0\ncached = 0.3\noutput = 15.0\n"
"""A request of chat_server's usage costs (60 * 3 + 40 * .3 + 10 * 15) / 1e6 = $.000342."""


def test_what_an_endpoint_took_is_told_and_a_budget_ends_the_conversation(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(PRICES)
    words = ["make it two", "--prices", str(tmp_path / "prices.toml"), "--yes"]
    with endpoint([calls(EDIT), says("Done."), says("Never asked.")]) as server:
        code, out, err = run(server, repo, *words, "--budget", "0.0005", typed="more\n")
    assert code == 0, err
    assert "2 requests, 200 tokens in (80 of them cached), 20 out, $0.0007" in out
    assert "the budget of $0.0005 is spent" in out
    assert len(server.requests) == 2
    with endpoint([calls(EDIT), says("Never asked.")]) as server:
        _, out, _ = run(server, repo, *words, "--budget", "0.0003")
    assert "1 requests" in out
    assert len(server.requests) == 1


def test_tools_of_an_mcp_server_are_offered_and_called(repo: Path) -> None:
    server_script = Path(__file__).parents[1] / "agent" / "mcp_server.py"
    command = json.dumps(["python3", "-c", server_script.read_text()])
    with endpoint([calls(("mcp__plain__add", {"a": 20, "b": 22})), says("It is 42.")]) as server:
        code, out, err = run(server, repo, "add", "--once", "-o", f"mcp.plain.command={command}")
    assert code == 0, err
    assert "mcp__plain__add" in {tool["function"]["name"] for tool in server.requests[0]["tools"]}
    assert server.requests[1]["messages"][-1]["content"] == "42"
    assert "> mcp__plain__add" in out


def test_no_leaves_the_folder_alone_and_resume_goes_on_where_it_was(repo: Path) -> None:
    with endpoint([calls(EDIT), says("Done.")]) as server:
        code, out, _ = run(server, repo, "make it two", typed="\nno\n")
    assert (code, (repo / "a.py").read_text()) == (0, "x = 1\n")
    assert "nothing was written" in out
    with endpoint([calls(("read_file", {"path": "a.py"})), says("It is two.")]) as server:
        code, out, err = run(server, repo, "what is it now?", "--resume", "--once", typed="y\n")
    assert code == 0, err
    roles = [message["role"] for message in server.requests[0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert server.requests[1]["messages"][-1]["content"] == "1\tx = 2\n"
    assert (repo / "a.py").read_text() == "x = 2\n"


def test_resume_knows_what_was_deleted(repo: Path) -> None:
    with endpoint([calls(("shell", {"command": "rm a.py"})), says("Done.")]) as server:
        run(server, repo, "delete it", "--once", typed="no\n")
    assert (repo / "a.py").exists()
    with endpoint([says("As before.")]) as server:
        code, _, err = run(server, repo, "well?", "--resume", "--once", "--yes")
    assert code == 0, err
    assert not (repo / "a.py").exists()


def test_nothing_that_a_model_or_a_file_holds_steers_the_terminal(repo: Path) -> None:
    hidden = "x = 1\x1b[8m; evil()\x1b[0m \u202e\r\n"
    edit = ("edit_file", {"path": "new.py", "old": "", "new": hidden})
    with endpoint([calls(edit, ("\x1b]52;c;x\x07[bold]", {})), says("Done.\x1b[2J")]) as server:
        _, out, _ = run(server, repo, "go", "--once", typed="no\n")
    assert not set("\x1b\x07\u202e") & set(out)
    assert "evil()" in out
    assert "\\x1b[2J" in out
    assert "[bold]" in out


def test_ctrl_c_stops_the_reply_and_what_is_said_instead_goes_on(repo: Path) -> None:
    with endpoint([says("never seen", wait_s=30), says("As you like.")]) as server:
        process = start(server, repo, "think for long")
        deadline = time.monotonic() + 30
        while not server.requests and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("do it otherwise\n\n", timeout=60)
    assert process.returncode == 0, err
    assert "stopped. what instead?" in out
    assert "As you like." in out
    assert [message["content"] for message in server.requests[1]["messages"][2:]] == ["do it otherwise"]


def test_ctrl_c_at_a_question_ends_the_program_and_the_conversation_is_kept(repo: Path) -> None:
    with endpoint([calls(EDIT), says("Done.")]) as server:
        process = start(server, repo, "make it two")
        deadline = time.monotonic() + 30
        while not list((repo.parent / "state").glob("**/episode.mp")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        _, err = process.communicate()
    assert "Traceback" not in err
    assert (repo / "a.py").read_text() == "x = 1\n"
    with endpoint([says("As before.")]) as server:
        code, _, _ = run(server, repo, "well?", "--resume", "--once", "--yes")
    assert code == 0
    assert (repo / "a.py").read_text() == "x = 2\n"


def test_a_file_that_changed_meanwhile_and_git_hooks_are_not_written(repo: Path) -> None:
    hook = ("shell", {"command": "mkdir -p .git/hooks && echo evil > .git/hooks/pre-commit"})
    with endpoint([calls(hook), says("Done.")]) as server:
        code, _, err = run(server, repo, "be evil", "--yes", "--once")
    assert (code, (repo / ".git").exists()) == (1, False)
    assert "belongs to version control" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "named"),
    [(["x", "--repo", "/nowhere"], "not a folder"), (["x", "--url", "http://127.0.0.1:9/v1"], "--model"),
     (["x", "--resume"], "no conversation"), (["x", "-o", "tols=[]"], "tools"),
     (["x", "--model", "/nowhere"], "/nowhere"), (["x", "--budget", "1"], "--url"),
     (["x", "--url", "http://127.0.0.1:9/v1", "--model", "m", "--budget", "1"], "--prices"),
     (["x", "--url", "http://127.0.0.1:9/v1", "--model", "m", "--prices", "/nowhere"], "cannot read the prices"),
     (["x", "--url", "http://127.0.0.1:9/v1", "--model", "m", "--prices", "a.py"], "no price of 'm'")],
)  # fmt: skip
def test_what_is_wrong_is_named(words: list[str], named: str, repo: Path) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "agent", *words]
    environment = dict(os.environ) | {"XDG_STATE_HOME": str(repo.parent / "state"), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=repo, env=environment, check=False)
    assert done.returncode in (1, 2)
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_shipped_model_works_on_a_folder_too(repo: Path) -> None:
    dials = ('tools=["read_file", "edit_file", "finish"]', "context_tokens=1024", "reply_tokens=96")
    command = [sys.executable, "-m", "etude.cli.main", "agent", "Repair x.", "--repo", str(repo), "--once"]
    command += [word for dial in dials for word in ("-o", dial)]
    environment = dict(os.environ) | {"XDG_STATE_HOME": str(repo.parent / "state"), "COLUMNS": "100"}
    done = subprocess.run(
        command, input="no\n", capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    (kept,) = (repo.parent / "state/etude/agent").glob("*/*/episode.mp")
    episode = read_file(kept, Episode)
    assert episode.turns
    assert sum(int(context.sampled.sum()) for context in episode.contexts) > 0
