"""No acknowledged turn is lost and none is doubled: a real process under load, killed at random, databases too."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import sqlalchemy as sa

from etude.sessions import tables
from etude.sessions.recorder import JournalRecorder
from etude.sessions.store import SessionStore
from sessions.postgres import Postgres

TESTS = Path(__file__).parents[1]


def live(url: str, journal: Path, life: int, seconds: float) -> list[str]:
    """One life of the recorder, ended by SIGKILL; what it acknowledged."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    script = TESTS / "sessions" / "load.py"
    process = subprocess.Popen(
        [sys.executable, str(script), url, str(journal), str(life * 1_000_000), "16"],
        stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        first = process.stdout.readline()  # it may have taken seconds to begin
        killer = threading.Timer(seconds, process.kill)
        killer.start()
        rest = process.stdout.read()
    killer.cancel()
    assert process.returncode == -9
    return (first + rest).decode().split()


def finish(url: str, journal: Path) -> SessionStore:
    """A last life that only moves what is left."""
    store = SessionStore(url)

    async def drain() -> None:
        recorder = JournalRecorder(store, journal, decode=None, retry_s=(0.05, 0.5))
        await recorder.start()
        while recorder.waiting():
            await asyncio.sleep(0.05)
        await recorder.close()
        assert recorder.counts["set_aside"] == 0

    asyncio.run(drain())
    assert sorted(path.name for path in journal.iterdir()) == ["lock"]
    return store


def check(store: SessionStore, acknowledged: list[str]) -> None:
    with store.database.read() as connection:
        turns = Counter(connection.scalars(sa.select(tables.turns.c.turn_id)))
        events = Counter(connection.scalars(sa.select(tables.events.c.event_id)))
    assert set(acknowledged) <= turns.keys() | events.keys()
    assert set((turns + events).values()) == {1}
    assert len(list(store.turns())) == len(turns), "every one can be read"
    print(f"{len(acknowledged)} acknowledged, {len(turns)} turns and {len(events)} events stored")
    store.close()


@pytest.mark.slow
def test_kill_dash_nine_loses_and_doubles_nothing_with_sqlite(tmp_path: Path) -> None:
    dice, url, acknowledged = random.Random(5), f"sqlite:///{tmp_path / 's.db'}", []
    for life in range(8):
        acknowledged += live(url, tmp_path / "j", life, dice.uniform(0.05, 1.2))
    assert len(acknowledged) > 200
    check(finish(url, tmp_path / "j"), acknowledged)


@pytest.mark.slow
def test_kill_dash_nine_loses_and_doubles_nothing_while_postgresql_crashes(server: Postgres, tmp_path: Path) -> None:
    dice, url, acknowledged, stop = random.Random(6), server.new_database(), [], threading.Event()

    def crash() -> None:
        while not stop.wait(dice.uniform(0.5, 1.5)):
            server.stop("immediate")
            time.sleep(dice.uniform(0.1, 1.0))
            server.start()

    crashing = threading.Thread(target=crash)
    crashing.start()
    try:
        for life in range(8):
            acknowledged += live(url, tmp_path / "j", life, random.Random(life).uniform(0.05, 2.0))
    finally:
        stop.set()
        crashing.join()
    assert len(acknowledged) > 200
    check(finish(url, tmp_path / "j"), acknowledged)
