"""Settings of the tasks room: which tasks a run uses, and how the shipped ones are built. Loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import RecipeError
from etude.tasks.mutate import PLAIN_KINDS, TRAIN_KINDS

MAX_WORKERS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksRecipe:
    """The tasks of a run. An address is `etude:repair/SPLIT` or `FILE.zst/SPLIT`."""

    train: str = "etude:repair/train"
    """Tasks that are trained on."""
    heldout: str = "etude:repair/heldout"
    """Tasks that are only measured on, of packages that training never saw."""
    solve_rate: tuple[float, float] = (0.0, 1.0)
    """Training uses the tasks that a policy solved in so many of its attempts, both ends included. (0, 1): all."""
    rates: str = "etude:repair"
    """Where these rates are: `etude:repair`, the shipped model on 6,000 of the shipped tasks, or a file of `etude tasks
    rates`. Not read where all tasks are used."""

    def __post_init__(self) -> None:
        low, high = self.solve_rate
        if not 0 <= low <= high <= 1:
            raise RecipeError(f"tasks.solve_rate = [{low}, {high}] is no span within 0 and 1", hint="[0.2, 0.8]")
        if self.train == self.heldout:
            raise RecipeError(
                "tasks.train and tasks.heldout are the same tasks",
                cause=f"both are {self.train!r}",
                hint='heldout = "etude:repair/heldout"',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksBuildRecipe:
    """How repair tasks are made from packages. The result depends on `seed` and the packages, not on `workers`."""

    out: str = "repair.tasks.zst"
    """The file to write."""
    cache: str = ""
    """Folder of the packages' wheels; empty: `$XDG_CACHE_HOME/etude/packages`. Missing wheels are downloaded."""
    functions: str = ""
    """A file of functions that was harvested before; empty: harvest the packages."""
    workers: int = 2
    """Processes that run functions; each takes about one core."""
    seed: int = 0
    """Of the inputs, the faults and the choice among them."""
    kinds: tuple[str, ...] = PLAIN_KINDS
    """Kinds of faults. The held-out and final splits get one kind more, which no training data has."""
    train: int = 16_000
    """Tasks of the RL pool, at most."""
    heldout: int = 400
    """Tasks of held-out packages, at most."""
    final: int = 300
    """Tasks of the packages of the final test, at most."""
    base: int = 6_000
    """Tasks of the functions of pretraining and fine-tuning, at most."""
    train_per_function: int = 40
    """Tasks of one function of the RL pool, at most."""
    base_per_function: int = 16
    """The same for the base split."""
    test_per_function: int = 6
    """The same for the held-out and final splits."""
    max_package_share: float = 0.5
    """Of the held-out and final splits each, how much one package may have."""
    max_lines: int = 16
    """Lines of solution.py, at most."""
    max_chars: int = 500
    """Characters of solution.py, at most."""
    visible: int = 4
    """Checks of a task that run_tests shows, at most; at least 2."""
    hidden: int = 12
    """Checks of a task that only grade, at most; at least 6."""

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "workers": (1, MAX_WORKERS), "train": (1, 1_000_000), "heldout": (1, 1_000_000), "final": (1, 1_000_000),
            "base": (1, 1_000_000), "train_per_function": (1, 100), "base_per_function": (1, 100),
            "test_per_function": (1, 100), "max_package_share": (0.01, 1.0), "max_lines": (3, 1_000),
            "max_chars": (50, 100_000), "visible": (2, 20), "hidden": (6, 20),
        }  # fmt: skip
        unknown = sorted(set(self.kinds) - set(TRAIN_KINDS))
        if unknown or not self.kinds:
            raise RecipeError(
                f"kinds = {list(self.kinds)} names no kind of fault" if not self.kinds else f"no kind {unknown[0]!r}",
                hint=f"there are {', '.join(TRAIN_KINDS)}",
            )
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise RecipeError(f"{name} = {value} is out of range", hint=f"use {low} to {high}")
