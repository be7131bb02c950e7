"""Kill -9 of the server under load, while its database crashes and comes again: no answered turn is lost or doubled."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from serve.speaking import windows_of
from sessions.postgres import postgres
from sessions.test_kill import finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KILLS, CLIENTS = 4, 6


async def talk(client: httpx2.AsyncClient, number: int, answered: set[str]) -> None:
    """Conversations until the server is gone; `answered` are the turns whose answer ended."""
    for round_ in range(10_000):
        history = [{"role": "user", "content": f"client {number} {round_}"}]
        for stream in (True, False):
            body = {"model": "qwen", "messages": history, "stream": stream}
            try:
                got = await client.post("/v1/chat/completions", json=body)
            except httpx2.TransportError:
                return
            ended = got.text.endswith("data: [DONE]\n\n") if stream else '"finish_reason"' in got.text
            assert ended
            answered.add(got.headers["x-etude-turn"])


def kill_again_and_again(url: str, journal: Path, meanwhile: Callable[[], None]) -> set[str]:
    """Turns whose answer ended, over KILLS lives of the server. meanwhile: in every life, while there is load."""
    answered: set[str] = set()
    for kill in range(KILLS):
        words = [sys.executable, str(Path(__file__).with_name("killed_server.py")), url, str(journal)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout as output:
            address = output.readline().strip()

        async def run(address: str, process: subprocess.Popen[str], before: int, kill: int) -> None:
            def end() -> None:
                until = time.monotonic() + 120
                meanwhile()
                while len(answered) < before + 20 + 7 * kill and time.monotonic() < until:
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)

            async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
                await asyncio.gather(
                    asyncio.to_thread(end), *(talk(client, number, answered) for number in range(CLIENTS))
                )

        before = len(answered)
        asyncio.run(run(address, process, before, kill))
        process.wait()
        assert len(answered) >= before + 20
    return answered


def check(url: str, journal: Path, answered: set[str]) -> None:
    """What a last life leaves in the database: every answered turn, once, and whole."""
    store = finish(url, journal)
    turns = [stored.turn for stored in store.turns()]
    assert answered <= {turn.turn_id for turn in turns}
    assert len({turn.turn_id for turn in turns}) == len(turns)
    assert all(turn.tokens is not None for turn in turns)
    windows_of(turns)
    print(f"{len(answered)} answered, {len(turns)} stored")
    store.close()


def test_a_killed_server_loses_no_turn_whose_answer_was_sent(tmp_path: Path) -> None:
    url, journal = f"sqlite:///{tmp_path / 'sessions.db'}", tmp_path / "journal"
    check(url, journal, kill_again_and_again(url, journal, lambda: None))


def test_nor_does_one_whose_database_crashes_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    with postgres(tmp_path / "postgres") as server:
        url, journal = server.new_database(), tmp_path / "journal"

        def crash() -> None:
            server.stop()
            time.sleep(0.5)
            server.start()

        check(url, journal, kill_again_and_again(url, journal, crash))
