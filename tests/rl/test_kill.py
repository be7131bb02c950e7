"""kill -9 of every process at named points: the same command goes on, and nothing is lost.

A minute a point: one of each kind of process in `.ci/run`, the others by hand, as the twenty kills of test_chaos.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

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
    assert problems == {"ledger": [], "batches": [], "staleness": [], "policy": [], "weights": []}
    ledger = Ledger(run / "ledger.sqlite")
    counts, batches = ledger.counts(), ledger.batches()
    ledger.close()
    assert [batch.step for batch in batches] == list(range(1, STEPS + 1))
    assert counts["batched"] == 3 * STEPS
    assert json.loads((run / "run.json").read_text())["phase"] == "done"
    assert json.loads((run / "result.json").read_text())["steps"] == STEPS


IN_CI = ("batch-written", "trained", "swap-staged")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[] if point in IN_CI else pytest.mark.campaign) for point in POINTS]
)
def test_a_process_killed_at_a_named_point_costs_nothing(point: str, tmp_path: Path) -> None:
    recipe, runs, plan = write_small_recipe(tmp_path, steps=STEPS), tmp_path / "runs", tmp_path / "kill"
    plan.write_text(f"{point} 2")
    environment = dict(os.environ) | {"ETUDE_KILL_AT": str(plan)}
    first = subprocess.run(command(recipe, runs), capture_output=True, text=True, timeout=300, env=environment)
    assert not plan.exists(), f"the point was never reached: {first.stderr[-3000:]}"
    if point in ORCHESTRATOR:
        assert first.returncode == -signal.SIGKILL
        run_to_the_end(recipe, runs)
    else:
        assert first.returncode == 0, first.stderr[-3000:]  # a worker's death is mended by the run itself
    prove_sound(runs / "small")
