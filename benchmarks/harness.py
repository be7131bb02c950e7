"""What the harness itself costs: an agent's loop, its tools and its sandbox, around a model that is a script.

    python benchmarks/harness.py --json FILE [--mini PYTHON] [--verifiers PYTHON]

Twenty repositories with a planted fault (harness_tasks.py), eight replies each, from a model server that answers after
20 ms and does no other work (harness_server.py). All harnesses run the same commands. Before anything is timed, each of
them must end every task with the one file repaired, nothing else changed, and tests that failed before and pass after.

own ms a turn   wall time of the episodes, one at a time, without what the server took and without the commands
between ms      the same from an answer of the server to the next request: without an episode's start and end
start ms        the rest: what an episode takes before its first request and after its last answer
own CPU ms      processor time a turn, of all processes but the server, without the commands': on a machine that others
                use it says more than the clock
episodes/s      1, 8 and 32 at once
CPU s           processor time an episode, with the commands'

The commands themselves are timed bare, `bash -c` in a folder of files in memory, in the same round. Processor time is
getrusage of the harness and of the children it waited for. Etude's sandboxes are not among those: each one's first
process, with all that it waited for, is read from /proc before it ends, to the middle of a tick. A pool serves
thousands of episodes: what starting and closing an idle one costs is taken off.

Where the bare commands take longer than BUSY times their processor time, others use the machine. Goals that read the
clock are left out then, all the more since sandboxes in cgroups of their own have a share that nice does not lower.

Ours: EndpointPolicy, the agent loop, namespace sandboxes; with the shell tool alone, as the peers have it, and with
file tools. mini-swe-agent: in its bubblewrap environment, which shares network and processes with the host and limits
nothing, and in its local one, which isolates nothing. verifiers: its bash harness in the subprocess runtime, which
isolates nothing either; it has no bubblewrap. All keep their files in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
from harness_tasks import END, TURNS, Repository, repositories
from measuring import Row, arguments, in_turn, median, ratio, report

from etude.agent.endpoint import Endpoint, EndpointPolicy
from etude.agent.loop import run_episode
from etude.agent.recipe import AgentRecipe
from etude.agent.tools import schemas
from etude.sandbox.namespace import NamespaceSandbox
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
from etude.sandbox.tree import ENV
from etude.types import IOChecks, Outcome, Task

LATENCY_S = 0.02
IN_MEMORY = "/dev/shm"
VARIABLES = {name: ENV[name] for name in ("PATH", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8")}
"""What every harness gives its commands."""
SHELL = ("shell", "finish")
FILES = ("glob", "read_file", "grep", "edit_file", "shell", "finish")
BUSY = 1.25
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
Played = Mapping[str, Any]
"""episodes: (mark, seconds, whether it is right) of each; wall_s, cpu_s of all."""
Play = Callable[[Sequence[int], int], Played]
"""(numbers of tasks, how many at once) -> what came of it."""


class Server:
    """The scripted model."""

    def __init__(self, tasks: int) -> None:
        program = str(Path(__file__).with_name("harness_server.py"))
        self._process = subprocess.Popen(
            [sys.executable, program, str(LATENCY_S), str(tasks)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def log(self) -> list[dict[str, Any]]:
        """Of every answer since the last call: task, number, when the request came and when the answer was sent."""
        with urllib.request.urlopen(f"{self.url}/log") as answer:
            return list(json.load(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Etude:
    """Ours, with these tools."""

    def __init__(self, tasks: Sequence[Repository], url: str, tools: tuple[str, ...]) -> None:
        self._tasks, self._url = tasks, url
        self._recipe = AgentRecipe(tools=tools, max_turns=TURNS, tool_output_chars=10_000)
        self._schemas = schemas(tools)
        self._idle_s: dict[int, float] = {}

    def __call__(self, numbers: Sequence[int], at_once: int) -> Played:
        if at_once not in self._idle_s:
            self._idle_s[at_once] = asyncio.run(self._play([], at_once))["cpu_s"]
        played = asyncio.run(self._play(numbers, at_once))
        return {**played, "cpu_s": played["cpu_s"] - self._idle_s[at_once]}

    async def _play(self, numbers: Sequence[int], at_once: int) -> Played:
        before, inside_s = spent_s(), 0.0
        left = iter(numbers)
        episodes: list[tuple[str, float, bool]] = []
        recipe = SandboxRecipe(spares=at_once, nice=0)
        async with NamespacePool(recipe) as pool, httpx2.AsyncClient(timeout=60, limits=_limits(at_once)) as client:
            endpoint = Endpoint(url=self._url, model="script", tries=1)

            async def one() -> None:
                nonlocal inside_s
                for number in left:
                    task = self._tasks[number]
                    start = time.perf_counter()
                    sandbox = await pool.acquire(task.workspace)
                    policy = EndpointPolicy(endpoint, self._schemas, client=client)
                    episode = await run_episode(_task(task), sandbox, policy, self._recipe, episode_id=task.mark)
                    inside_s += _inside_s(sandbox)
                    await sandbox.close()
                    right = episode.outcome is Outcome.FINISHED and episode.files == {task.path: task.repaired()}
                    episodes.append((task.mark, time.perf_counter() - start, right))

            await _until_stocked(pool)
            began = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(at_once)))
            wall_s = time.perf_counter() - began
        return {"episodes": episodes, "wall_s": wall_s, "cpu_s": spent_s() - before + inside_s}


def _limits(at_once: int) -> httpx2.Limits:
    return httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once)


async def _until_stocked(pool: NamespacePool) -> None:
    """Its start is none of the episodes'."""
    sandbox = await pool.acquire({})
    await sandbox.close()


