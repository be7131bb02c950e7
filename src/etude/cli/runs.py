"""`etude runs`: list, show, stop, resume."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Annotated

import typer

from etude.cli.options import RUNS, Json, RunName, Runs, find_run, show, stderr

app = typer.Typer(help="List, show, stop and resume runs.", no_args_is_help=True)


@app.command("list")
def list_(runs: Runs = RUNS, as_json: Json = False) -> None:
    """Every run in the folder, newest last."""
    from etude.rl.run_folder import RunFolder

    folders = [RunFolder.open(path.parent) for path in runs.glob("*/run.json")] if runs.is_dir() else []
    rows = []
    for folder in sorted(folders, key=lambda folder: folder.info()["created"]):
        info = folder.info()
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(info["created"]))
        state = "running" if folder.holder() else ("done" if info["phase"] == "done" else "can be resumed")
        rows.append({key: info[key] for key in ("name", "stage", "phase")} | {"state": state, "created": created})
    show(rows, as_json=as_json)


@app.command("show")
def show_(run: RunName, runs: Runs = RUNS, as_json: Json = False) -> None:
    """One run: where it stands, and its result if it has one."""
    from etude.metrics import read_rows
    from etude.rl.run_folder import RunFolder

    folder = RunFolder.open(find_run(run, runs))
    rows = read_rows(folder.path / "metrics.jsonl")
    last = next((row["row"] for row in reversed(rows) if row["kind"] == "step"), None)
    path = folder.path / "result.json"
    result = json.loads(path.read_text()) if path.is_file() else None
    info = folder.info() | {"held_by": folder.holder(), "last_step": last, "result": result}
    if as_json:
        print(json.dumps(info))
        return
    show([{"key": key, "value": json.dumps(value)} for key, value in info.items()], as_json=False)


@app.command("stop")
def stop(
    run: RunName,
    runs: Runs = RUNS,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for a clean end.")] = 30.0,
) -> None:
    """Stop a running run as Ctrl-C does; it can be resumed."""
    from etude.errors import RunError
    from etude.rl.run_folder import RunFolder

    folder = RunFolder.open(find_run(run, runs))
    holder = folder.holder()
    if holder is None:
        stderr().print(f"run {run} is not running")
        return
    os.kill(holder, signal.SIGINT)
    deadline = time.monotonic() + timeout_s
    while folder.holder() is not None:
        if time.monotonic() > deadline:
            raise RunError(f"run {run} did not end in {timeout_s:.0f} s", hint=f"kill -9 {holder} is safe")
        time.sleep(0.1)
    stderr().print(f"stopped; go on with: etude runs resume {run}")


@app.command("resume")
def resume(run: RunName, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Go on with an unfinished run, from its own saved recipe."""
    from etude.build import resume_run

    result = resume_run(find_run(run, runs))
    print(json.dumps(result) if as_json else json.dumps(result, indent=2))
