"""The stock, and what becomes of everything when its owner ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import SandboxDiedError, SandboxError
from etude.sandbox import limits
from etude.sandbox.channel import Channel
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
from sandbox.machine import box

RECIPE = SandboxRecipe(spares=3, memory_mb=128, disk_mb=8, timeout_s=20.0, nice=0)


@pytest.fixture(autouse=True)
def groups_before() -> None:
    """Other tests of this process may hold pools of their own."""
    global BEFORE
    BEFORE = frozenset()
    BEFORE = frozenset(groups_left())


BEFORE: frozenset[str] = frozenset()


def groups_left() -> list[str]:
    """Control groups of this process that were not there when the test began."""
    found = limits.find()
    if isinstance(found, str):
        return []
    mine = f"etude-{os.getpid()}-*"
    groups = {str(path) for parent in found.parents.values() for path in parent.glob(mine)}
    return sorted(groups - BEFORE)


def test_every_sandbox_is_fresh_and_used_once() -> None:
    async def run() -> None:
        async with NamespacePool(RECIPE) as pool:
            seen = set()
            for number in range(6):
                async with box(pool, {"n.txt": str(number)}) as sandbox:
                    seen.add(sandbox.sandbox_id)
                    assert await sandbox.list_files() == ("n.txt",)
                    done = await sandbox.exec(
                        ["sh", "-c", "ls -A /tmp /dev/shm; echo x > /tmp/left; echo x > left"], timeout_s=9
                    )
                    assert done.stdout == b"/dev/shm:\n\n/tmp:\n"
            assert len(seen) == 6

    asyncio.run(run())
    assert groups_left() == []


def test_many_are_handed_out_at_once_and_all_are_gone_after_close() -> None:
    async def run() -> list[int]:
        pool = NamespacePool(RECIPE)
        taken = await asyncio.gather(*(pool.acquire({"a": "1"}) for _ in range(40)))
        outs = await asyncio.gather(*(sandbox.run_python("print(6 * 7)", timeout_s=20) for sandbox in taken))
        assert [done.stdout for done in outs] == [b"42\n"] * 40
        await pool.close()
        await pool.close()
        with pytest.raises(SandboxError, match="closed"):
            await pool.acquire({})
        return [sandbox.channel.pid for sandbox in taken]

    pids = asyncio.run(run())
    assert [pid for pid in pids if Path("/proc", str(pid)).exists()] == []
    assert groups_left() == []


def test_a_host_without_free_descriptors_is_no_fault_of_the_files() -> None:
    async def run() -> None:
        async with NamespacePool(SandboxRecipe(spares=0, nice=0)) as pool:
            await (await pool.acquire({"a": "1"})).close()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                with pytest.raises(SandboxError, match="no sandbox can be started"):
                    await pool.acquire({"a": "1"})
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await (await pool.acquire({"a": "1"})).close()

    asyncio.run(run())


def test_no_more_than_max_running_are_handed_out() -> None:
    async def run() -> None:
        async with NamespacePool(RECIPE, max_running=2) as pool:
            first, second = await pool.acquire({}), await pool.acquire({})
            third = asyncio.create_task(pool.acquire({}))
            await asyncio.sleep(0.2)
            assert not third.done()
            await first.close()
            await (await third).close()
            await second.close()

    asyncio.run(run())


def test_a_caller_who_gives_up_waiting_loses_no_place() -> None:
    async def run() -> None:
        async with NamespacePool(SandboxRecipe(spares=0, nice=0), max_running=1) as pool:
            for delay in (0.0, 0.001, 0.005, 0.02):
                waiting = asyncio.create_task(pool.acquire({}))
                await asyncio.sleep(delay)
                waiting.cancel()
                await asyncio.wait([waiting])
                for sandbox in list(pool._in_use):
                    await sandbox.close()
            async with asyncio.timeout(20), box(pool) as sandbox:
                assert await sandbox.list_files() == ()

    asyncio.run(run())


def test_a_path_that_leads_out_gives_no_sandbox_and_loses_no_place() -> None:
    async def run() -> None:
        async with NamespacePool(RECIPE, max_running=1) as pool:
            for _ in range(2):
                with pytest.raises(PermissionError):
                    await pool.acquire({"../x": "1"})
            async with asyncio.timeout(20), box(pool, {"x": "1"}) as sandbox:
                assert await sandbox.read_file("x") == b"1"

    asyncio.run(run())


def test_a_spare_that_died_is_not_handed_out() -> None:
    async def run() -> None:
        async with NamespacePool(RECIPE) as pool:
            while len(pool._stock) < RECIPE.spares:
                await asyncio.sleep(0.01)
            for spare in pool._stock:
                os.kill(spare.channel.pid, signal.SIGKILL)
            await asyncio.sleep(0.2)
            async with box(pool, {"x": "1"}) as sandbox:
                assert await sandbox.read_file("x") == b"1"

    asyncio.run(run())


def test_when_the_machine_under_the_sandboxes_breaks_it_is_not_the_agents_fault_and_the_pool_goes_on() -> None:
    async def run() -> None:
        async with NamespacePool(RECIPE) as pool:
            sandbox = await pool.acquire({})
            assert pool._nest is not None
            assert pool._nest._process is not None
            running = asyncio.create_task(sandbox.exec(["sleep", "20"], timeout_s=20))
            await asyncio.sleep(0.2)
            pool._nest._process.kill()
            with pytest.raises(SandboxError, match="the machine under sandbox") as caught:
                await running
            assert not isinstance(caught.value, SandboxDiedError)
            await sandbox.close()
            async with box(pool, {"x": "1"}) as after:
                assert await after.read_file("x") == b"1"

    asyncio.run(run())


OWNER = """
import asyncio
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
async def main():
    async with NamespacePool(SandboxRecipe(spares=2, nice=0)) as pool:
        sandbox = await pool.acquire({})
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "setsid sleep 1234 & sleep 1234"], timeout_s=20))
        await asyncio.sleep(1)
        print(sandbox.channel.pid, pool._nest._process.pid, flush=True)
        await running