def _inside_s(sandbox: NamespaceSandbox) -> float:
    """Processor seconds of all that ran in it."""
    fields = Path(f"/proc/{sandbox.channel.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) + 0.5 for field in fields[11:15]) * _TICK_S


def _task(task: Repository) -> Task:
    return Task.make(prompt=task.prompt, workspace=task.workspace, verifier=IOChecks(path=task.path, checks=()),
                     category="repair", source={})  # fmt: skip


def spent_s() -> float:
    """Processor seconds of this process and of the children that it waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


class Peer:
    """A harness in a process and a Python of its own; loading it is not timed."""

    def __init__(self, python: str, program: str, url: str, work: Path) -> None:
        results, give = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        path = f"{VARIABLES['PATH']}:{Path(python).parent}"  # uv, but not its Python for the commands
        home = str(work.parent)
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(program)), url, str(work), str(give)], stdin=subprocess.PIPE,
            stdout=self._log, stderr=subprocess.STDOUT, text=True, pass_fds=(give,),
            env={**os.environ, **VARIABLES, "PATH": path, "TMPDIR": home, "HOME": home},
        )  # fmt: skip
        os.close(give)
        self._results = os.fdopen(results)
        self._answer()

    def play(self, kind: str) -> Play:
        def ask(numbers: Sequence[int], at_once: int) -> Played:
            assert self._process.stdin is not None
            asked = {"kind": kind, "tasks": list(numbers), "at_once": at_once}
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            return dict(json.loads(self._answer()))

        return ask

    def _answer(self) -> str:
        line = self._results.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"a peer failed: {self._log.read().decode()[-3000:]}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def bare(task: Repository, commands: Sequence[str]) -> tuple[float, float]:
    """Seconds of the commands, one after the other, by nobody's harness; by the clock and of the processor."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for path, text in task.workspace.items():
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path).write_text(text)
        start, before = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        for command in commands:
            subprocess.run(["bash", "-c", command], cwd=folder, env=VARIABLES, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT)  # fmt: skip
        return time.perf_counter() - start, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before


