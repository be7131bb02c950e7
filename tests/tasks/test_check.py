"""Checking tasks in real sandboxes: what is right passes, each way to be wrong is named."""

from __future__ import annotations

import asyncio

import pytest

from etude.errors import SandboxError
from etude.sandbox.pool import NamespacePool
from etude.sandbox.recipe import SandboxRecipe
from etude.tasks.check import Violation, check_tasks
from etude.tasks.file import Entry
from etude.types import IOCheck
from tasks.repair_tasks import CHECKS, RIGHT, entry


def violations(*entries: Entry, references: dict[str, str] | None = None) -> tuple[Violation, ...]:
    known = {item.task.task_id: item.reference for item in entries} if references is None else references

    async def run() -> tuple[Violation, ...]:
        async with NamespacePool(SandboxRecipe(spares=1)) as pool:
            return await check_tasks([item.task for item in entries], known, pool, at_once=2)

    return asyncio.run(run())


def test_a_sound_task_has_no_violation() -> None:
    assert violations(entry()) == ()


HIDDEN_ONLY = (*(IOCheck(call=f"clamp({n}, 0, 50)", expected=str(n), visible=True) for n in (50,)), *CHECKS[2:])
SHOWN_ONLY = (*CHECKS[:2], IOCheck(call="clamp(3, 3, 3)", expected="3", visible=False))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (entry(RIGHT), "passes with its fault"),
        (entry(reference="def clamp(x, low, high):\n    return 5\n"), "reference fails"),
        (entry(reference="def clamp(:\n"), "reference fails"),
        (entry(checks=HIDDEN_ONLY), "visible checks pass with the fault"),
        (entry(checks=SHOWN_ONLY), "hidden checks pass with the fault"),
        (entry(checks=CHECKS[:2]), "too few checks"),
    ],
)
def test_what_is_wrong_with_a_task_is_named(wrong: Entry, problem: str) -> None:
    (violation,) = violations(wrong)
    assert violation.problem == problem
    assert violation.task_id == wrong.task.task_id
    assert "numbers.clamp [sibling-call]" in violation.detail


def test_a_task_without_a_reference_is_named() -> None:
    (violation,) = violations(entry(), references={})
    assert violation.problem == "no reference"


def test_a_broken_sandbox_is_an_error_and_no_violation() -> None:
    class Broken:
        async def acquire(self, files: object) -> object:
            raise SandboxError("no sandbox")

        async def close(self) -> None: ...

    with pytest.raises(SandboxError, match="no sandbox"):
        asyncio.run(check_tasks([entry().task], {entry().task.task_id: RIGHT}, Broken()))  # type: ignore[arg-type]


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        async with NamespacePool(SandboxRecipe(spares=1)) as pool:
            await check_tasks([entry().task], {}, pool, progress=lambda done, total: seen.append((done, total)))

    asyncio.run(run())
    assert seen == [(1, 1)]
