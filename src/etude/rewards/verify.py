"""Evidence: what was found out about an episode, in a fresh sandbox that its agent never saw.

    task.workspace + what the agent left (less what must not count) --fresh sandbox--> all checks --host--> Evidence

The agent's sandbox is closed before; nothing that it left running, mounted or cached can reach the grade, and expected
values stay on the host (sandbox.iochecks). What it does not do: put a price on it (combine.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.errors import RewardError, SandboxDiedError, SandboxError
from etude.protocols import Sandbox, SandboxPool
from etude.sandbox.iochecks import CheckOutcome, run_iochecks
from etude.types import Episode, Evidence, IOCheck, IOChecks, Outcome, Task

GRADE_TIMEOUT_S = 60.0
"""For all checks of a task together; each has its own, shorter deadline."""
TRIES = 2
"""Fresh sandboxes that agent code may break before it is its failure."""
NOT_RUN = "not run"
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


@dataclass(frozen=True, slots=True)
class Finding:
    """What a workspace is worth; its fields become evidence."""

    passed: tuple[bool, ...]
    detail: str


async def collect(task: Task, episode: Episode, pool: SandboxPool) -> Evidence:
    """Run every check of the task on what the episode left.

    A workspace that is as the task gave it needs no run: a task is one because its workspace fails. Where agent code
    breaks the grading sandbox, that is the agent's failure if a second one breaks as well and a third, unused one
    works. Errors: RewardError or SandboxError where grading could not be carried out.
    """
    start = time.monotonic()
    files = graded_files(task, episode)
    if episode.outcome is Outcome.SANDBOX_DIED:
        await _prove_host(pool)
        finding = _failed(task, "the sandbox died after the agent's first action")
    elif files == task.workspace:
        finding = _failed(task, "nothing that counts was changed")
    else:
        finding = await _run_checks(task, files, pool)
    return Evidence(
        task_id=task.task_id,
        episode_id=episode.episode_id,
        passed=finding.passed,
        detail=finding.detail,
        wall_s=time.monotonic() - start,
    )


async def _run_checks(task: Task, files: dict[str, str], pool: SandboxPool) -> Finding:
    """The visible checks, whose answers run_tests may have found out already (sandbox.memo), and if they pass the
    hidden ones, in a sandbox of their own. Nothing is solved where a visible one fails, so the rest is not run then."""
    spec = task.verifier
    outcomes = {
        check: CheckOutcome(call=check.call, expected=check.expected, got=NOT_RUN, passed=False)
        for check in spec.checks
    }
    for is_visible in (True, False):
        checks = [check for check in spec.checks if check.visible is is_visible]
        try:
            found = await _run_fresh(files, spec, checks, pool)
        except OSError as error:
            await _prove_host(pool)
            return _failed(task, f"what the agent left cannot be laid out again: {error}")
        except SandboxDiedError:
            await _prove_host(pool)
            return _failed(task, "what the agent left breaks the sandbox that runs it")
        outcomes.update(zip(checks, found, strict=True))
        if not all(outcome.passed for outcome in found):
            break
    ordered = [outcomes[check] for check in spec.checks]
    return Finding(passed=tuple(outcome.passed for outcome in ordered), detail=_detail(ordered))


async def _run_fresh(
    files: dict[str, str], spec: IOChecks, checks: Sequence[IOCheck], pool: SandboxPool
) -> tuple[CheckOutcome, ...]:
    """Errors: SandboxDiedError if TRIES died of it, SandboxError if there is none, OSError for bad files."""
    tries = 0
    while True:
        tries += 1
        sandbox = await pool.acquire(files)
        try:
            return await run_iochecks(sandbox, spec, checks, GRADE_TIMEOUT_S)
        except SandboxDiedError:
            if tries == TRIES:
                raise
        finally:
            await _close(sandbox)


def _failed(task: Task, detail: str) -> Finding:
    return Finding(passed=(False,) * len(task.verifier.checks), detail=detail)


def _detail(outcomes: Sequence[CheckOutcome]) -> str:
    run = [outcome for outcome in outcomes if outcome.got != NOT_RUN]
    failing = [outcome for outcome in run if not outcome.passed]
    if not failing:
        return "all checks pass"
    first = failing[0]
    which = "" if len(run) == len(outcomes) else f"visible checks (the other {len(outcomes) - len(run)} were not run) "
    return f"{len(failing)} of {len(run)} {which}fail: {first.call} -> {first.got}, expected {first.expected}"


async def _prove_host(pool: SandboxPool) -> None:
    """Errors: RewardError, SandboxError if a sandbox that nobody has used yet does not work."""
    sandbox = await pool.acquire({})
    try:
        done = await sandbox.exec(["true"], timeout_s=30.0)
        if done.exit_code != 0 or done.timed_out:
            raise RewardError("a fresh sandbox does not run `true`", cause=f"exit code {done.exit_code}")
    finally:
        await _close(sandbox)


async def _close(sandbox: Sandbox) -> None:
    with contextlib.suppress(SandboxError):  # already gone, which is what was wanted
        await sandbox.close()
