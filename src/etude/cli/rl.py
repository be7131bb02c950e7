"""`etude quickstart` and `etude rl`: train by reinforcement learning."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import RUNS, Json, Overrides, Runs, stderr

DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the recipe and print it resolved; run nothing.")]


def quickstart(overrides: Overrides = None, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Learn to repair real code here, in minutes. Again: resumes an unfinished run, else makes a new one."""
    _run(Path("quickstart.toml"), "quickstart", overrides or [], runs, as_json)


def rl(
    recipe: Annotated[Path, typer.Argument(help='A recipe with stage = "rl", or the name of a shipped one.')],
    overrides: Overrides = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of the run; default: the recipe's name.")] = None,
    runs: Runs = RUNS,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train by asynchronous, single-epoch RL. The same command resumes an unfinished run of the same recipe."""
    if dry_run:
        from etude.build import load_recipe
        from etude.config import resolved_text

        print(resolved_text("rl", load_recipe(recipe, overrides or [], stage="rl")), end="")
        return
    _run(recipe, run or recipe.stem, overrides or [], runs, as_json)


def _run(recipe: Path, name: str, overrides: list[str], runs: Path, as_json: bool) -> None:
    from etude.build import load_recipe, run_rl
    from etude.report.terminal import result_text
    from etude.rl.run_folder import choose

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a script started us behind itself
    started = float(os.environ.get("ETUDE_STARTED", time.time()))
    stage = load_recipe(recipe, overrides, stage="rl")
    folder, resumed = choose(runs, name, stage="rl", recipe=stage, seed=stage.rl.seed)
    console = stderr()
    console.print(f"{'resuming' if resumed else 'new'} run {folder.path}")
    try:
        result = run_rl(folder, stage, started=started)
    except KeyboardInterrupt:
        console.print(
            f"\nstopped; everything up to the last step is kept. Go on: the same command, or "
            f"etude runs resume {folder.path.name}"
        )
        raise
    if as_json:
        print(json.dumps(result))
    else:
        print(result_text(folder.path))
