"""Does a run keep its invariants? Read from its files alone, while nobody works in it or after.

ledger      every prompt trained at most once, none lost, steps without a gap
batches     every batch file is the one that the ledger names, and holds groups of its own prompts only
staleness   no trained token is older than the recipe allows
weights     every published version can be rebuilt, all digests checked
policy      trainer and engine gave the same log-probs to the same tokens, but for rounding
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etude.config import convert, read_tree
from etude.errors import EtudeError, RunError
from etude.frames import decode
from etude.metrics import read_rows
from etude.rl.ledger import Ledger
from etude.rl.policy_measures import Measure, policy_measures, policy_problems
from etude.rl.recipe import RLRecipe
from etude.rl.run_folder import RunFolder, digest
from etude.types import Batch
from etude.weights.manifests import head, manifest_key
from etude.weights.store import open_store
from etude.weights.verify import verify


def audit_run(run: Path, store_url: str, *, only: str | None = None) -> dict[str, list[str]]:
    """Problems by check, each a sentence. Errors: RunError for an unknown check or a folder that is no run."""
    folder = RunFolder.open(run)
    checks: dict[str, Callable[[], list[str]]] = {
        "ledger": lambda: _ledger(folder),
        "batches": lambda: _batches(folder),
        "staleness": lambda: _staleness(folder),
        "weights": lambda: _weights(folder, store_url),
        "policy": lambda: _policy(folder),
    }
    if only is not None and only not in checks:
        raise RunError(f"no check {only!r}", hint=f"checks: {', '.join(checks)}")
    return {name: _guarded(check) for name, check in checks.items() if only in (None, name)}


def _guarded(check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except EtudeError as error:
        return [str(error)]


def _weights(folder: RunFolder, store_url: str) -> list[str]:
    store = open_store(store_url)
    problems = list(verify(store).problems)
    if folder.phase != "new" and not problems and head(store) is None:
        problems.append(f"{store_url} holds no version")
    end = folder.info().get("end_version")
    if end and store.head(manifest_key(*end)) is None:
        problems.append(f"the last version, {end[0]}.{end[1]}, is gone")
    return problems


def _policy(folder: RunFolder) -> list[str]:
    tree = read_tree(folder.path / "recipe.toml")
    recipe = convert(tree["rl"], RLRecipe, where="recipe.toml")
    is_rounded = tree.get("weights", {}).get("publish_dtype") != "float32"
    return policy_problems(measure_policy(folder), is_rounded=is_rounded, filters=recipe.plausibility > 0)


def measure_policy(folder: RunFolder) -> list[Measure]:
    """Errors: StoreError for a damaged metrics file."""
    return policy_measures(read_rows(folder.path / "metrics.jsonl"))


def _ledger(folder: RunFolder) -> list[str]:
    path = folder.path / "ledger.sqlite"
    if not path.is_file():
        return [] if folder.phase in ("new", "before") else [f"{path} is missing"]
    ledger = Ledger(path)
    try:
        return ledger.audit()
    finally:
        ledger.close()


def _read_batches(folder: RunFolder) -> tuple[list[Batch], list[str]]:
    problems, batches = [], []
    ledger = Ledger(folder.path / "ledger.sqlite")
    try:
        rows = ledger.batches()
    finally:
        ledger.close()
    for row in rows:
        path = folder.batch(row.step)
        if not path.is_file():
            problems.append(f"{path} is missing")
            continue
        data = path.read_bytes()
        if digest(data) != row.digest:
            problems.append(f"{path} is not the batch that the ledger names")
            continue
        batch = decode(data, Batch)
        strangers = {sample.origin.key for sample in batch.samples} - set(row.keys)
        if batch.step != row.step or strangers:
            problems.append(f"{path} holds samples of other prompts: {sorted(strangers)}")
        batches.append(batch)
    return batches, problems


def _batches(folder: RunFolder) -> list[str]:
    if not (folder.path / "ledger.sqlite").is_file():
        return []
    return _read_batches(folder)[1]


def _staleness(folder: RunFolder) -> list[str]:
    if not (folder.path / "ledger.sqlite").is_file():
        return []
    tree = read_tree(folder.path / "recipe.toml")
    bound = convert(tree["rl"], RLRecipe, where="recipe.toml").max_staleness
    problems = []
    for batch in _read_batches(folder)[0]:
        oldest = min((run.version.step for sample in batch.samples for run in sample.versions), default=batch.step - 1)
        if batch.step - 1 - oldest > bound:
            problems.append(
                f"batch {batch.step} trains on a token of step {oldest}: {batch.step - 1 - oldest} > {bound}"
            )
    return problems
