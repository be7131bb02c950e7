"""Before, after, and what lies between: the table of a run.

    SuiteResult x n --> Row each;  (before, after) --> gain with a paired 95% interval

Only tasks with all their attempts in every result are compared, so that each is its own control; how many were left
out is said. What it does not do: render (report, cli).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from etude.bench.statistics import Interval, clustered_difference, paired_difference, pass_at_k
from etude.bench.suite import SuiteResult, TaskResult
from etude.errors import RunError
from etude.types import Noun

MIN_WHOLE = 0.95
"""Share of a suite's tasks that a measurement needs."""


class Row(Noun, frozen=True):
    """One policy. Rates are means over tasks of unbiased estimates."""

    label: str
    pass_at_1: float
    pass_at_k: float
    k: int
    pass_at_8: float | None
    """None with fewer than 8 attempts."""
    num_tasks: int
    num_attempts: int
    distinct_correct: float
    """Different correct patches a task, on average: falls when a policy narrows to one way of doing things."""
    reward: float
    sampled_tokens: float
    """Per attempt."""
    calls: float
    """Per attempt."""
    turns: float
    """Per attempt."""


class Gain(Noun, frozen=True):
    """After - before on the same tasks."""

    before: str
    after: str
    pass_at_1: Interval
    """Normal interval over tasks."""
    pass_at_1_by_package: Interval
    """Bootstrap over packages: what to expect on packages not seen here."""
    pass_at_k: Interval
    """At the smaller k of the two; normal interval over tasks."""
    num_clusters: int


class Comparison(Noun, frozen=True):
    """Rows in the order given; gains of every later row over the first."""

    rows: tuple[Row, ...]
    gains: tuple[Gain, ...]
    num_left_out: int
    """Tasks that not every policy has all its attempts at, because machines broke."""


def compare(results: Sequence[SuiteResult], *, seed: int = 0) -> Comparison:
    """The table of several policies on one suite, the first being the baseline.

    Errors: RunError if they are not measurements of the same tasks at the same budget.
    """
    _check_same(results)
    by_task = [{task.task_id: task for task in result.tasks} for result in results]
    ks = [result.k for result in results]
    whole = [
        name for name in by_task[0] if all(len(tasks[name].attempts) >= k for tasks, k in zip(by_task, ks, strict=True))
    ]
    if not whole:
        raise RunError("no task was attempted often enough by every policy", cause="machines broke; see the faults")
    columns = [[tasks[name] for name in whole] for tasks in by_task]
    rows = [_row(result, tasks) for result, tasks in zip(results, columns, strict=True)]
    gains = [
        _gain(results[0].label, result.label, columns[0], tasks, k=min(ks[0], result.k), seed=seed)
        for result, tasks in zip(results[1:], columns[1:], strict=True)
    ]
    return Comparison(rows=tuple(rows), gains=tuple(gains), num_left_out=len(by_task[0]) - len(whole))


def row_of(result: SuiteResult) -> Row:
    """One policy by itself, over the tasks that have all k attempts.

    Errors: RunError if those are too few: what broken machines leave over is no fair draw of the suite.
    """
    whole = [task for task in result.tasks if len(task.attempts) >= result.k]
    if not whole or len(whole) < MIN_WHOLE * len(result.tasks):
        lost = sum(task.lost for task in result.tasks)
        raise RunError(
            f"{result.label}: only {len(whole)} of {len(result.tasks)} tasks were attempted {result.k} times",
            cause=f"broken machines lost {lost} attempts",
            hint="the run's logs say why; the same command measures again",
        )
    return _row(result, whole)


def _row(result: SuiteResult, tasks: Sequence[TaskResult]) -> Row:
    attempts = [attempt for task in tasks for attempt in task.attempts]
    return Row(
        label=result.label,
        pass_at_1=fmean(_rates(tasks, 1)),
        pass_at_k=fmean(_rates(tasks, result.k)),
        k=result.k,
        pass_at_8=fmean(_rates(tasks, 8)) if result.k >= 8 else None,
        num_tasks=len(tasks),
        num_attempts=len(attempts),
        distinct_correct=fmean(distinct_correct(task) for task in tasks),
        reward=fmean(attempt.reward for attempt in attempts),
        sampled_tokens=fmean(attempt.sampled_tokens for attempt in attempts),
        calls=fmean(attempt.calls for attempt in attempts),
        turns=fmean(attempt.turns for attempt in attempts),
    )


def _gain(
    before_label: str,
    after_label: str,
    before: Sequence[TaskResult],
    after: Sequence[TaskResult],
    *,
    k: int,
    seed: int,
) -> Gain:
    clusters = [task.cluster for task in before]
    return Gain(
        before=before_label,
        after=after_label,
        pass_at_1=paired_difference(_rates(before, 1), _rates(after, 1)),
        pass_at_1_by_package=clustered_difference(_rates(before, 1), _rates(after, 1), clusters, seed=seed),
        pass_at_k=paired_difference(_rates(before, k), _rates(after, k)),
        num_clusters=len(set(clusters)),
    )


def distinct_correct(task: TaskResult) -> int:
    """Number of different patches among a task's solved attempts."""
    return len({attempt.patch_digest for attempt in task.attempts if attempt.solved})


def _rates(tasks: Sequence[TaskResult], k: int) -> list[float]:
    return [pass_at_k(len(task.attempts), task.num_solved, k) for task in tasks]


def _check_same(results: Sequence[SuiteResult]) -> None:
    if len(results) < 2:
        raise RunError("a comparison needs two results at least")
    first = results[0]
    labels = [result.label for result in results]
    if len(set(labels)) < len(labels):
        raise RunError(f"two results have one label: {', '.join(labels)}")
    for other in results[1:]:
        if other.token_budget != first.token_budget:
            raise RunError(f"{first.label} and {other.label} were measured at different token budgets")
        if {task.task_id for task in other.tasks} != {task.task_id for task in first.tasks}:
            raise RunError(f"{first.label} and {other.label} were measured on different tasks")
