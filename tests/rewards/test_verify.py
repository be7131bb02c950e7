from collections.abc import Mapping

import pytest

from agent.scenes import BROKEN, FIXED, FragilePool, clamp_task, in_loop, real_pool
from etude.errors import EtudeError, SandboxError
from etude.rewards.verify import collect, graded_files
from etude.sandbox.memo import MemoPool
from etude.types import Effort, Episode, Evidence, Outcome, Task


def episode(task: Task, files: Mapping[str, str], outcome: Outcome = Outcome.FINISHED) -> Episode:
    return Episode(
        episode_id="e",
        task_id=task.task_id,
        contexts=(),
        turns=(),
        outcome=outcome,
        patch="",
        files=files,
        effort=Effort(),
        fault=None,
        timings={},
    )


def graded(
    files: Mapping[str, str],
    *,
    task: Task | None = None,
    outcome: Outcome = Outcome.FINISHED,
    refuse: int = 0,
    die_at: dict[int, int] | None = None,
) -> tuple[Evidence, int]:
    """The evidence, and how many sandboxes it took; all of them must be closed."""

    async def run() -> tuple[Evidence, int]:
        the_task = task or clamp_task()
        inner = real_pool()
        pool = FragilePool(inner, refuse=refuse, die_at=die_at or {})
        try:
            return await collect(the_task, episode(the_task, files, outcome), pool), pool.acquired
        finally:
            assert pool.open == 0

    return in_loop(run())


def test_a_repair_passes_every_check() -> None:
    evidence, sandboxes = graded({"solution.py": FIXED})
    assert (evidence.passed, evidence.solved, sandboxes) == ((True, True, True), True, 2)
    assert evidence.detail == "all checks pass"


def test_what_only_pleases_the_visible_checks_fails_the_hidden_one() -> None:
    evidence, _ = graded({"solution.py": "def clamp(x, low, high):\n    return min(x, high)\n"})
    assert evidence.passed == (True, True, False)
    assert evidence.detail == "1 of 3 fail: clamp(-3, 0, 5) -> -3, expected 0"


def test_an_untouched_workspace_needs_no_sandbox() -> None:
    evidence, sandboxes = graded({})
    assert (evidence.passed, evidence.solved, sandboxes) == ((False, False, False), False, 0)


def test_a_sandbox_that_died_is_no_repair_whatever_the_host_can_still_do() -> None:
    evidence, sandboxes = graded({"solution.py": FIXED}, outcome=Outcome.SANDBOX_DIED)
    assert (evidence.solved, sandboxes) == (False, 1)
    with pytest.raises(EtudeError):
        graded({"solution.py": FIXED}, outcome=Outcome.SANDBOX_DIED, refuse=1)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)\n",
        "raise SystemExit\n",
        "def clamp(:\n",
        "def clamp(x, low, high):\n    class Five(int):\n        pass\n    return Five(min(max(x, low), high))\n",
        "import builtins\nbuiltins.repr = lambda value: '5'\ndef clamp(x, low, high):\n    return 0\n",
    ],
)
def test_code_that_tries_to_get_around_its_checks_fails_them(source: str) -> None:
    evidence, _ = graded({"solution.py": source})
    assert not evidence.solved
    assert len(evidence.passed) == 3


def test_files_that_steer_tests_are_graded_as_the_task_had_them() -> None:
    task = clamp_task(
        workspace={"solution.py": BROKEN, "tests/test_clamp.py": "original\n", "conftest.py": "original\n"}
    )
    left = {
        "solution.py": FIXED, "helper.py": "kept\n", "tests/test_clamp.py": "forged\n", "conftest.py": "forged\n",
        "sitecustomize.py": "forged\n", "x.pth": "forged\n", "sub/pytest.ini": "forged\n", "test_new.py": "forged\n",
        "solution.py/x.py": "in the way\n", "tests": "in the way\n",
        "__pycache__/solution.cpython-311.pyc": "forged\n", "/etc/passwd": "forged\n", "../up.py": "forged\n",
    }  # fmt: skip
    assert graded_files(task, episode(task, left)) == {
        "solution.py": FIXED, "helper.py": "kept\n", "tests/test_clamp.py": "original\n", "conftest.py": "original\n",
    }  # fmt: skip


