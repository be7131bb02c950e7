"""Processes that a run leaves behind: they live on through later runs, and nothing else does."""

from __future__ import annotations

import asyncio

from etude.protocols import ExecResult
from etude.sandbox.namespace import NamespaceSandbox
from sandbox.machine import COUNT, Machine, box

SERVER = "(while true; do date +%s%N > beat; sleep 0.05; done) >/dev/null 2>&1 & echo started"


async def bash(sandbox: NamespaceSandbox, text: str, *, leaves: bool = False, timeout_s: float = 10) -> ExecResult:
    return await sandbox.exec(["bash", "-c", text], timeout_s=timeout_s, leaves=leaves)


async def beats(sandbox: NamespaceSandbox) -> bool:
    """Whether the server still writes."""
    for _ in range(100):
        if "beat" in await sandbox.list_files():
            break
        await asyncio.sleep(0.05)
    first = await sandbox.read_file("beat")
    await asyncio.sleep(0.3)
    return await sandbox.read_file("beat") != first


def test_what_a_run_leaves_lives_on_through_other_runs_and_they_end_with_all_they_made(host: Machine) -> None:
    async def work(sandbox: NamespaceSandbox) -> None:
        assert (await bash(sandbox, SERVER, leaves=True)).stdout == b"started\n"
        assert await beats(sandbox)
        await bash(sandbox, "sleep 100 & setsid sleep 100 & echo")
        assert (await bash(sandbox, "pgrep -c -f 'sleep 100' || true")).stdout.split() in (
            [b"0"],
            [b"1"],
        )  # pgrep's own
        assert (await sandbox.run_python("print(1)", timeout_s=10)).stdout == b"1\n"
        assert await beats(sandbox)
        assert (await bash(sandbox, "pkill -f beat; pkill sleep; true")).exit_code in (0, -15)

    host.in_box(work)


def test_without_leave_nothing_stays(host: Machine) -> None:
    async def work(sandbox: NamespaceSandbox) -> bytes:
        await bash(sandbox, SERVER)
        return (await sandbox.run_python(COUNT, timeout_s=10)).stdout

    assert host.in_box(work) == b"2\n"


def test_a_run_that_leaves_and_runs_out_of_time_ends_alone(host: Machine) -> None:
    async def work(sandbox: NamespaceSandbox) -> None:
        await bash(sandbox, SERVER, leaves=True)
        late = await bash(sandbox, "sleep 60", leaves=True, timeout_s=0.5)
        assert late.timed_out
        assert await beats(sandbox)
        assert b"sleep 60" not in (await bash(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.replace(
            b"bash -c", b""
        )

    host.in_box(work)


def test_children_that_a_left_process_makes_later_are_spared_too(host: Machine) -> None:
    maker = "(sleep 0.4; sleep 77 & wait) >/dev/null 2>&1 & echo"

    async def work(sandbox: NamespaceSandbox) -> bytes:
        await bash(sandbox, maker, leaves=True)
        await bash(sandbox, "sleep 0.8")
        return (await bash(sandbox, "pgrep -c -x sleep")).stdout

    assert host.in_box(work) == b"1\n"


def test_left_processes_that_outgrow_the_memory_are_killed_and_the_sandbox_answers_on(host: Machine) -> None:
    """With cgroups the kernel does it, without them process 1, also between two runs."""
    hog = (
        "python3 -c 'x = [bytearray(1 << 20) for _ in range(600)]; import time; time.sleep(60)' >/dev/null 2>&1 & echo"
    )

    async def work(sandbox: NamespaceSandbox) -> bytes:
        await bash(sandbox, hog, leaves=True)
        for _ in range(60):
            await asyncio.sleep(0.1)
            if (await bash(sandbox, "pgrep -c -x python3")).stdout == b"0\n":
                return (await bash(sandbox, "echo here")).stdout
        raise AssertionError("it lives")

    assert host.in_box(work) == b"here\n"


def test_closing_ends_what_was_left(host: Machine) -> None:
    async def work() -> bool:
        async with box(host.pool, {}) as sandbox:
            await bash(sandbox, SERVER, leaves=True)
        return sandbox.channel.is_open

    assert host.run(work()) is False


def test_a_left_process_that_kills_the_fork_that_waits_costs_the_next_run_nothing(host: Machine) -> None:
    killer = "(sleep 0.2; kill -9 -1) >/dev/null 2>&1 & echo"

    async def work(sandbox: NamespaceSandbox) -> list[bytes]:
        said = []
        for number in range(3):
            await bash(sandbox, killer, leaves=True)
            await asyncio.sleep(0.4)  # meanwhile the next fork waits, and is killed
            said.append((await bash(sandbox, f"echo {number}", leaves=True)).stdout)
        return said

    assert host.in_box(work) == [b"0\n", b"1\n", b"2\n"]
