import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from etude.tasks.harvest import Function, body_key, read_module
from etude.tasks.packages import STDLIB, sources
from etude.tasks.split import SPLITS, assign

ROLES = {"ant": "train", "bee": "train", "cat": "heldout", "dog": "final"}


def function(package: str, name: str, number: int, callable: bool = True) -> Function:
    source = f"def {name}(a):\n    a += {number}\n    return a"
    return Function(
        package=package, version="1", licence="MIT", module=package, qualname=name, name=name, source=source,
        prelude="", lines=3, callable=callable, body_key=body_key(source),
    )  # fmt: skip


@pytest.fixture(scope="module")
def harvested() -> list[Function]:
    """Real functions of the standard library, dealt out to four packages by module, with copies across them."""
    rows = []
    for module, text in sources(STDLIB, Path()):
        if module[0] in "abcdhst":
            package = sorted(ROLES)[len(module) % 4]
            rows += [replace(row, package=package) for row in read_module(text, module=module, package=STDLIB)]
    rng = random.Random(0)
    copies = [replace(row, package=rng.choice(sorted(ROLES))) for row in rng.sample(rows, 200)]
    return rows + copies


def test_no_side_knows_a_callable_name_or_body_of_a_more_protected_side(harvested: list[Function]) -> None:
    decided = assign(harvested, ROLES)
    by_side: dict[str, list[Function]] = {side: [] for side in SPLITS}
    for row in harvested:
        if row.body_key in decided.splits:
            by_side[decided.splits[row.body_key]].append(row)
    for strong, weaker in (("final", ("heldout", "rl", "base")), ("heldout", ("rl", "base")), ("rl", ("base",))):
        names = {row.name for row in by_side[strong] if row.callable}
        bodies = {row.body_key for row in by_side[strong] if row.callable}
        assert names
        for side in weaker:
            assert names.isdisjoint(row.name for row in by_side[side])
            assert bodies.isdisjoint(row.body_key for row in by_side[side])


def test_a_copy_with_a_protected_name_takes_its_body_along() -> None:
    """The body of `bark` under another name must not come back into training."""
    rows = [function("dog", "bark", 1), function("ant", "bark", 2), function("bee", "woof", 2)]
    decided = assign(rows, ROLES)
    assert decided.splits == {rows[0].body_key: "final"}
    assert decided.dropped["final-in-train"] == 2


def test_the_split_depends_on_the_set_alone(harvested: list[Function]) -> None:
    shuffled = random.Random(1).sample(harvested, len(harvested))
    assert assign(shuffled, ROLES) == assign(harvested, ROLES)


def test_what_is_dropped_is_counted_by_reason() -> None:
    rows = [
        function("dog", "bark", 1), function("cat", "bark", 2), function("cat", "purr", 3),
        function("ant", "bark", 4), function("ant", "purr", 5), function("bee", "sting", 3), function("bee", "x", 1),
    ]  # fmt: skip
    decided = assign(rows, ROLES)
    assert decided.splits == {rows[0].body_key: "final", rows[2].body_key: "heldout"}
    assert decided.dropped == {"final-in-heldout": 1, "final-in-train": 2, "heldout-in-train": 2, "rl-in-base": 0}


def test_a_method_of_a_protected_package_protects_nothing() -> None:
    rows = [function("dog", "get", 1, callable=False), function("ant", "get", 2, callable=False)]
    assert assign(rows, ROLES).splits == {rows[0].body_key: "final", rows[1].body_key: "base"}


def test_a_method_with_the_name_of_a_task_is_not_in_the_pretraining_text() -> None:
    names = [f"f{i}" for i in range(40)]
    rows = [function("ant", name, i) for i, name in enumerate(names)]
    methods = [function("bee", name, 100 + i, callable=False) for i, name in enumerate(names)]
    decided = assign([*rows, *methods], ROLES)
    chosen = {row.name for row in rows if decided.splits[row.body_key] == "rl"}
    assert 0 < len(chosen) < 40
    assert {row.name for row in methods if row.body_key in decided.splits} == set(names) - chosen
    assert decided.dropped["rl-in-base"] == len(chosen)


def test_about_seven_of_ten_callable_functions_become_tasks() -> None:
    rows = [function("ant", f"name{i}", i) for i in range(2000)]
    shares = Counter(assign(rows, ROLES).splits.values())
    assert 1340 < shares["rl"] < 1460
    assert shares["base"] == 2000 - shares["rl"]