def test_code_that_breaks_two_fresh_sandboxes_is_the_agents_failure() -> None:
    evidence, sandboxes = graded({"solution.py": FIXED}, die_at={0: 0, 1: 0})
    assert (evidence.solved, sandboxes) == (False, 3)
    assert "breaks the sandbox" in evidence.detail


def test_a_sandbox_that_breaks_once_is_replaced() -> None:
    evidence, sandboxes = graded({"solution.py": FIXED}, die_at={0: 0})
    assert (evidence.solved, sandboxes) == (True, 3)


def test_a_host_whose_unused_sandboxes_break_too_is_the_culprit() -> None:
    with pytest.raises(SandboxError):
        graded({"solution.py": FIXED}, die_at={0: 0, 1: 0, 2: 0})
    with pytest.raises(SandboxError):
        graded({"solution.py": FIXED}, refuse=1)


def test_files_that_no_workspace_can_hold_are_the_agents_failure() -> None:
    evidence, _ = graded({"solution.py": FIXED, "a" * 300: "x\n"})
    assert not evidence.solved
    assert "cannot be laid out" in evidence.detail


def test_code_that_ends_its_process_for_some_calls_passes_only_the_others() -> None:
    leaving = "import os\ndef clamp(x, low, high):\n    x == 7 and os._exit(0)\n    return min(max(x, low), high)\n"
    evidence, sandboxes = graded({"solution.py": leaving})
    assert (evidence.passed, sandboxes) == ((False, True, False), 1)
    assert evidence.detail == (
        "1 of 2 visible checks (the other 1 were not run) fail: clamp(7, 0, 5) -> died, expected 5"
    )


def test_code_that_does_not_come_back_fails_that_call_and_all_after_it() -> None:
    endless = "def clamp(x, low, high):\n    while x == 7: pass\n    return min(max(x, low), high)\n"
    evidence, _ = graded({"solution.py": endless})
    assert evidence.passed == (False, False, False)


def test_equal_workspaces_are_graded_by_one_run_with_the_same_result() -> None:
    async def run(*, memo: bool) -> tuple[list[Evidence], int]:
        fragile = FragilePool(real_pool())
        pool = MemoPool(fragile) if memo else fragile
        task = clamp_task()
        other = clamp_task(package="other", workspace={"solution.py": BROKEN, "lib.py": ""})
        spoiled = {"solution.py": BROKEN.replace("max(x, high)", "x")}
        endless = {"solution.py": FIXED.replace("    return", "    while x == 7: pass\n    return")}
        jobs = [(task, {"solution.py": FIXED}), (task, spoiled), (other, {"solution.py": FIXED}), (task, endless)]
        found = [await collect(each, episode(each, files), pool) for each, files in jobs * 2]
        assert fragile.open == 0
        return found, fragile.acquired

    plain, plain_sandboxes = in_loop(run(memo=False))
    fast, fast_sandboxes = in_loop(run(memo=True))
    assert [(each.passed, each.detail, each.task_id) for each in fast] == [
        (each.passed, each.detail, each.task_id) for each in plain
    ]
    assert (plain_sandboxes, fast_sandboxes) == (12, 6)


def test_a_machine_is_proven_by_a_run_of_its_own() -> None:
    async def run() -> tuple[list[Evidence], int]:
        fragile = FragilePool(real_pool())
        pool = MemoPool(fragile)
        task = clamp_task()
        found = [await collect(task, episode(task, {}, Outcome.SANDBOX_DIED), pool) for _ in range(2)]
        return found, fragile.acquired

    found, sandboxes = in_loop(run())
    assert (sandboxes, [each.solved for each in found]) == (2, [False, False])
