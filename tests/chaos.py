"""Kill -9, again and again: half at named points of the protocols, half at random times, whatever lives then.

    python tests/chaos.py --kills 200                     # an hour; prints what was killed, and the proof
    pytest -m campaign tests/test_chaos.py                # twenty kills

A small real run is started by its command. Its orchestrator, trainer, engine and sandboxes are killed in turn; whenever
the orchestrator is gone the same command is given again. After the last kill the run goes to its end, and then the
ledger must show that nothing was lost or trained twice, every version must be whole, and training all batches again
must give the last version bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from etude.build import check_run
from etude.killpoints import POINTS
from etude.rl.ledger import Ledger
from rl.small_run import command, write_small_recipe

VICTIMS = ("orchestrator", "trainer", "engine", "sandbox")
STEPS = 60
POINT_WAIT_S = 40.0
"""Longest wait for a named point before the next plan."""


@dataclass
class Chaos:
    """One run that is killed. `kills` counts by what was hit."""

    folder: Path
    seed: int = 0
    steps: int = STEPS
    kills: collections.Counter[str] = field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recipe = write_small_recipe(self.folder, steps=self.steps)
        self.runs, self.plan = self.folder / "runs", self.folder / "kill"
        self.run = self.runs / "small"
        self.rng = random.Random(self.seed)
        self.process: subprocess.Popen[bytes] | None = None

    def go_on(self) -> None:
        """Give the command, unless it is running."""
        if self.process is None or self.process.poll() is not None:
            environment = dict(os.environ) | {"ETUDE_KILL_AT": str(self.plan)}
            dials = ["eval.every=10", "budget.wall_s=100000"]
            with (self.folder / "stderr.txt").open("ab") as log:
                self.process = subprocess.Popen(
                    command(self.recipe, self.runs, *dials), stdout=subprocess.DEVNULL, stderr=log, env=environment
                )

    def is_done(self) -> bool:
        return (self.run / "result.json").exists()

    def kill_at(self, point: str) -> None:
        """Have a process killed at a named point, or give up after POINT_WAIT_S."""
        self.plan.write_text(f"{point} {self.rng.randint(1, 3)}")
        deadline = time.monotonic() + POINT_WAIT_S
        while self.plan.exists() and time.monotonic() < deadline and not self.is_done():
            self.go_on()
            time.sleep(0.05)
        if self.plan.exists():
            self.plan.unlink(missing_ok=True)
        else:
            self.kills[point] += 1

    def kill_one(self, kind: str) -> None:
        """Kill a process of this kind at a random moment."""
        self.go_on()
        assert self.process is not None
        time.sleep(self.rng.uniform(0.5, 12.0))
        family = list(descendants(self.process.pid))
        victims = [self.process.pid] if kind == "orchestrator" else of_kind(family, kind)
        if self.process.poll() is None and victims:
            os.kill(self.rng.choice(victims), signal.SIGKILL)
            self.kills[kind] += 1
            if kind == "orchestrator":
                self.process.wait(timeout=30)
                _, alive = psutil.wait_procs(family, timeout=20)
                assert not alive, f"left behind: {alive}"

    def finish(self, timeout_s: float = 900.0) -> None:
        """Let it go to its end. Errors: AssertionError with the last words."""
        deadline = time.monotonic() + timeout_s
        while not self.is_done():
            self.go_on()
            assert time.monotonic() < deadline, f"it does not end: {self.last_words()}"
            time.sleep(0.2)
        assert self.process is not None
        assert self.process.wait(timeout=60) == 0, self.last_words()

    def last_words(self) -> str:
        return (self.folder / "stderr.txt").read_text(errors="replace")[-3000:]

    def prove(self) -> None:
        """Errors: AssertionError naming what is wrong."""
        problems = check_run(self.run, replay=True)
        assert not any(problems.values()), problems
        ledger = Ledger(self.run / "ledger.sqlite")
        try:
            assert [batch.step for batch in ledger.batches()] == list(range(1, self.steps + 1))
            assert ledger.counts()["batched"] == 3 * self.steps
        finally:
            ledger.close()
        assert json.loads((self.run / "result.json").read_text())["steps"] == self.steps


def descendants(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from psutil.Process(pid).children(recursive=True)


def of_kind(family: list[psutil.Process], kind: str) -> list[int]:
    """Processes of a kind; of sandboxes the machine under them and each one in it."""
    found = []
    for process in family:
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        is_engine = any(word.startswith(("engine-", "eval-")) for word in words)
        is_sandbox = any("inside_nest" in word or word.endswith("bwrap") for word in words)
        if (
            (kind == "trainer" and "trainer" in words)
            or (kind == "engine" and is_engine)
            or (kind == "sandbox" and is_sandbox)
        ):
            found.append(process.pid)
    return found


def campaign(folder: Path, *, kills: int, seed: int = 0) -> collections.Counter[str]:
    """`kills` kills, over as many runs as it takes, each proven. Returns what was hit."""
    total: collections.Counter[str] = collections.Counter()
    number = 0
    while sum(total.values()) < kills:
        chaos = Chaos(folder / f"run-{number}", seed=seed + number)
        turn = number
        while sum(total.values()) + sum(chaos.kills.values()) < kills and not chaos.is_done():
            if turn % 2:
                chaos.kill_one(VICTIMS[turn // 2 % len(VICTIMS)])
            else:
                chaos.kill_at(POINTS[turn // 2 % len(POINTS)])
            turn += 1
            so_far = sum(total.values()) + sum(chaos.kills.values())
            print(f"{so_far} of {kills}: {dict(chaos.kills)}", flush=True)
        chaos.finish()
        chaos.prove()
        total += chaos.kills
        print(f"run {number} is whole after {sum(chaos.kills.values())} kills", flush=True)
        number += 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"))
    chosen = parser.parse_args()
    print(json.dumps(campaign(chosen.folder, kills=chosen.kills, seed=chosen.seed), indent=1))


if __name__ == "__main__":
    main()