class Bench:
    """Plays every harness against the server, one round of all of them after the other."""

    def __init__(self, tasks: Sequence[Repository], server: Server, counts: Mapping[int, int]) -> None:
        """counts: episodes at once -> how many are played."""
        self._tasks, self._server, self._counts = tasks, server, counts
        self._bare = {"all": (0.0, 0.0), "end": (0.0, 0.0)}

    def check(self, name: str, play: Play) -> None:
        """Errors: SystemExit if a task does not end as it must."""
        self._server.log()
        self._played(name, play, range(len(self._tasks)), 1)

    def bare(self) -> dict[str, float]:
        """The commands of an episode, and the one that only mini-swe-agent runs."""
        found = [bare(task, task.commands()) for task in self._tasks]
        ends = [bare(self._tasks[0], [END]) for _ in range(10)]
        self._bare = {name: (statistics.mean(wall for wall, _ in pairs), statistics.mean(cpu for _, cpu in pairs))
                      for name, pairs in (("all", found), ("end", ends))}  # fmt: skip
        wall_s, cpu_s = self._bare["all"]
        return {"commands ms an episode": wall_s * 1e3, "commands CPU ms": cpu_s * 1e3}

    def measure(self, name: str, play: Play) -> dict[str, float]:
        found: dict[str, float] = {}
        for at_once, count in self._counts.items():
            numbers = [number % len(self._tasks) for number in range(count)]
            self._server.log()
            played = self._played(name, play, numbers, at_once)
            log = self._server.log()
            found[f"episodes/s at {at_once}"] = count / played["wall_s"]
            found[f"CPU s an episode at {at_once}"] = played["cpu_s"] / count
            if at_once == 1:
                found |= self._own(name, played, log)
        return found

    def _own(self, name: str, played: Played, log: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Of episodes that were played one at a time: what neither the server nor the commands took, ms."""
        count = len(played["episodes"])
        bare_s, bare_cpu_s = (
            every + (end if "mini" in name else 0.0)
            for every, end in zip(self._bare["all"], self._bare["end"], strict=True)
        )
        walls = sum(seconds for _, seconds, _ in played["episodes"]) / count
        serving = sum(entry["sent"] - entry["came"] for entry in log) / count
        gaps = sum(after["came"] - before["sent"] for before, after in itertools.pairwise(log)
                   if after["number"]) / count  # fmt: skip
        own, between = walls - serving - bare_s, gaps - self._bare["all"][0]
        return {"own ms a turn": own / TURNS * 1e3, "between ms": between / (TURNS - 1) * 1e3,
                "start ms": (own - between) * 1e3,
                "own CPU ms a turn": (played["cpu_s"] / count - bare_cpu_s) / TURNS * 1e3}  # fmt: skip

    def _played(self, name: str, play: Play, numbers: Sequence[int], at_once: int) -> Played:
        played = play(numbers, at_once)
        if wrong := [mark for mark, _, right in played["episodes"] if not right]:
            raise SystemExit(f"{name} did not repair {', '.join(wrong)}")
        return played


def work_file(folder: Path, tasks: Sequence[Repository]) -> Path:
    """The tasks as the peers read them."""
    listed = [{"mark": task.mark, "prompt": task.prompt, "workspace": dict(task.workspace), "path": task.path,
               "repaired": task.repaired()} for task in tasks]  # fmt: skip
    path = folder / "tasks.json"
    path.write_text(json.dumps({"tasks": listed, "variables": VARIABLES}))
    return path


def values_of(rows: Sequence[Row], peers: Sequence[str], most: int) -> dict[str, float]:
    """The goals' values; NaN for what was not measured, or not on a quiet machine. most: episodes at once."""
    commands_ms, commands_cpu_ms = (
        median(rows, "bare", name) for name in ("commands ms an episode", "commands CPU ms")
    )
    is_quiet = commands_ms <= BUSY * commands_cpu_ms
    values = {"own_ms_a_turn": median(rows, "etude", "own ms a turn") if is_quiet else math.nan}
    for goal, arm in (
        ("mini_bubblewrap", "mini, bubblewrap"),
        ("mini_local", "mini, local"),
        ("verifiers", "verifiers"),
    ):
        for name, quantity in (("own", "own ms a turn"), ("episodes", f"episodes/s at {most}"),
                               ("cpu", f"CPU s an episode at {most}")):  # fmt: skip
            there = arm in peers and (is_quiet or name == "cpu")
            values[f"{goal}_{name}"] = ratio(rows, "etude", arm, quantity) if there else math.nan
    return values


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mini", help="Python of a virtual environment that has mini-swe-agent")
    parser.add_argument("--verifiers", help="Python of a virtual environment that has verifiers and uv")
    parser.add_argument("--tasks", type=int, default=20, help="how many of the tasks")
    parser.add_argument("--at-once", type=_counts, default={1: 20, 8: 24, 32: 32},
                        help="episodes at once and how many of them: 1=20,8=24,32=32")  # fmt: skip
    chosen = parser.parse_args()
    tasks = repositories(chosen.tasks)
    server = Server(len(tasks))
    folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
    bench = Bench(tasks, server, chosen.at_once)
    harnesses: dict[str, Play] = {
        "etude": Etude(tasks, server.url, SHELL), "etude, file tools": Etude(tasks, server.url, FILES),
    }  # fmt: skip
    peers: list[Peer] = []
    try:
        work = work_file(folder, tasks)
        if chosen.mini:
            peers.append(Peer(chosen.mini, "mini_peer.py", server.url, work))
            harnesses |= {f"mini, {kind}": peers[-1].play(kind) for kind in ("bubblewrap", "local")}
        if chosen.verifiers:
            peers.append(Peer(chosen.verifiers, "verifiers_peer.py", server.url, work))
            harnesses["verifiers"] = peers[-1].play("subprocess")
        for name, play in harnesses.items():
            bench.check(name, play)
            print(f"{name}: all {len(tasks)} repaired, nothing else changed", flush=True)
        arms: dict[str, Callable[[], Mapping[str, float]]] = {"bare": bench.bare}
        arms |= {name: lambda name=name, play=play: bench.measure(name, play) for name, play in harnesses.items()}
        rows = in_turn(arms, repeats=chosen.repeats)
    finally:
        for peer in peers:
            peer.close()
        server.close()
        shutil.rmtree(folder)
    assert "torch" not in sys.modules
    limits = {"own_ms_a_turn": "a request over HTTP, and a process in its sandbox"}
    report("harness", rows, values_of(rows, list(harnesses), max(chosen.at_once)), chosen.json, limits=limits)


def _counts(text: str) -> dict[int, int]:
    try:
        return {int(at_once): int(count) for at_once, count in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError("as in 1=20,8=40") from error


if __name__ == "__main__":
    main()
