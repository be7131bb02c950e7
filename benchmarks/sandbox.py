"""How fast sandboxes are: ready ones a second, and the time of each thing that one can do.

    python benchmarks/sandbox.py --json FILE

Ready means: acquired, and a Python snippet of an agent answered. Beside it stands what anybody can have without Etude:
a fresh `bwrap ... python3 -c SNIPPET` with namespaces of its own and the system read-only, as many side by side. Its
isolation is weaker: no limits, no system-call filter, no workspace that is kept.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import arguments, in_turn, median, percentile, ratio, report

from etude.sandbox.namespace import NamespaceSandbox
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
from etude.sandbox.tree import find_bubblewrap

SNIPPET = "print(6 * 7)"
AT_ONCE = 8
FILES = {f"src/module_{number}.py": f"VALUE = {number}\n" * 50 for number in range(20)}


async def _in_parallel(count: int, work: Callable[[], Awaitable[None]]) -> float:
    """`work` done `count` times, AT_ONCE side by side; seconds."""
    left = iter(range(count))

    async def one() -> None:
        for _ in left:
            await work()

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    return time.perf_counter() - start


async def _times(count: int, work: Callable[[], Awaitable[object]]) -> list[float]:
    """Milliseconds of each of `count` calls, one after the other."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        await work()
        found.append((time.perf_counter() - start) * 1e3)
    return found


async def _answered(sandbox: NamespaceSandbox) -> None:
    done = await sandbox.run_python(SNIPPET, timeout_s=20)
    if done.stdout != b"42\n":
        raise SystemExit(f"a sandbox answered {done!r}")


async def _ours(count: int) -> dict[str, float]:
    async with NamespacePool(SandboxRecipe(spares=AT_ONCE, nice=0)) as pool:

        async def ready() -> None:
            sandbox = await pool.acquire({})
            await _answered(sandbox)
            await sandbox.close()

        await _in_parallel(AT_ONCE, ready)
        found = {"ready_per_s": count / await _in_parallel(count, ready)}
    async with NamespacePool(SandboxRecipe(spares=0, nice=0)) as pool:  # nothing kept ready: a start is a start
        kept: list[NamespaceSandbox] = []

        async def start() -> None:
            kept.append(await pool.acquire({}))

        async def fork() -> None:
            kept.append(await sandbox.fork())

        starts = await _times(count // 8, start)
        sandbox = await pool.acquire(FILES)
        await _answered(sandbox)
        times = {
            "start": starts,
            "python": await _times(count, lambda: _answered(sandbox)),
            "exec": await _times(count, lambda: sandbox.exec(["/bin/true"], timeout_s=20)),
            "snapshot": await _times(count // 8, sandbox.snapshot),
            "fork": await _times(count // 8, fork),
        }
        found["memory_mb"] = _private_mb([one.channel.pid for one in kept[: count // 8]])
        for one in (*kept, sandbox):
            await one.close()
    for name, values in times.items():
        found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = percentile(values, 0.5), percentile(values, 0.99)
    return found


def _private_mb(pids: list[int]) -> float:
    """Memory of a waiting sandbox that it does not share, MB: the mean over processes."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
    return total / len(pids) / 1024


def _bare(count: int) -> dict[str, float]:
    command = [find_bubblewrap(), "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev",
               "--proc", "/proc", "--tmpfs", "/tmp", "--chdir", "/tmp", os.path.realpath(sys.executable), "-I", "-S",
               "-c", SNIPPET]  # fmt: skip

    def one(_: int) -> float:
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, check=True)
        if done.stdout != b"42\n":
            raise SystemExit(f"bubblewrap answered {done!r}")
        return (time.perf_counter() - start) * 1e3

    one(0)
    start = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(one, range(count)))
    elapsed = time.perf_counter() - start
    times = [one(number) for number in range(count // 8)]
    return {"ready_per_s": count / elapsed, "start_p50_ms": percentile(times, 0.5),
            "start_p99_ms": percentile(times, 0.99)}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=400, help="sandboxes of one round")
    chosen = parser.parse_args()
    rows = in_turn(
        {"etude": lambda: asyncio.run(_ours(chosen.count)), "bubblewrap + python": lambda: _bare(chosen.count)},
        repeats=chosen.repeats,
    )
    values = {
        "ready_per_s": median(rows, "etude", "ready_per_s"),
        "exec_p50_ms": median(rows, "etude", "exec_p50_ms"),
        "times_bare_bubblewrap": ratio(rows, "etude", "bubblewrap + python", "ready_per_s"),
    }
    limits = {"ready_per_s": "clone with six namespaces, four mounts, one fork and their page faults"}
    report("sandbox", rows, values, chosen.json, limits=limits)


if __name__ == "__main__":
    main()
