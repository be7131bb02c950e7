"""`etude tasks`: build, check, show and count tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import RUNS, Json, Overrides, RunName, Runs, find_run, show, stderr

app = typer.Typer(help="Tasks: pieces of work with a way to tell whether they were done.", no_args_is_help=True)
Address = Annotated[str, typer.Argument(help="etude:repair/SPLIT or FILE/SPLIT; train, heldout, final or base.")]


@app.command("build")
def build(overrides: Overrides = None, as_json: Json = False) -> None:
    """Make the repair tasks from pinned packages: plant faults in real functions, keep those that checks can tell.

    Overrides are those of the builder's recipe, e.g. out=tasks.zst workers=2 seed=1.
    """
    from etude.build import build_tasks

    counts = build_tasks(overrides or [])
    print(json.dumps(counts) if as_json else "\n".join(f"{name}: {count}" for name, count in counts.items()))


@app.command("functions")
def functions(
    out: Annotated[Path, typer.Argument(help="The file to write.")] = Path("functions.jsonl.zst"),
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Read the pinned packages' functions and split them: what pretraining learns from and `build` can start from.

    Overrides are those of the builder's recipe, e.g. cache=FOLDER workers=2.
    """
    from etude.build import write_functions

    counts = write_functions(out, overrides or [])
    print(json.dumps(counts) if as_json else "\n".join(f"{name}: {count}" for name, count in counts.items()))


@app.command("check")
def check(
    address: Address,
    limit: Annotated[int | None, typer.Option(help="Only the first so many tasks.")] = None,
    as_json: Json = False,
) -> None:
    """Run every task's checks in a sandbox: its workspace must fail, its reference must pass."""
    from etude.build import check_task_file

    problems = check_task_file(address, limit)
    if as_json:
        print(json.dumps(problems))
    for line in problems:
        stderr().print(line, markup=False)
    if problems:
        raise typer.Exit(1)
    if not as_json:
        print("ok")


@app.command("show")
def show_(
    address: Address,
    number: Annotated[int, typer.Argument(help="Which task, from 0.")] = 0,
    as_json: Json = False,
) -> None:
    """Print one task: prompt, files, checks, source."""
    import msgspec

    from etude.code.view import numbered
    from etude.errors import TaskError
    from etude.tasks.file import load_tasks

    tasks = load_tasks(address)
    if not 0 <= number < len(tasks):
        raise TaskError(f"{address} has no task {number}", hint=f"it holds {len(tasks)}")
    task = tasks[number]
    if as_json:
        print(json.dumps(msgspec.to_builtins(task)))
        return
    print(f"task    {task.task_id}\nprompt  {task.prompt}")
    print("\n".join(f"{key:7} {value}" for key, value in task.source.items()))
    for path, text in task.workspace.items():
        print(f"\n{path}\n{numbered(text)}")
    for item in task.verifier.checks:
        print(f"{'shown ' if item.visible else 'hidden'}  {item.call} -> {item.expected}")


@app.command("rates")
def rates(
    run: RunName,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("rates.zst"),
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Keep how often a run's starting policy solved each task, for `tasks.rates` of a recipe: tasks that it solves
    sometimes teach most.

    To measure training tasks: etude rl RECIPE tasks.heldout=etude:repair/train tasks.train=etude:repair/base
    tasks.solve_rate=[0,1] eval.tasks=6000 eval.k=4 --run rates; stop it when the first measurement is done.
    """
    from etude.build import write_run_rates

    counts = write_run_rates(find_run(run, runs), out)
    lines = (f"{name} solved: {count} tasks" for name, count in counts.items())
    print(json.dumps(counts) if as_json else "\n".join(lines))


@app.command("stats")
def stats(
    file: Annotated[Path | None, typer.Argument(help="A task file; default: the one that ships.")] = None,
    as_json: Json = False,
) -> None:
    """Counts by split, kind of fault and package."""
    from etude.tasks.stats import counts

    rows = counts(file)
    if as_json:
        print(json.dumps(rows))
        return
    for name, table in rows.items():
        print(f"\n{name}")
        show(table, as_json=False)