asyncio.run(main())
"""


def machines() -> set[int]:
    """Processes of bubblewrap that are this process's, or nobody's any more."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, parent = re.findall(r"\((.*)\) \S (\d+)", (folder / "stat").read_text())[0]
            if name == "bwrap" and int(parent) in (1, os.getpid()):
                found.add(int(folder.name))
    return found


def wait_until_gone(remaining: Callable[[], set[int]]) -> None:
    deadline = time.monotonic() + 15
    while left := remaining():
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def offspring(pids: set[int]) -> set[int]:
    """The processes and all that descend from them."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_kill_9_of_the_owner_leaves_no_process_behind() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    pids = {int(word) for word in owner.stdout.readline().split()}
    alive = offspring(pids)
    assert len(alive) >= 5, "the sandbox should have had processes"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until_gone(lambda: {pid for pid in alive if Path("/proc", str(pid)).exists()})


def test_groups_of_a_killed_owner_are_swept_at_the_next_start() -> None:
    found = limits.find()
    if isinstance(found, str):
        pytest.skip(f"cgroups: {found}")
    dead = subprocess.Popen(["true"])
    dead.wait()
    parent = next(iter(found.parents.values()))
    stale = parent / f"etude-{dead.pid}-0"
    stale.mkdir()

    async def run() -> None:
        async with NamespacePool(RECIPE):
            pass

    asyncio.run(run())
    assert not stale.exists()


def test_without_bubblewrap_the_error_names_it_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)

    async def run() -> None:
        async with NamespacePool(RECIPE):
            pass

    with pytest.raises(SandboxError, match="no sandbox can be started") as caught:
        asyncio.run(run())
    assert "bwrap" in (caught.value.cause or "")
    assert "apt install bubblewrap" in (caught.value.hint or "")


def test_where_user_namespaces_are_blocked_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "bwrap"  # what bubblewrap says on a machine that blocks them
    refusing.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    refusing.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(refusing))

    async def run() -> None:
        async with NamespacePool(RECIPE):
            pass

    with pytest.raises(SandboxError) as caught:
        asyncio.run(run())
    assert caught.value.cause == "bwrap: setting up uid map: Permission denied"
    assert "apparmor_restrict_unprivileged_userns" in (caught.value.hint or "")


def test_snapshots_live_in_a_private_folder_that_goes_with_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"etude-snapshots-{dead.pid}-x").mkdir()

    async def run() -> None:
        async with NamespacePool(RECIPE) as pool, box(pool, {"a": "1"}) as sandbox:
            saved = Path((await sandbox.snapshot()).path)
            assert [folder.name for folder in tmp_path.iterdir()] == [saved.parent.name]
            assert saved.parent.stat().st_mode & 0o777 == 0o700

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_that_dies_while_it_is_restored_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Channel.ask

    async def dies(self: Channel, header: dict[str, Any], *bodies: bytes, timeout_s: float = 60.0) -> Any:
        if header["op"] == "restore":
            self.kill("it was killed")
        return await ask(self, header, *bodies, timeout_s=timeout_s)

    async def run() -> None:
        async with NamespacePool(RECIPE, max_running=2) as pool, box(pool, {"a": "1"}) as sandbox:
            saved = await sandbox.snapshot()
            monkeypatch.setattr(Channel, "ask", dies)
            for making in (pool.restore(saved), sandbox.fork()):
                with pytest.raises(SandboxError, match="died"):
                    await making
            async with asyncio.timeout(20), box(pool) as other:
                assert await other.list_files() == ()

    asyncio.run(run())


def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing_behind() -> None:
    """A child of bubblewrap that waits for its user map would outlive its parent, and hold up who waits for its log."""

    async def run() -> None:
        for delay_ms in range(0, 60, 4):
            pool = NamespacePool(RECIPE)
            starting = asyncio.create_task(pool.start())
            await asyncio.sleep(delay_ms / 1000)
            starting.cancel()
            await asyncio.wait([starting])
            async with asyncio.timeout(20):
                await pool.close()

    before = machines()
    asyncio.run(run())
    wait_until_gone(lambda: machines() - before)


def test_a_pool_that_is_closed_while_it_starts_again_keeps_no_machine() -> None:
    async def run() -> None:
        async with NamespacePool(RECIPE) as pool:
            assert pool._nest is not None
            assert pool._nest._process is not None
            pool._nest._process.kill()
            while pool._nest.is_alive():
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(pool.acquire({}))
            await asyncio.sleep(0.02)
        with pytest.raises(SandboxError):
            await waiting

    before = machines()
    asyncio.run(run())
    wait_until_gone(lambda: machines() - before)


def test_who_waits_for_a_sandbox_learns_of_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with NamespacePool(SandboxRecipe(spares=0, nice=0)) as pool:
            assert pool._nest is not None

            async def broken() -> None:
                raise RuntimeError("nobody foresaw this")

            monkeypatch.setattr(pool._nest, "spawn", broken)
            async with asyncio.timeout(20):
                with pytest.raises(RuntimeError, match="nobody foresaw this"):
                    await pool.acquire({})

    asyncio.run(run())


def test_a_close_that_is_cancelled_loses_no_place() -> None:
    async def run() -> None:
        async with NamespacePool(RECIPE, max_running=1) as pool:
            sandbox = await pool.acquire({})
            closing = asyncio.create_task(sandbox.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            async with asyncio.timeout(20), box(pool) as other:
                assert await other.list_files() == ()

    asyncio.run(run())
