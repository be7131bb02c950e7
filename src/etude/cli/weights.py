"""`etude weights`: what a store holds, whether it is sound, and versions taken out of it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli.options import RUNS, Json, Runs, show

if TYPE_CHECKING:
    from etude.weights.pieces import Stored
    from etude.weights.store import Store

app = typer.Typer(help="Published versions of the policy.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A version, as `etude weights list` names it: 1.25.")]
Out = Annotated[Path, typer.Option(help="The file to write.")]
Keep = Annotated[int, typer.Option("--keep-anchors", min=1, help="Anchors of the surviving lineage that stay.")]
Grace = Annotated[float, typer.Option("--grace", min=0.0, help="Seconds; longer than any fetch and publish takes.")]
Where = Annotated[str, typer.Argument(help="A run's name or folder, or a store's URL (file://, s3://).")]


def _url(where: str, runs: object) -> str:
    from etude.build import store_url
    from etude.cli.options import find_run

    return where if "://" in where else store_url(find_run(where, Path(str(runs))))


def _tensors(store: Store, version: str) -> dict[str, Stored]:
    from etude.weights.manifests import named_version
    from etude.weights.pieces import Stored
    from etude.weights.replica import dtypes, fetch

    manifest = named_version(store, version)
    names = dtypes(manifest)
    return {name: Stored(names[name], array) for name, array in fetch(store, manifest).items()}


@app.command("list")
def list_(where: Where, runs: Runs = RUNS, as_json: Json = False) -> None:
    """Every version: what it continues, its size in memory and in the store, whether it is alive."""
    from etude.weights.store import open_store
    from etude.weights.verify import list_versions

    rows = [
        {
            "version": row.version.name,
            "step": row.version.step,
            "parent": row.parent.name if row.parent else None,
            "kind": "anchor" if row.is_anchor else "delta",
            "bytes": row.nbytes,
            "stored": row.whole_bytes + row.change_bytes,
            "delta": row.change_bytes,
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


@app.command("diff")
def diff_(where: Where, old: Name, new: Name, runs: Runs = RUNS, as_json: Json = False) -> None:
    """What changed between two versions, tensor by tensor: weights, coded bytes, and the bound of a code that is told
    how many weights change but not which are likely to."""
    from etude.weights.compare import compare
    from etude.weights.store import open_store

    store = open_store(_url(where, runs))
    changes = list(compare(_tensors(store, old), _tensors(store, new)))
    rows: list[dict[str, Any]] = [
        {"tensor": change.name, "dtype": change.dtype, "weights": change.elements, "changed": change.changed,
         "share": round(change.changed / max(change.elements, 1), 6), "coded_bytes": change.coded_bytes,
         "bound_bytes": round(change.bound_bytes), "bytes": change.nbytes}
        for change in changes
    ]  # fmt: skip
    total: dict[str, Any] = {
        key: sum(row[key] for row in rows) for key in ("weights", "changed", "coded_bytes", "bound_bytes", "bytes")
    }
    share = total["changed"] / max(total["weights"], 1)
    show([*rows, {"tensor": "all", "dtype": "", **total, "share": round(share, 6)}], as_json=as_json)


@app.command("rebuild")
def rebuild_(where: Where, version: Name, out: Out, runs: Runs = RUNS) -> None:
    """Write a version as a safetensors file, rebuilt from its anchor with all digests checked."""
    from etude.weights.export import write_safetensors
    from etude.weights.manifests import named_version
    from etude.weights.store import open_store

    store = open_store(_url(where, runs))
    size = write_safetensors(store, named_version(store, version), out)
    print(f"version {version}: {size} bytes in {out}")


@app.command("gc")
def gc_(where: Where, runs: Runs = RUNS, keep: Keep = 3, grace_s: Grace = 120.0, as_json: Json = False) -> None:
    """Delete versions that nothing needs: not among the last anchors and what follows them, nor pinned, nor leased.

    A version goes when it was not needed for `--grace` seconds, its blobs as long after it: the command waits for both.
    """
    from etude.metrics import progress
    from etude.weights.gc import Collector
    from etude.weights.store import open_store

    collector = Collector(open_store(_url(where, runs)), keep_anchors=keep, grace_s=grace_s)
    wait_s = math.ceil(grace_s) + 1
    rounds = [collector.run()]
    with progress("wait for readers", total=2 * wait_s) as bar:
        for second in range(1, 2 * wait_s + 1):
            time.sleep(1.0)
            bar.advance()
            if second % wait_s == 0:
                rounds.append(collector.run())
    found = {
        "versions": sum(one.manifests for one in rounds),
        "blobs": sum(one.blobs for one in rounds),
        "bytes": sum(one.nbytes for one in rounds),
    }
    if as_json:
        print(json.dumps(found))
    else:
        print(f"{found['versions']} versions and {found['blobs']} blobs deleted, {found['bytes']} bytes")
