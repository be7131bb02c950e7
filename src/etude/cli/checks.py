"""`etude check RUN`: does a run keep its invariants?"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from etude.cli.options import RUNS, Json, RunName, Runs, find_run, stderr


def check(
    run: RunName,
    runs: Runs = RUNS,
    only: Annotated[
        str | None, typer.Option("--only", help="One check: ledger, batches, staleness, weights, policy.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also train every batch again: the last version must come out bit for bit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Prove from the files alone that nothing was lost or trained twice, and that every version is whole."""
    from etude.build import check_run, measure_policy

    folder = find_run(run, runs)
    problems = check_run(folder, only=only, replay=replay)
    measures = measure_policy(folder) if only == "policy" else []
    if as_json:
        print(json.dumps(problems | {"measures": measures} if only == "policy" else problems))
    elif only == "policy":
        _print_measures(measures)
    for name, found in problems.items():
        if not as_json:
            print(f"{name}: {'ok' if not found else f'{len(found)} problems'}")
        for line in found:
            stderr().print(f"  {line}", markup=False)
    if any(problems.values()):
        raise typer.Exit(1)


def _print_measures(measures: list[dict[str, Any]]) -> None:
    table = Table("measure", "mean, share or sum", "p50", "p99", "of", box=None)
    for line in measures:
        values = ("" if line[name] is None else f"{line[name]:.3g}" for name in ("value", "p50", "p99"))
        table.add_row(line["name"], *values, f"{line['count']:,}")
    Console(width=100).print(table if measures else "no step was recorded yet")
