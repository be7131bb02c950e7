"""A real run whose trainer is sharded over two ranks, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from etude.build import check_run
from etude.metrics import read_rows
from rl.small_run import command, write_small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 6


def rank_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RANK") if "trainer" in process.cmdline() else None
    except psutil.Error:
        return None


def test_a_trainer_of_two_ranks_that_loses_one_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recipe, runs = write_small_recipe(tmp_path, steps=STEPS), tmp_path / "runs"
    run = runs / "small"
    process = subprocess.Popen(
        command(recipe, runs, "train.ranks=2", "budget.wall_s=600"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    killed = 0
    while process.poll() is None and not killed:
        rows = read_rows(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
        if any(row["kind"] == "step" and row["row"]["step"] >= 3 for row in rows):
            for child in psutil.Process(process.pid).children(recursive=True):
                if rank_of(child) == "1":
                    os.kill(child.pid, signal.SIGKILL)
                    killed += 1
        time.sleep(0.1)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said[-3000:]
    assert killed == 1
    assert json.loads((run / "result.json").read_text())["steps"] == STEPS
    assert not any(check_run(run, replay=True).values())
