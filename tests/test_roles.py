"""A worker whose work has ended must not live on, answering and doing nothing."""

import asyncio
import subprocess
import sys

import pytest

from engine_driver import reply, serving
from etude.errors import EngineError
from tiny import tiny_model

PROGRAM = """
import asyncio
from etude.roles import _end_with

async def job():
    {body}

async def main():
    task = _end_with(job())
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.sleep(0.2)
    print("alive")

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("body", "code", "said"), [("pass", 1, ""), ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
                               ("await asyncio.sleep(60)", 0, "")],
)  # fmt: skip
def test_the_process_ends_with_its_job_unless_that_was_cancelled(body: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    assert said in done.stderr
    assert (done.stdout == "alive\n") == (code == 0)


def test_an_engine_whose_thread_breaks_says_that_it_ended() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            ended = asyncio.create_task(engine.ended())
            await reply(engine, [5, 6, 7], tokens=2)
            assert not ended.done()
            engine._commands.put((lambda: 1 / 0, lambda _: None))  # type: ignore[arg-type, return-value]
            await asyncio.wait_for(ended, 10)
            with pytest.raises(EngineError, match="the engine died"):
                await reply(engine, [5, 6, 7], tokens=2)

    asyncio.run(run())
