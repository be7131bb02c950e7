"""The benchmark of harnesses, on two tasks and without peers: it repairs them, and writes what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_the_harness_benchmark_repairs_its_tasks_and_judges_every_goal(tmp_path: Path) -> None:
    path = tmp_path / "harness.json"
    options = ["--tasks", "2", "--repeats", "1", "--at-once", "1=2,2=2", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "harness.py"), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "etude, file tools: all 2 repaired, nothing else changed" in done.stdout
    found = json.loads(path.read_text())
    wanted = [goal["name"] for goal in tomllib.loads((FOLDER / "goals.toml").read_text())["harness"]]
    assert [goal["name"] for goal in found["goals"]] == wanted
    assert all(goal["value"] is None for goal in found["goals"] if goal["name"] != "own_ms_a_turn")  # no peers
    quantities = {row["quantity"]: row["median"] for row in found["rows"] if row["arm"] == "etude"}
    assert quantities["episodes/s at 2"] > 0
    assert quantities["CPU s an episode at 1"] > 0
