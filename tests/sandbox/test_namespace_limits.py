"""Memory, processes, disk, output and time run out inside, and only there."""

from __future__ import annotations

import pytest

from etude.sandbox.namespace import NamespaceSandbox
from sandbox.machine import COUNT, RECIPE, Machine


def test_a_memory_bomb_is_ended_and_the_sandbox_lives(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> tuple[int, bytes, bytes]:
        bomb = "x = []\nfor _ in range(400): x.append(b'1' * (1 << 20))\nprint('got away')"
        done = await sandbox.run_python(bomb, timeout_s=20)
        return done.exit_code, done.stdout, (await sandbox.run_python("print('alive')", timeout_s=10)).stdout

    code, out, after = host.in_box(run)
    assert code in (1, -9)
    assert out == b""
    assert after == b"alive\n"


def test_memory_is_counted_over_all_processes(host: Machine) -> None:
    bomb = (
        "import os, time\nread, write = os.pipe()\nos.set_blocking(read, False)\nfor i in range(8):\n"
        "    if os.fork() == 0:\n"
        "        x = os.urandom(1 << 20) * 30; os.write(write, b'x'); time.sleep(60); os._exit(0)\n"
        "have = rounds = 0\nwhile os.waitpid(-1, os.WNOHANG) == (0, 0) and rounds < 20:\n"
        "    time.sleep(.1); rounds += have == 8\n"
        "    try: have += len(os.read(read, 8))\n    except BlockingIOError: pass\n"
        "if rounds == 20: print('eight times 30 MB')"
    )
    done = host.python(bomb, timeout_s=25)  # the limit is 128 MB and 8 MB of files
    assert done.stdout == b""
    assert not done.timed_out


def test_memory_that_belongs_to_no_process_is_bounded(host: Machine) -> None:
    bomb = (
        "import os\nkept = []\n"
        "for i in range(60):\n    fd = os.memfd_create('x')\n"
        "    os.write(fd, bytes(7 << 20)); kept.append(fd)\nprint('got away')"
    )
    done = host.python(bomb, timeout_s=20)
    assert done.stdout == b""
    assert done.exit_code != 0


def test_a_fork_bomb_is_bounded_and_ended(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> tuple[int, bytes]:
        bomb = (
            "import os, time\nn = 0\nwhile True:\n    try:\n        if os.fork() == 0: time.sleep(60)\n"
            "        n += 1\n    except OSError: break\nprint(n)"
        )
        first = await sandbox.run_python(bomb, timeout_s=20)
        await sandbox.exec(["sh", "-c", "f() { f | f & }; f; sleep 1"], timeout_s=3)
        after = await sandbox.run_python(COUNT, timeout_s=20)
        return int(first.stdout), after.stdout

    forked, after = host.in_box(run)
    assert forked == RECIPE.pids - 1
    assert after == b"2\n"


def test_a_full_disk_is_an_error_inside_and_files_can_still_be_read(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> tuple[bytes, bytes]:
        fill = (
            "for f in '/tmp/a', '/workspace/b', '/dev/shm/c':\n    try:\n        with open(f, 'wb') as o:\n"
            "            while True: o.write(bytes(1 << 20))\n    except OSError as e: print(e.errno)"
        )
        done = await sandbox.run_python(fill, timeout_s=20)
        with pytest.raises(OSError, match="No space left"):
            await sandbox.write_file("late.txt", b"x" * 100_000)
        return done.stdout, await sandbox.read_file("small.txt")

    out, small = host.in_box(run, {"small.txt": "kept"})
    assert set(out.split()) <= {b"27", b"28"}
    assert small == b"kept"


def test_many_small_files_cannot_eat_memory(host: Machine) -> None:
    source = (
        "n = 0\ntry:\n    while True:\n        open(f'/tmp/{n}', 'w').close(); n += 1\n"
        "except OSError as e: print(e.errno, n < 5000)"
    )
    assert host.python(source, timeout_s=25).stdout == b"28 True\n"


def test_a_flood_of_output_is_cut_and_said_so(host: Machine) -> None:
    done = host.shell("yes | head -c 3000000; yes e | head -c 3000000 >&2; yes r | head -c 3000000 >&3; echo end")
    assert done.truncated
    assert [len(stream) for stream in (done.stdout, done.stderr, done.result)] == [RECIPE.output_kb << 10] * 3
    assert done.exit_code == 0
    assert not host.shell("echo short").truncated


def test_time_runs_out_for_sleepers_and_spinners(host: Machine) -> None:
    for source in (
        "import time\nprint('begun', flush=True)\ntime.sleep(60)",
        "print('begun', flush=True)\nwhile True: pass",
    ):
        done = host.python(source, timeout_s=1.0)
        assert done.timed_out
        assert done.exit_code == -9
        assert done.stdout == b"begun\n"
        assert 0.9 < done.wall_s < 10


def test_processor_time_is_counted_over_all_processes(host: Machine) -> None:
    used = "print(sum(map(int, open('/proc/1/stat').read().split()[13:17])) / 100)"  # of process 1 and what it reaped

    async def run(sandbox: NamespaceSandbox) -> float:
        spin = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
        done = await sandbox.run_python(spin, timeout_s=5.0)
        assert done.timed_out
        return float((await sandbox.run_python(used, timeout_s=20)).stdout)

    assert host.in_box(run) < 6.5  # on the clock two processors would have given ten


def test_the_recipes_time_limit_is_the_longest(host: Machine) -> None:
    assert RECIPE.timeout_s == 30.0
    done = host.in_box(lambda sandbox: sandbox.exec(["true"], timeout_s=1e9))
    assert done.exit_code == 0
