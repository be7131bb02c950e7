"""`etude weights`: what a store holds, and whether it is sound."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from etude.cli.options import RUNS, Json, Runs, show

app = typer.Typer(help="Published versions of the policy.", no_args_is_help=True)
Where = Annotated[str, typer.Argument(help="A run's name or folder, or a store's URL (file://, s3://).")]


def _url(where: str, runs: object) -> str:
    from pathlib import Path

    from etude.build import store_url
    from etude.cli.options import find_run

    return where if "://" in where else store_url(find_run(where, Path(str(runs))))


@app.command("list")
def list_(where: Where, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Every version: what it continues, its size, whether it is alive."""
    from etude.weights.store import open_store
    from etude.weights.verify import list_versions

    rows = [
        {
            "version": row.version.name,
            "step": row.version.step,
            "parent": row.parent.name if row.parent else None,
            "kind": "full" if row.full else "delta",
            "bytes": row.nbytes,
            "state": row.state,
            "pins": ",".join(row.pins),
            "published": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.modified)),
        }
        for row in list_versions(open_store(_url(where, runs)))
    ]
    show(rows, as_json=as_json)


@app.command("verify")
def verify_(where: Where, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Rebuild every version with all digests checked. Exit code 1 if anything is missing or damaged."""
    from etude.weights.store import open_store
    from etude.weights.verify import verify

    found = verify(open_store(_url(where, runs)))
    problems = list(found.problems) or ([] if found.versions else ["it holds no version"])
    row = {"versions": found.versions, "blobs": found.blobs, "bytes": found.nbytes, "problems": problems}
    if as_json:
        print(json.dumps(row))
    else:
        print(f"{found.versions} versions in {found.blobs} blobs, {found.nbytes} bytes: {len(problems)} problems")
        for problem in problems:
            print(f"  {problem}")
    if problems:
        raise typer.Exit(1)
