"""Kill -9 under load: a turn whose answer was sent is in the journal, whole, after every kill."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

from serve.journal import turns_in
from serve.speaking import windows_of

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


def test_a_killed_server_loses_no_turn_whose_answer_was_sent(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    answered: set[str] = set()
    for kill in range(KILLS):
        words = [sys.executable, str(Path(__file__).with_name("killed_server.py")), str(journal)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout as output:
            url = output.readline().strip()

        async def run(url: str, process: subprocess.Popen[str], before: int, kill: int) -> None:
            def end() -> None:
                until = time.monotonic() + 120
                while len(answered) < before + 20 + 7 * kill and time.monotonic() < until:
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)

            async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
                await asyncio.gather(
                    asyncio.to_thread(end), *(talk(client, number, answered) for number in range(CLIENTS))
                )

        before = len(answered)
        asyncio.run(run(url, process, before, kill))
        process.wait()
        assert len(answered) >= before + 20
        kept = turns_in(journal)
        assert answered <= {turn.turn_id for turn in kept}
        windows_of(kept)
