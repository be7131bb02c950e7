"""`etude check RUN`: does a run keep its invariants?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from etude.cli.options import RUNS, Json, RunName, Runs, find_run, stderr


def check(
    run: RunName,
    runs: Runs = RUNS,
    only: Annotated[str | None, typer.Option("--only", help="One check: ledger, batches, weights, staleness.")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also train every batch again: the last version must come out bit for bit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove from the files alone that nothing was lost or trained twice, and that every version is whole."""
    from etude.build import check_run

    problems = check_run(find_run(run, runs), only=only, replay=replay)
    if as_json:
        print(json.dumps(problems))
    for name, found in problems.items():
        if not as_json:
            print(f"{name}: {'ok' if not found else f'{len(found)} problems'}")
        for line in found:
            stderr().print(f"  {line}", markup=False)
    if any(problems.values()):
        raise typer.Exit(1)
