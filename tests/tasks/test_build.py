"""Building tasks from functions, in real isolated processes, from a small set of real algorithms."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.tasks import build as build_module
from etude.tasks import checks, packages
from etude.tasks.build import build
from etude.tasks.file import load_licences, load_references, load_tasks
from etude.tasks.harvest import Function, body_key, write
from etude.tasks.mutate import HELDOUT_KIND, TRAIN_KINDS
from etude.tasks.recipe import TasksBuildRecipe

BODIES = {
    "chunk": "(seq, size):\n    out = []\n    for i in range(0, len(seq), size):\n"
    "        out.append(seq[i:i + size])\n    return out",
    "clamp": "(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return high\n"
    "    return x",
    "gcd": "(a, b):\n    while b:\n        a, b = (b, a % b)\n    return abs(a)",
    "camel": "(text):\n    words = text.split('_')\n    return words[0] + ''.join((w.title() for w in words[1:]))",
    "between": "(text, left, right):\n    start = text.find(left)\n    if start < 0:\n        return ''\n"
    "    return text[start + len(left):].split(right)[0]",
    "gap": "(a, b, step=2):\n    if b - a > step:\n        return (b - a) // step\n    return a - b",
}


def function(name: str, package: str) -> Function:
    source = f"def {name}{BODIES[name]}"
    return Function(
        package=package, version="1.0", licence="MIT", module=package, qualname=name, name=name, source=source,
        prelude="", lines=source.count("\n") + 1, callable=True, body_key=body_key(source),
    )  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> TasksBuildRecipe:
    folder = tmp_path_factory.mktemp("build")
    sides = {"chunk": "rl", "clamp": "rl", "gcd": "base", "camel": "base", "between": "heldout", "gap": "heldout"}
    functions = [function(name, packages.STDLIB.name) for name in BODIES]
    path = folder / "functions.jsonl.zst"
    write(functions, path, {f.body_key: sides[f.name] for f in functions})
    return TasksBuildRecipe(
        out=str(folder / "out.tasks.zst"), functions=str(path), workers=1, max_package_share=1.0, heldout=5,
        train_per_function=3,
    )  # fmt: skip


@pytest.mark.slow
def test_a_build_makes_tasks_that_their_checks_can_tell(recipe: TasksBuildRecipe) -> None:
    seen: list[tuple[str, int, int]] = []
    result = build(recipe, lambda *row: seen.append(row))
    assert seen[-1] == ("tasks", len(BODIES), len(BODIES))
    assert result.functions == {"train": 2, "heldout": 2, "final": 0, "base": 2}
    assert result.counts["train"] == 6
    assert result.counts["heldout"] == 5
    assert not result.rejected
    for split in ("train", "heldout", "base"):
        tasks = load_tasks(f"{recipe.out}/{split}")
        references = load_references(f"{recipe.out}/{split}")
        for task in tasks:
            name = task.source["function"]
            assert task.prompt == f"Repair {name}."
            assert references[task.task_id] == f"def {name}{BODIES[name]}\n"
            assert task.workspace["solution.py"] != references[task.task_id]
            if split != "heldout":
                assert task.source["fault"] in TRAIN_KINDS
            namespace: dict[str, object] = {}
            exec(references[task.task_id], namespace)
            for check in task.verifier.checks:
                if not check.expected.startswith("raises "):
                    assert repr(eval(check.call, namespace)) == check.expected
    assert HELDOUT_KIND in {task.source["fault"] for task in load_tasks(f"{recipe.out}/heldout")}
    assert len(load_licences(Path(recipe.out))[packages.STDLIB.name]) > 40


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(recipe: TasksBuildRecipe, tmp_path: Path) -> None:
    from dataclasses import replace

    one, two = (replace(recipe, out=str(tmp_path / f"{n}.zst"), workers=n) for n in (1, 2))
    assert build(one).digest == build(two).digest
    assert Path(one.out).read_bytes() == Path(two.out).read_bytes()
    assert build(replace(one, seed=7)).digest != build(one).digest


def entries_of(name: str, package: str, count: int, kind: str = "k") -> build_module._Made:
    made = function(name, package)
    fault_checks = tuple(checks.IOCheck(call=f"{name}({n})", expected=str(n), visible=n < 2) for n in range(8))
    faults = [
        build_module.mutate.Mutation(kind=kind, source=f"{made.source}  # {n}", line=1, old_line="", new_line="")
        for n in range(count)
    ]
    return build_module._Made(entries=tuple(build_module._entry(made, f, fault_checks) for f in faults), reason="")


def test_every_function_comes_first_before_any_comes_twice() -> None:
    made = [entries_of("chunk", "a", 3), entries_of("gcd", "b", 1), entries_of("clamp", "c", 2)]
    chosen = build_module._choose(TasksBuildRecipe(train=5), "rl", made)
    assert [entry.task.source["function"] for entry in chosen] == ["chunk", "gcd", "clamp", "chunk", "clamp"]


def test_no_package_has_more_than_its_share_of_the_tests() -> None:
    made = [entries_of("chunk", "a", 9), entries_of("gcd", "b", 2)]
    chosen = build_module._choose(TasksBuildRecipe(heldout=6, max_package_share=0.5), "heldout", made)
    assert sorted(entry.task.source["package"] for entry in chosen) == ["a", "a", "a", "b", "b"]


def test_the_held_out_kind_has_its_share_of_the_tests_and_no_more() -> None:
    made = [entries_of("chunk", "a", 12, HELDOUT_KIND), entries_of("gcd", "b", 12)]
    chosen = build_module._choose(TasksBuildRecipe(heldout=20, max_package_share=1.0), "heldout", made)
    assert sum(entry.task.source["fault"] == HELDOUT_KIND for entry in chosen) == 2


def test_a_task_that_comes_twice_is_taken_once() -> None:
    made = [entries_of("chunk", "a", 2), entries_of("chunk", "a", 2)]
    assert len(build_module._choose(TasksBuildRecipe(), "rl", made)) == 2


def test_functions_that_are_too_long_are_left_out() -> None:
    recipe = TasksBuildRecipe(max_lines=5, max_chars=200)
    assert build_module._fits(recipe, function("chunk", "a"))
    assert not build_module._fits(recipe, function("clamp", "a"))
