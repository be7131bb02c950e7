"""The recorder against real databases that come and go."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from etude.errors import StoreError
from etude.protocols import Consent, SessionRecorder
from etude.sessions.journal import Journal
from etude.sessions.recorder import JournalRecorder
from etude.sessions.store import SessionStore
from sessions import made
from sessions.postgres import postgres

Open = Callable[..., SessionStore]


def read(ids: np.ndarray) -> str:
    return " ".join(map(str, ids))


async def eventually(check: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


async def started(store: SessionStore, folder: Path) -> JournalRecorder:
    recorder = JournalRecorder(store, folder, decode=read, retry_s=(0.05, 0.2))
    assert isinstance(recorder, SessionRecorder)
    await recorder.start()
    return recorder


def test_what_is_recorded_reaches_the_database(url: str, open_store: Open, tmp_path: Path) -> None:
    store = open_store(url)

    async def work() -> None:
        recorder = await started(store, tmp_path / "j")
        turns = [made.turn(number=n, tokens=made.tokens()) for n in range(50)]
        await asyncio.gather(*map(recorder.record, turns))
        await asyncio.gather(*map(recorder.record, turns[:5]))
        assert await recorder.note(made.owner(), made.event())
        assert not await recorder.note(made.owner(), made.event(session_id="unheard of"))
        assert not await recorder.note(made.owner(tenant="other"), made.event())
        await recorder.close()
        assert +recorder.counts == {"recorded": 55, "noted": 1, "stored": 51, "known": 5}

    run(work)
    rows = list(store.turns("acme", "session-1"))
    assert len(rows) == 50
    assert all(row.turn.tokens is not None for row in rows)
    assert len(store.events("acme", "session-1")) == 1
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["lock"]


def test_without_consent_not_even_the_journal_is_written(open_store: Open, tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")

    async def work() -> None:
        recorder = await started(store, tmp_path / "j")
        nobody = made.owner(consent=Consent.NONE)
        await recorder.record(made.turn("unmistakable", owner=nobody))
        assert not await recorder.note(nobody, made.event())
        assert [path.name for path in (tmp_path / "j").iterdir()] == ["lock"]
        await recorder.close()

    run(work)
    assert store.sessions() == []
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"unmistakable" not in path.read_bytes()


def test_a_database_that_comes_late_gets_everything(open_store: Open, tmp_path: Path) -> None:
    folder = tmp_path / "not yet"
    folder.touch()  # a file where the database's folder should be
    with pytest.raises(StoreError):
        open_store(f"sqlite:///{folder / 's.db'}")


@pytest.mark.slow
def test_turns_wait_in_the_journal_while_the_database_is_away(open_store: Open, tmp_path: Path) -> None:
    with postgres(tmp_path) as server:
        store = open_store(server.new_database())

        async def work() -> None:
            recorder = await started(store, tmp_path / "j")
            await recorder.record(made.turn(turn_id="before"))
            await eventually(lambda: recorder.waiting() == 0)
            await asyncio.to_thread(server.stop)
            for number in range(20):
                await recorder.record(made.turn(turn_id=f"while-{number}"))
            assert await recorder.note(made.owner(), made.event())
            assert await recorder.note(made.owner(), made.event(session_id="never", event_id="never"))
            await eventually(lambda: recorder.last_error is not None)
            assert recorder.waiting() > 0
            await asyncio.to_thread(server.start)
            await eventually(lambda: recorder.waiting() == 0)
            await recorder.record(made.turn(turn_id="after"))
            await recorder.close()
            assert recorder.last_error is None
            assert recorder.counts["refused"] == 1, "the event of no session"

        run(work)
        assert len(list(store.turns())) == 22
        assert len(store.events("acme", "session-1")) == 1
        store.close()


def test_what_the_journal_held_at_a_restart_is_stored_and_its_sessions_are_known(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")

    async def first() -> None:
        recorder = JournalRecorder(store, tmp_path / "j", decode=None)  # never started: nothing is moved
        await recorder.record(made.turn())
        await recorder.close()

    async def second() -> None:
        recorder = await started(store, tmp_path / "j")
        assert await recorder.note(made.owner(), made.event())
        await recorder.close()

    run(first)
    assert store.sessions() == []
    run(second)
    assert [row.num_turns for row in store.sessions()] == [1]
    assert [row.num_events for row in store.sessions()] == [1]


def test_a_turn_that_the_database_never_takes_is_set_aside_and_holds_up_nobody(
    open_store: Open, tmp_path: Path
) -> None:
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")

    async def work() -> None:
        recorder = await started(store, tmp_path / "j")
        turns = [made.turn(), made.turn(started_at=float("nan")), made.turn()]
        await asyncio.gather(*map(recorder.record, turns))
        await recorder.close()
        assert recorder.counts["set_aside"] == 1

    run(work)
    assert len(list(store.turns())) == 2
    assert len(list((tmp_path / "j").glob("set-aside-*.mp"))) == 1


def test_a_turn_that_cannot_be_encoded_is_refused_at_once(open_store: Open, tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]

    async def work() -> None:
        recorder = await started(store, tmp_path / "j")
        for bad in (object(), deep):
            call = made.ToolCall(name="x", arguments={"a": bad})
            with pytest.raises(StoreError):
                await recorder.record(made.turn(reply=made.reply("", call)))
        await recorder.record(made.turn())
        await recorder.close()

    run(work)
    assert len(list(store.turns())) == 1


def test_one_who_stops_waiting_takes_nobody_with_him(open_store: Open, tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")

    async def work() -> None:
        recorder = await started(store, tmp_path / "j")
        tasks = [asyncio.create_task(recorder.record(made.turn())) for _ in range(30)]
        await asyncio.sleep(0.003)
        for task in tasks[::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(not task.cancelled() and task.exception() is None for task in tasks[1::2])
        await recorder.close()

    run(work)
    assert len(list(store.turns())) >= 15


def test_many_turns_share_a_sync(open_store: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")
    groups: list[int] = []
    append = Journal.append

    def counted(journal: Journal, bodies: list[bytes]) -> None:
        groups.append(len(bodies))
        time.sleep(0.02)  # a disk that takes its time
        append(journal, bodies)

    monkeypatch.setattr(Journal, "append", counted)

    async def work() -> None:
        recorder = await started(store, tmp_path / "j")
        await asyncio.gather(*(recorder.record(made.turn()) for _ in range(200)))
        await recorder.close()

    run(work)
    assert sum(groups) == 200
    assert len(groups) < 50
