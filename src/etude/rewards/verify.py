"""Evidence: what was found out about an episode, in a fresh sandbox that its agent never saw.

    task.workspace + what the agent left (less what must not count) --fresh sandbox--> all checks --host--> Evidence

The agent's sandbox is closed before; nothing that it left running, mounted or cached can reach the grade, and expected
values stay on the host (sandbox.iochecks). What it does not do: put a price on it (combine.py).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import PurePosixPath

from etude.errors import RewardError, SandboxError
from etude.protocols import Sandbox, SandboxPool
from etude.sandbox.iochecks import CheckOutcome, run_iochecks
from etude.types import Episode, Evidence, Outcome, Task

GRADE_TIMEOUT_S = 60.0
"""For all checks of a task together; each has its own, shorter deadline."""
FIRST_CHECKS = 2
"""Checks that are run before the others."""
RESTORED_NAMES = frozenset({
    "conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "sitecustomize.py", "usercustomize.py",
})  # fmt: skip
"""Files that steer how tests run: graded as the task had them, or not at all."""
RESTORED_SUFFIXES = (".pth", ".pyc", ".pyo", ".so")
RESTORED_FOLDERS = frozenset({"tests", "test", "__pycache__"})


def graded_files(task: Task, episode: Episode) -> dict[str, str]:
    """The workspace that is graded: the task's own, overlaid with the agent's files that may count.

    A file that stands where the task has a folder, or the other way round, does not count.
    """
    folders = {str(parent) for path in task.workspace for parent in PurePosixPath(path).parents}
    counted = {
        path: text
        for path, text in episode.files.items()
        if not _is_restored(path)
        and path not in folders
        and not any(str(parent) in task.workspace for parent in PurePosixPath(path).parents)
    }
    return {**task.workspace, **counted}


def _is_restored(path: str) -> bool:
    parts = PurePosixPath(path)
    return (
        parts.is_absolute()
        or ".." in parts.parts
        or parts.name in RESTORED_NAMES
        or parts.suffix in RESTORED_SUFFIXES
        or parts.name.startswith("test_")
        or not RESTORED_FOLDERS.isdisjoint(parts.parts[:-1])
    )


async def collect(task: Task, episode: Episode, pool: SandboxPool) -> Evidence:
    """Run every check of the task on what the episode left.

    A workspace that is as the task gave it needs no run: a task is one because its workspace fails. Where agent code
    breaks the grading sandbox, that is the agent's failure if a second fresh one breaks as well. Errors: RewardError or
    SandboxError where grading could not be carried out.
    """
    start = time.monotonic()
    files = graded_files(task, episode)
    if episode.outcome is Outcome.SANDBOX_DIED:
        await _prove_host(pool)
        passed, detail = _none(task), "the sandbox died after the agent's first action"
    elif files == task.workspace:
        passed, detail = _none(task), "nothing that counts was changed"
    else:
        passed, detail = await _run_checks(task, files, pool)
    return Evidence(
        task_id=task.task_id,
        episode_id=episode.episode_id,
        passed=passed,
        detail=detail,
        wall_s=time.monotonic() - start,
    )


async def _run_checks(task: Task, files: dict[str, str], pool: SandboxPool) -> tuple[tuple[bool, ...], str]:
    for _ in range(2):
        try:
            sandbox = await pool.acquire(files)
        except OSError as error:
            await _prove_host(pool)
            return _none(task), f"what the agent left cannot be laid out again: {error}"
        try:
            await _probe(sandbox)
            outcomes = await _survivors(sandbox, task)
        finally:
            await _close(sandbox)
        if outcomes is not None:
            failing = [outcome for outcome in outcomes if not outcome.passed]
            if not failing:
                return tuple(outcome.passed for outcome in outcomes), "all checks pass"
            first = failing[0]
            detail = f"{len(failing)} of {len(outcomes)} fail: {first.call} -> {first.got}, expected {first.expected}"
            return tuple(outcome.passed for outcome in outcomes), detail
    return _none(task), "what the agent left breaks the sandbox that runs it"


async def _survivors(sandbox: Sandbox, task: Task) -> tuple[CheckOutcome, ...] | None:
    """The outcomes, in order; None if the sandbox, which was well before, died of running the agent's code.

    Code that never ends uses up the time of every check: where one of the first few does not end, the others are not
    run, and count as failed.
    """
    spec = task.verifier
    first, others = spec.checks[:FIRST_CHECKS], spec.checks[FIRST_CHECKS:]
    try:
        outcomes = await run_iochecks(sandbox, spec, first, GRADE_TIMEOUT_S)
        if not any(outcome.got == "timeout" for outcome in outcomes):
            return outcomes + await run_iochecks(sandbox, spec, others, GRADE_TIMEOUT_S)
    except SandboxError:
        return None
    return outcomes + tuple(
        CheckOutcome(call=check.call, expected=check.expected, got="not run", passed=False) for check in others
    )


async def _prove_host(pool: SandboxPool) -> None:
    sandbox = await pool.acquire({})
    try:
        await _probe(sandbox)
    finally:
        await _close(sandbox)


async def _probe(sandbox: Sandbox) -> None:
    """Errors: RewardError, SandboxError if a sandbox that nobody has used yet does not work."""
    done = await sandbox.run_python("", timeout_s=30.0)
    if done.exit_code != 0 or done.timed_out:
        raise RewardError("a fresh sandbox does not run an empty program", cause=f"exit code {done.exit_code}")


async def _close(sandbox: Sandbox) -> None:
    with contextlib.suppress(SandboxError):  # already gone, which is what was wanted
        await sandbox.close()


def _none(task: Task) -> tuple[bool, ...]:
    return (False,) * len(task.verifier.checks)
