"""Build repair tasks: real functions, one planted fault each, checks from running the original.

    packages -> harvest -> split --callable, short--> worker processes, one function at a time:
        gather a pool of probes (checks) -> faults (mutate) -> verdicts -> up to N tasks of different kinds
    --> per split: the first task of every function before any second one, packages within their share --> file

The result depends on the recipe's seed and the packages alone: every function has its own random generator, results
are taken in a fixed order, and what ends a call is counted in lines, not in seconds.

What it does not do: check the tasks in the sandbox of training (`check`).
"""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from etude.errors import TaskError
from etude.tasks import checks, harvest, mutate, packages, split
from etude.tasks.file import Entry, write_tasks
from etude.tasks.isolation import Prober
from etude.tasks.recipe import TasksBuildRecipe
from etude.types import IOChecks, Task, digest_of

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how many of its items are done, and how many there are."""
PATH = "solution.py"
HASH_SEEDS = (1, 2, 3)
"""Of the processes that each function runs in."""
TRIED_FAULTS = 24
"""Faults of a function that are run; more than are taken, since some change nothing that a call shows."""
HELDOUT_KIND_SHARE = 0.1
"""Of the held-out and final splits: enough to speak of the kind by itself, too little to hide the others."""
_FILE_SPLIT = {"rl": "train", "heldout": "heldout", "final": "final", "base": "base"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildResult:
    """What a build wrote and what it left out."""

    counts: Mapping[str, int]
    """Split -> tasks."""
    functions: Mapping[str, int]
    """Split -> functions with at least one task."""
    rejected: Mapping[str, int]
    """Why -> functions that make no tasks, see `checks.Rejected`; `faults`: no fault that checks can tell."""
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What one function gave: entries in the order in which they are to be taken, or why there is none."""

    entries: tuple[Entry, ...]
    reason: str


def build(recipe: TasksBuildRecipe, progress: Progress | None = None) -> BuildResult:
    """Write `recipe.out`. Errors: TaskError (packages, functions), SandboxError (no isolation here), OSError."""
    report: Progress = progress or (lambda stage, done, total: None)
    cache = Path(recipe.cache) if recipe.cache else packages.default_cache()
    by_split = _functions(recipe, cache, report)
    licences = _licences(sorted({f.package for functions in by_split.values() for f in functions}), cache)
    jobs = [(name, function) for name in _FILE_SPLIT for function in by_split[name]]
    made: dict[str, list[_Made]] = defaultdict(list)
    rejected: Counter[str] = Counter()
    for (name, _), result in zip(jobs, _make_all(recipe, jobs, report), strict=True):
        made[name].append(result)
        if result.reason:
            rejected[result.reason] += 1
    chosen = {_FILE_SPLIT[name]: _choose(recipe, name, made[name]) for name in _FILE_SPLIT}
    taken = {entry.task.source["package"] for entries in chosen.values() for entry in entries}
    header = write_tasks(Path(recipe.out), chosen, {name: licences[name] for name in sorted(taken)})
    return BuildResult(
        counts={name: len(entries) for name, entries in chosen.items()},
        functions={
            name: len({(e.task.source["module"], e.task.source["function"]) for e in entries})
            for name, entries in chosen.items()
        },
        rejected=dict(sorted(rejected.items())),
        digest=header.digest,
    )


def write_functions(recipe: TasksBuildRecipe, path: Path, progress: Progress | None = None) -> dict[str, int]:
    """Harvest the packages, split what was found, and write it to `path`: for pretraining, and for `recipe.functions`.

    Returns counts by split. Errors: TaskError, OSError.
    """
    cache = Path(recipe.cache) if recipe.cache else packages.default_cache()
    counts: Counter[str] = Counter()
    splits: dict[str, str] = {}
    found = []
    for function, name in _harvest(recipe, cache, progress or (lambda stage, done, total: None)):
        counts[name] += 1
        splits[function.body_key] = name
        found.append(function)
    harvest.write(found, path, splits)
    return {name: counts[name] for name in split.SPLITS}


