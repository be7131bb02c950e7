"""A real run, small: one-line repair tasks, a recipe of seconds, and the command that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from etude.tasks.file import Entry, write_tasks
from etude.types import IOCheck, IOChecks, Task

OPERATORS = (("+", "-"), ("-", "+"), ("*", "+"))


def entry(number: int) -> Entry:
    """One line, one wrong operator. Checks: three calls, one of them shown."""
    right, wrong = OPERATORS[number % len(OPERATORS)]
    name = f"f{number}"
    source = f"def {name}(a, b):\n    return a {{}} b\n"
    calls = [(3, 5), (10, 4), (7, 2)]
    checks = tuple(
        IOCheck(call=f"{name}({a}, {b})", expected=repr(eval(f"{a} {right} {b}")), visible=place == 0)
        for place, (a, b) in enumerate(calls)
    )
    task = Task.make(
        prompt=f"Repair {name}.",
        workspace={"solution.py": source.format(wrong)},
        verifier=IOChecks(path="solution.py", checks=checks),
        category="repair",
        source={"builder": "test", "package": f"p{number % 4}", "function": name, "fault": "operator"},
    )
    return Entry(task=task, reference=source.format(right))


def write_small_tasks(folder: Path, *, train: int = 60, heldout: int = 8) -> Path:
    """A task file with that many tasks a split."""
    path = folder / "small.tasks.zst"
    entries = [entry(number) for number in range(train + heldout)]
    write_tasks(path, {"train": entries[:train], "heldout": entries[train:]}, {})
    return path


def write_small_recipe(folder: Path, *, steps: int = 6, model: str = "etude-nano") -> Path:
    """Everything as in the quickstart, only less of it."""
    tasks = write_small_tasks(folder, train=max(60, 4 * steps))
    path = folder / "small.toml"
    path.write_text(
        f"""
extends = "quickstart.toml"
model = {{ path = "{model}" }}
tasks = {{ train = "{tasks}/train", heldout = "{tasks}/heldout", solve_rate = [0.0, 1.0] }}
engine = {{ replicas = 1 }}
sandbox = {{ spares = 2 }}
agent = {{ max_turns = 4, reply_tokens = 48, max_episodes = 16 }}
rl = {{ groups_per_step = 3, group_size = 4, min_group = 2, max_staleness = 1, min_advantage = 0.0 }}
train = {{ checkpoint_every = 2 }}
eval = {{ k = 2, token_budget = 64, engines = 1 }}
budget = {{ wall_s = 120.0, steps = {steps} }}
"""
    )
    return path


def command(recipe: Path, runs: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "etude.cli.main", "rl", str(recipe), *overrides, "--runs", str(runs), "--json"]


def run_to_the_end(recipe: Path, runs: Path, overrides: Sequence[str] = (), *, timeout_s: float = 240.0) -> str:
    """stdout of the finished command."""
    done = subprocess.run(
        command(recipe, runs, *overrides), capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
