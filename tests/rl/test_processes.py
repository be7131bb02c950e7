"""Worker processes that are killed while they start, or end by themselves: real ones, of a real run's folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.build import load_recipe
from etude.errors import EngineError
from etude.frames import Client
from etude.inference.client import EngineClient
from etude.rl.processes import Workers
from etude.rl.run_folder import RunFolder
from rl.small_run import write_small_recipe

ROLE = "eval-0"


def play(tmp_path: Path, body: Callable[[Workers], Awaitable[None]]) -> Workers:
    recipe = load_recipe(write_small_recipe(tmp_path), [], stage="rl")
    folder = RunFolder.create(tmp_path / "run", stage="rl", recipe=recipe, seed=0)

    async def run() -> Workers:
        workers = Workers(folder.path)
        try:
            await body(workers)
        finally:
            await workers.close()
        return workers

    return asyncio.run(run())


async def kill_at_once(workers: Workers, times: int) -> None:
    killed: set[int | None] = {None}
    while len(killed) <= times:
        pid = workers.pid(ROLE)
        if pid not in killed and pid is not None:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        await asyncio.sleep(0.005)


async def no_greeting(_: Client) -> None:
    return


def test_a_worker_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    greeted = []

    async def body(workers: Workers) -> None:
        async def greet(client: Client) -> None:
            if not greeted:
                greeted.append(workers.pid(ROLE))
                os.kill(workers.pid(ROLE) or 0, signal.SIGKILL)
            await EngineClient(client).stats()

        killer = asyncio.create_task(kill_at_once(workers, times=1))
        await workers.start(ROLE, greet)
        assert killer.done()
        assert workers.pid(ROLE) not in greeted

    assert play(tmp_path, body).restarts == 2


def test_a_worker_that_is_killed_again_and_again_is_given_up(tmp_path: Path) -> None:
    async def body(workers: Workers) -> None:
        killer = asyncio.create_task(kill_at_once(workers, times=3))
        with pytest.raises(EngineError, match="eval-0 ended before it was up"):
            await workers.start(ROLE, no_greeting)
        killer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killer
        assert workers.pid(ROLE) is None

    assert play(tmp_path, body).restarts == 2


def test_a_worker_that_ends_by_itself_says_why_and_is_not_started_again(tmp_path: Path) -> None:
    async def body(workers: Workers) -> None:
        with pytest.raises(EngineError, match="no worker role 'nobody'"):
            await workers.start("nobody", no_greeting)

    assert play(tmp_path, body).restarts == 0


def test_what_a_greeting_raises_while_the_worker_lives_is_raised(tmp_path: Path) -> None:
    async def body(workers: Workers) -> None:
        async def greet(client: Client) -> None:
            await client.call("no such thing", {}, dict)

        with pytest.raises(EngineError, match="no method"):
            await workers.start(ROLE, greet)

    assert play(tmp_path, body).restarts == 0
