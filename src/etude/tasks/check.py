"""Check tasks by running them: the workspace as given must fail its checks, with the reference it must pass them all.

Where in the flow: file -> **check** (real sandboxes, the same runner as grading). A person or a release runs it; a run
does not. It finds what building cannot see: another Python, another machine, a damaged or badly made task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from etude.errors import SandboxError
from etude.protocols import SandboxPool
from etude.sandbox.iochecks import CheckOutcome, run_iochecks
from etude.types import Noun, Task

TIMEOUT_S = 60.0
"""For all checks of one side of a task: generous, since a busy machine is not the task's fault."""


class Violation(Noun, frozen=True):
    """What is wrong with one task."""

    task_id: str
    problem: str
    """`passes with its fault`, `visible checks pass with the fault`, `hidden checks pass with the fault`,
    `reference fails`, `no reference`, `no file under test`, `too few checks`."""
    detail: str
    """For a person: function, fault, the first call that went wrong."""


async def check_tasks(
    tasks: Sequence[Task],
    references: Mapping[str, str],
    pool: SandboxPool,
    *,
    at_once: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Violation, ...]:
    """Every violation, in the order of `tasks`. `references` maps task ids to the right text of the file under test.

    `at_once` tasks are run at the same time; `progress` is called with (done, total). Errors: SandboxError.
    """
    places = asyncio.Semaphore(at_once)
    done = 0

    async def one(task: Task) -> Violation | None:
        nonlocal done
        async with places:
            violation = await _check(task, references.get(task.task_id), pool)
        done += 1
        if progress is not None:
            progress(done, len(tasks))
        return violation

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task)) for task in tasks]
    except* SandboxError as broken:
        raise broken.exceptions[0] from None
    return tuple(violation for task in running if (violation := task.result()) is not None)


async def _check(task: Task, reference: str | None, pool: SandboxPool) -> Violation | None:
    spec = task.verifier
    if spec.path not in task.workspace:
        return _violation(task, "no file under test", spec.path)
    if reference is None:
        return _violation(task, "no reference", "")
    hidden = [check for check in spec.checks if not check.visible]
    if not hidden or len(hidden) == len(spec.checks):
        return _violation(task, "too few checks", f"{len(hidden)} of {len(spec.checks)} are hidden")
    try:
        right = await _outcomes(task, {**task.workspace, spec.path: reference}, pool)
        faulty = await _outcomes(task, task.workspace, pool)
    except OSError as error:
        return _violation(task, "cannot be laid out", str(error))
    wrong_call = next((outcome for outcome in right if not outcome.passed), None)
    if wrong_call is not None:
        return _violation(task, "reference fails", _line(wrong_call))
    if all(outcome.passed for outcome in faulty):
        return _violation(task, "passes with its fault", "")
    for name, visible in (("visible", True), ("hidden", False)):
        if all(outcome.passed for outcome, check in zip(faulty, spec.checks, strict=True) if check.visible is visible):
            return _violation(task, f"{name} checks pass with the fault", "")
    return None


async def _outcomes(task: Task, files: Mapping[str, str], pool: SandboxPool) -> tuple[CheckOutcome, ...]:
    sandbox = await pool.acquire(files)
    try:
        return await run_iochecks(sandbox, task.verifier, task.verifier.checks, TIMEOUT_S)
    finally:
        await sandbox.close()


def _line(outcome: CheckOutcome) -> str:
    return f"{outcome.call} -> {outcome.got}, expected {outcome.expected}"


def _violation(task: Task, problem: str, detail: str) -> Violation:
    where = ".".join(task.source.get(key, "?") for key in ("module", "function"))
    return Violation(
        task_id=task.task_id, problem=problem, detail=f"{where} [{task.source.get('fault', '?')}] {detail}".strip()
    )
