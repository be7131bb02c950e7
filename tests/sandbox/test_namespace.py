"""What a sandbox runs, and how its runs and itself end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from etude.errors import SandboxDiedError
from etude.sandbox.namespace import NamespaceSandbox
from sandbox.machine import COUNT, Machine, box


def test_python_source_runs_in_the_workspace_with_its_input_and_result_channel(host: Machine) -> None:
    source = "import os, sys, solution\nprint(solution.x, os.getcwd(), sys.stdin.read())\nos.write(3, b'apart')"
    done = host.in_box(
        lambda sandbox: sandbox.run_python(source, stdin="grüße".encode(), timeout_s=10), {"solution.py": "x = 7"}
    )
    assert (done.exit_code, done.stdout.decode(), done.result) == (0, "7 /workspace grüße\n", b"apart")
    assert not done.timed_out
    assert not done.truncated


def test_an_exception_ends_with_code_1_and_a_trace(host: Machine) -> None:
    done = host.python("def f():\n    raise KeyError('lost')\nf()")
    assert done.exit_code == 1
    trace = done.stderr.decode()
    assert trace.startswith('Traceback (most recent call last):\n  File "<run>", line 3')
    assert trace.endswith("KeyError: 'lost'\n")
    assert "inside_" not in trace


@pytest.mark.parametrize(
    ("source", "code"),
    [("raise SystemExit(3)", 3), ("import sys; sys.exit()", 0), ("exit('bye')", 1), ("import os; os._exit(9)", 9),
     ("import os; os.kill(os.getpid(), 11)", -11), ("syntax error", 1)],
)  # fmt: skip
def test_the_exit_code_is_that_of_a_python_process(host: Machine, source: str, code: int) -> None:
    assert host.python(source).exit_code == code


def test_exit_functions_and_threads_end_before_the_process(host: Machine) -> None:
    source = (
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(.2), print('thread'))).start()\nprint('main')"
    )
    assert host.python(source).stdout == b"main\nthread\nlast\n"


def test_runs_do_not_see_what_earlier_runs_did_to_the_interpreter(host: Machine) -> None:
    async def twice(sandbox: NamespaceSandbox) -> bytes:
        await sandbox.run_python("import builtins, sys\nbuiltins.len = None\nsys.path.clear()", timeout_s=10)
        return (await sandbox.run_python("print(len('abc'), __name__)", timeout_s=10)).stdout

    assert host.in_box(twice) == b"3 __main__\n"


def test_a_program_runs_with_arguments_input_and_extra_environment(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> bytes:
        argv = ["sh", "-c", 'read line; echo "$line $1 $EXTRA $HOME"', "sh", "two words"]
        return (await sandbox.exec(argv, stdin=b"in\n", env={"EXTRA": "more"}, timeout_s=10)).stdout

    assert host.in_box(run) == b"in two words more /tmp\n"


def test_a_program_that_is_not_there_is_data(host: Machine) -> None:
    done = host.in_box(lambda sandbox: sandbox.exec(["no-such-program"], timeout_s=10))
    assert done.exit_code == 127
    assert b"no-such-program" in done.stderr


def test_python_as_a_program_finds_its_library(host: Machine) -> None:
    done = host.in_box(
        lambda sandbox: sandbox.exec(["python3", "-c", "import json; print(json.dumps([1]))"], timeout_s=20)
    )
    assert (done.stdout, done.exit_code) == (b"[1]\n", 0)


def test_much_input_is_fed_while_output_is_drained(host: Machine) -> None:
    data = os.urandom(300_000).hex().encode()
    done = host.python(
        "import sys\nfor line in iter(lambda: sys.stdin.read(1 << 16), ''): n = len(line)\nprint('done')", stdin=data
    )
    assert done.stdout == b"done\n"
    ignored = host.python("print('did not read')", stdin=data)
    assert ignored.stdout == b"did not read\n"


def test_the_whole_tree_is_gone_after_a_run(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> tuple[float, list[str], bytes]:
        daemon = (
            "import os, time, signal\n"
            "if os.fork() == 0:\n    os.setsid()\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "    if os.fork() == 0:\n        while True:\n"
            "            open('/workspace/beat', 'a').write('x'); time.sleep(.02)\n"
            "    os._exit(0)\n"
            "time.sleep(.5)\nprint('main ends')"
        )
        done = await sandbox.run_python(daemon, timeout_s=20)
        assert done.stdout == b"main ends\n"
        size = len(await sandbox.read_file("beat"))
        await asyncio.sleep(0.3)
        assert len(await sandbox.read_file("beat")) == size > 0
        return done.wall_s, list(await sandbox.list_files()), (await sandbox.run_python(COUNT, timeout_s=10)).stdout

    wall_s, files, processes = host.in_box(run)
    assert wall_s < 10
    assert files == ["beat"]
    assert processes == b"2\n"


def test_a_process_that_holds_the_output_open_does_not_hold_the_run(host: Machine) -> None:
    done = host.shell("sleep 60 & echo now")
    assert done.stdout == b"now\n"
    assert done.wall_s < 10


def test_a_sandbox_that_was_killed_says_that_it_died(host: Machine) -> None:
    async def run() -> None:
        async with box(host.pool) as sandbox:
            running = asyncio.create_task(sandbox.run_python("import time; time.sleep(30)", timeout_s=30))
            await asyncio.sleep(0.3)
            os.kill(sandbox.channel.pid, signal.SIGKILL)
            with pytest.raises(SandboxDiedError, match=sandbox.sandbox_id) as caught:
                await running
            assert caught.value.cause == "its first process was killed"
            with pytest.raises(SandboxDiedError):
                await sandbox.read_file("x")

    host.run(run())


def test_close_ends_everything_and_a_question_that_waits(host: Machine) -> None:
    async def run() -> None:
        sandbox = await host.pool.acquire({})
        running = asyncio.create_task(sandbox.exec(["sleep", "30"], timeout_s=30))
        await asyncio.sleep(0.3)
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxDiedError) as caught:
            await running
        assert caught.value.cause in ("it was closed", "its first process was killed")
        assert not Path("/proc", str(sandbox.channel.pid)).exists()

    host.run(run())


def test_a_cancelled_call_kills_its_sandbox(host: Machine) -> None:
    async def run() -> None:
        async with box(host.pool) as sandbox:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await sandbox.exec(["sleep", "30"], timeout_s=30)
            with pytest.raises(SandboxDiedError) as caught:
                await sandbox.list_files()
            assert caught.value.cause == "a call was cancelled"

    host.run(run())
