"""verifiers' side of benchmarks/harness.py: runs in a Python of its own, and waits for rounds.

    PYTHON benchmarks/verifiers_peer.py URL TASKS.json FD

Make that Python with `python -m venv DIR` and `pip install verifiers==0.4.0 uv`. The protocol is mini_peer.py's.

One agent of the bash harness in the subprocess runtime, entered once and shared by all episodes, so that they share one
interception server. Its chat program is prepared once; compaction is off, which saves a request an episode. A task lays
out its workspace in `setup` and looks at it in `finalize`.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import verifiers.v1 as vf


class Repair(vf.Task):
    """A repository; `right` says how it ended."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(vf.TaskData(prompt=given["prompt"]))
        self.given, self.right = given, False

    async def setup(self, trace: Any, runtime: Any) -> None:
        for path, text in self.given["workspace"].items():
            target = runtime.workdir / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    async def finalize(self, trace: Any, runtime: Any) -> None:
        folder = runtime.workdir
        found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
        self.right = found == {**self.given["workspace"], self.given["path"]: self.given["repaired"]}


def spent() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


async def play(agent: Any, given: dict[str, Any], gate: asyncio.Semaphore) -> list[Any]:
    async with gate:
        start = time.perf_counter()
        task = Repair(given)
        trace = await agent.run(task)
        right = task.right and not trace.errors
        if not right:
            print(given["mark"], trace.errors, flush=True)
        return [given["mark"], time.perf_counter() - start, right]


async def main() -> None:
    url, path, results = sys.argv[1], sys.argv[2], os.fdopen(int(sys.argv[3]), "w")
    work = json.loads(Path(path).read_text())
    os.environ["NO_KEY"] = "none"
    variables = {name: value for name, value in work["variables"].items() if name != "PATH"}  # its own has uv
    config = vf.AgentConfig(
        harness={"id": "bash", "compaction": None, "env": variables},
        runtime=vf.SubprocessConfig(), model="script",
        client=vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"),
    )  # fmt: skip
    async with vf.make_agent(config) as agent:
        print("ready", file=results, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            before, start, gate = spent(), time.perf_counter(), asyncio.Semaphore(asked["at_once"])
            played = await asyncio.gather(*(play(agent, work["tasks"][number], gate) for number in asked["tasks"]))
            seconds = time.perf_counter() - start
            print(
                json.dumps({"episodes": played, "wall_s": seconds, "cpu_s": spent() - before}), file=results, flush=True
            )


if __name__ == "__main__":
    asyncio.run(main())