def _functions(recipe: TasksBuildRecipe, cache: Path, report: Progress) -> dict[str, list[harvest.Function]]:
    """Callable functions that fit, by split, in an order that depends on the seed."""
    by_split: dict[str, list[harvest.Function]] = {name: [] for name in _FILE_SPLIT}
    for function, name in _read(recipe, cache, report):
        if function.callable and name in by_split and _fits(recipe, function):
            by_split[name].append(function)
    for functions in by_split.values():
        functions.sort(key=lambda function: digest_of(str(recipe.seed), function.body_key))
    return by_split


def _read(recipe: TasksBuildRecipe, cache: Path, report: Progress) -> Iterator[tuple[harvest.Function, str]]:
    yield from harvest.read(Path(recipe.functions)) if recipe.functions else _harvest(recipe, cache, report)


def _harvest(recipe: TasksBuildRecipe, cache: Path, report: Progress) -> Iterator[tuple[harvest.Function, str]]:
    packages.fetch(packages.PACKAGES, cache)
    names = [package.name for package in packages.PACKAGES]
    report("harvest", 0, len(names))
    found: list[harvest.Function] = []
    for function in harvest.harvest(packages.PACKAGES, cache, workers=recipe.workers):
        if not found or found[-1].package != function.package:
            report("harvest", names.index(function.package), len(names))
        found.append(function)
    report("harvest", len(names), len(names))
    splits = split.assign(found, {package.name: package.role for package in packages.PACKAGES}).splits
    for function in found:
        if function.body_key in splits:
            yield function, splits[function.body_key]


def _fits(recipe: TasksBuildRecipe, function: harvest.Function) -> bool:
    text = checks.module_text(function.prelude, function.source)
    return len(text) <= recipe.max_chars and text.count("\n") <= recipe.max_lines


def _licences(names: Iterable[str], cache: Path) -> dict[str, str]:
    """Package -> its licence files, one after the other."""
    known = {package.name: package for package in packages.PACKAGES}
    texts = {}
    for name in names:
        files = packages.licence_texts(known[name], cache)
        if not files:
            raise TaskError(f"package {name} carries no licence text", hint="take it out of tasks/packages.py")
        head = f"{name} {known[name].version}, {known[name].licence}\n"
        texts[name] = head + "".join(f"\n--- {file}\n{text.strip()}\n" for file, text in files.items())
    return texts


# Worker processes


class _Worker:
    """One process's probers; a module-level instance lives in each worker."""

    def __init__(self, recipe: TasksBuildRecipe) -> None:
        self.recipe = recipe
        self.stack = ExitStack()
        self.probers = tuple(self.stack.enter_context(Prober(hash_seed=seed)) for seed in HASH_SEEDS)

    def make(self, split_name: str, function: harvest.Function) -> _Made:
        rng = random.Random(digest_of(str(self.recipe.seed), function.body_key))
        pool = checks.gather(function.name, function.prelude, function.source, self.probers, rng)
        if isinstance(pool, checks.Rejected):
            return _Made(entries=(), reason=pool.reason)
        kinds = [*self.recipe.kinds, *([mutate.HELDOUT_KIND] if split_name in ("heldout", "final") else [])]
        faults = mutate.mutate(function.source, rng, kinds, limit=TRIED_FAULTS)
        verdicts = checks.try_faults(function.prelude, [fault.source for fault in faults], pool, self.probers[0])
        told = [(fault, verdict) for fault, verdict in zip(faults, verdicts, strict=True) if verdict.kills]
        entries = []
        for fault, verdict in _ordered(told, rng, self._limit(split_name)):
            chosen = checks.choose(pool, verdict, rng, visible=self.recipe.visible, hidden=self.recipe.hidden)
            if chosen is not None:
                entries.append(_entry(function, fault, chosen))
        return _Made(entries=tuple(entries[: self._limit(split_name)]), reason="" if entries else "faults")

    def _limit(self, split_name: str) -> int:
        recipe = self.recipe
        return {"rl": recipe.train_per_function, "base": recipe.base_per_function}.get(
            split_name, recipe.test_per_function
        )


