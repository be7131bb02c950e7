"""Counts of a task file."""

from __future__ import annotations

from pathlib import Path

from etude.tasks.file import write_tasks
from etude.tasks.stats import counts
from tasks.repair_tasks import FAULTY, entry


def test_tasks_are_counted_by_split_kind_package_and_length(tmp_path: Path) -> None:
    path = tmp_path / "t.zst"
    long = entry(FAULTY + "\n" * 9, fault="negation", package="other")
    write_tasks(path, {"train": [entry(), long], "heldout": [entry(prompt="x")]}, {})
    tables = counts(path)
    assert tables["splits"][0] == {
        "split": "train", "tasks": 2, "functions": 2, "packages": 2, "kinds": 2, "visible checks": 4,
        "hidden checks": 4,
    }  # fmt: skip
    assert tables["kinds"] == [
        {"kind": "negation", "train": 1, "heldout": 0}, {"kind": "sibling-call", "train": 1, "heldout": 1}
    ]  # fmt: skip
    assert [row["package"] for row in tables["packages"]] == ["numbers", "other"]
    assert [(row["lines"], row["train"]) for row in tables["lines"]] == [(" 1-5", 1), ("11-15", 1)]
