"""kill -9 of every process, at named points and at random times: the same command goes on, and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from etude.killpoints import POINTS
from etude.rl.audit import audit_run
from etude.rl.ledger import Ledger
from rl.small_run import command, run_to_the_end, write_small_recipe

STEPS = 5
ORCHESTRATOR = {
    "group-written", "group-scored", "batch-written", "batch-recorded", "step-recorded", "eval-written"
}  # fmt: skip


def prove_sound(run: Path) -> None:
    """Nothing lost, nothing trained twice, every version whole, and the run is finished."""
    problems = audit_run(run, f"file://{run}/weights")
    assert problems == {"ledger": [], "batches": [], "staleness": [], "weights": []}
    ledger = Ledger(run / "ledger.sqlite")
    counts, batches = ledger.counts(), ledger.batches()
    ledger.close()
    assert [batch.step for batch in batches] == list(range(1, STEPS + 1))
    assert counts["batched"] == 3 * STEPS
    assert json.loads((run / "run.json").read_text())["phase"] == "done"
    assert json.loads((run / "result.json").read_text())["steps"] == STEPS


def children(pid: int) -> Iterator[psutil.Process]:
    try:
        yield from psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert not alive, f"left behind: {alive}"


IN_CI = ("batch-written", "trained", "swap-staged")
"""One of each kind of process; the others are of the campaign, `pytest -m campaign tests/rl/test_kill.py`."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if point in IN_CI else pytest.mark.campaign) for point in POINTS]
)
def test_a_process_killed_at_a_named_point_costs_nothing(point: str, tmp_path: Path) -> None:
    recipe, runs, marker = write_small_recipe(tmp_path, steps=STEPS), tmp_path / "runs", tmp_path / "killed"
    environment = dict(os.environ) | {"ETUDE_KILL_AT": f"{point}:2:{marker}"}
    first = subprocess.run(command(recipe, runs), capture_output=True, text=True, timeout=300, env=environment)
    assert marker.exists(), f"the point was never reached: {first.stderr[-3000:]}"
    if point in ORCHESTRATOR:
        assert first.returncode == -signal.SIGKILL
        run_to_the_end(recipe, runs)
    else:
        assert first.returncode == 0, first.stderr[-3000:]  # a worker's death is mended by the run itself
    prove_sound(runs / "small")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_processes_killed_at_random_times_cost_nothing(tmp_path: Path) -> None:
    """Ten kills: orchestrator, trainer, engine and sandboxes, whatever lives at that moment."""
    recipe, runs = write_small_recipe(tmp_path, steps=STEPS), tmp_path / "runs"
    rng = random.Random(7)
    kills = 0
    for number in range(40):
        process = subprocess.Popen(command(recipe, runs), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        victim_kind = ("orchestrator", "trainer", "engine", "sandbox")[number % 4]
        while process.poll() is None and kills < 10:
            time.sleep(rng.uniform(2.0, 12.0))
            family = list(children(process.pid))
            victims = [process.pid] if victim_kind == "orchestrator" else _of_kind(family, victim_kind)
            if process.poll() is None and victims:
                os.kill(rng.choice(victims), signal.SIGKILL)
                kills += 1
                if victim_kind == "orchestrator":
                    process.wait(timeout=30)
                    wait_until_gone(family)
                break
        if process.poll() is None and victim_kind != "orchestrator":
            process.send_signal(signal.SIGINT) if kills < 10 else None
        process.wait(timeout=300)
        if process.returncode == 0:
            break
    assert kills >= 10
    prove_sound(runs / "small")


def _of_kind(family: list[psutil.Process], kind: str) -> list[int]:
    found = []
    for process in family:
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if kind == "sandbox" and words and "bwrap" in words[0]:
            found.append(process.pid)
        if kind in words or (kind == "engine" and any(word.startswith(("engine-", "eval-")) for word in words)):
            found.append(process.pid)
    return found