_worker: _Worker | None = None


def _start(recipe: TasksBuildRecipe) -> None:
    global _worker
    _worker = _Worker(recipe)


def _make(job: tuple[str, harvest.Function]) -> _Made:
    assert _worker is not None
    return _worker.make(*job)


def _make_all(
    recipe: TasksBuildRecipe, jobs: Sequence[tuple[str, harvest.Function]], report: Progress
) -> Iterator[_Made]:
    Prober(hash_seed=HASH_SEEDS[0]).close()  # where it cannot start, here is where that is heard of
    context = multiprocessing.get_context("spawn")
    with context.Pool(recipe.workers, initializer=_start, initargs=(recipe,)) as workers:
        for number, made in enumerate(workers.imap(_make, jobs, chunksize=4), 1):
            report("tasks", number, len(jobs))
            yield made


def _ordered(
    told: list[tuple[mutate.Mutation, checks.Verdict]], rng: random.Random, limit: int
) -> list[tuple[mutate.Mutation, checks.Verdict]]:
    """The held-out kind first (few functions can have it), then different kinds, faults that some calls do not show,
    different lines. Twice `limit`, since some will have too few checks."""
    rng.shuffle(told)
    kinds: Counter[str] = Counter()
    lines: Counter[int] = Counter()
    ordered: list[tuple[mutate.Mutation, checks.Verdict]] = []
    while told and len(ordered) < 2 * limit:
        best = min(
            told,
            key=lambda item: (
                kinds[item[0].kind], item[0].kind != mutate.HELDOUT_KIND, item[1].passes == 0, lines[item[0].line],
            ),
        )  # fmt: skip
        told.remove(best)
        kinds[best[0].kind] += 1
        lines[best[0].line] += 1
        ordered.append(best)
    return ordered


def _entry(function: harvest.Function, fault: mutate.Mutation, chosen: tuple[checks.IOCheck, ...]) -> Entry:
    task = Task.make(
        prompt=f"Repair {function.name}.",
        workspace={PATH: checks.module_text(function.prelude, fault.source)},
        verifier=IOChecks(path=PATH, checks=chosen),
        category="repair",
        source={
            "builder": "mutate", "package": function.package, "version": function.version, "module": function.module,
            "function": function.qualname, "fault": fault.kind, "licence": function.licence,
        },
    )  # fmt: skip
    return Entry(task=task, reference=checks.module_text(function.prelude, function.source))


def _choose(recipe: TasksBuildRecipe, name: str, made: Sequence[_Made]) -> list[Entry]:
    """Up to the split's limit: every function's first task, then the second ones, ...; no task twice."""
    limit = {"rl": recipe.train, "heldout": recipe.heldout, "final": recipe.final, "base": recipe.base}[name]
    share = recipe.max_package_share if name in ("heldout", "final") else 1.0
    queue = [
        result.entries[rank]
        for rank in range(max((len(result.entries) for result in made), default=0))
        for result in made
        if rank < len(result.entries)
    ]
    taken: list[Entry] = []
    of_package: Counter[str] = Counter()
    ids: set[str] = set()
    num_heldout_kind = 0
    for entry in queue:
        package = entry.task.source["package"]
        heldout_kind = entry.task.source["fault"] == mutate.HELDOUT_KIND
        if len(taken) == limit or entry.task.task_id in ids or of_package[package] >= share * limit:
            continue
        if heldout_kind and num_heldout_kind >= HELDOUT_KIND_SHARE * limit:
            continue
        ids.add(entry.task.task_id)
        of_package[package] += 1
        num_heldout_kind += heldout_kind
        taken.append(entry)
    return taken
