"""Counts of a task file: by split, kind of fault, package and length. Reads, judges nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from etude.tasks.file import SHIPPED, load_tasks, read_header
from etude.types import Task

Row = dict[str, str | int]


def counts(file: Path | None = None) -> dict[str, list[Row]]:
    """Tables by name, each a list of rows, of a file (default: the repair tasks that ship). Errors: TaskError.

    `splits`: tasks, functions, packages and checks a split; `kinds`, `packages`, `lines`: a row a value, a column a
    split.
    """
    path = file or SHIPPED["repair"]
    names = [section.name for section in read_header(path).sections if section.name != "licences"]
    splits = {name: load_tasks(f"{path}/{name}") for name in names}
    return {
        "splits": [_split_row(name, tasks) for name, tasks in splits.items()],
        "kinds": _table("kind", splits, lambda task: task.source["fault"]),
        "packages": _table("package", splits, lambda task: task.source["package"]),
        "lines": _table("lines", splits, _lines),
    }


def _split_row(name: str, tasks: Iterable[Task]) -> Row:
    tasks = list(tasks)
    return {
        "split": name,
        "tasks": len(tasks),
        "functions": len({_function(task) for task in tasks}),
        "packages": len({task.source["package"] for task in tasks}),
        "kinds": len({task.source["fault"] for task in tasks}),
        "visible checks": sum(check.visible for task in tasks for check in task.verifier.checks),
        "hidden checks": sum(not check.visible for task in tasks for check in task.verifier.checks),
    }


def _function(task: Task) -> tuple[str, str, str]:
    return task.source["package"], task.source["module"], task.source["function"]


def _lines(task: Task) -> str:
    """Lines of the workspace, by fives: `1-5`, `6-10`, ..."""
    count = sum(len(text.splitlines()) for text in task.workspace.values())
    first = (count - 1) // 5 * 5 + 1
    return f"{first:2}-{first + 4}"


def _table(title: str, splits: dict[str, tuple[Task, ...]], key: Callable[[Task], str]) -> list[Row]:
    cells: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tasks in splits.items():
        for task in tasks:
            cells[key(task)][name] += 1
    return [{title: value} | {name: cells[value][name] for name in splits} for value in sorted(cells)]
