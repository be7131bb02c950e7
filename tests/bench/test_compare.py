import pytest

from etude.bench.compare import compare, row_of
from etude.bench.suite import Attempt, SuiteResult, TaskResult
from etude.errors import RunError
from etude.types import Outcome


def attempt(patch: str | None) -> Attempt:
    """Solved by the patch named, or not solved."""
    return Attempt(
        solved=patch is not None,
        reward=float(patch is not None),
        patch_digest=patch or "wrong",
        sampled_tokens=10 if patch else 30,
        calls=3,
        turns=2,
        outcome=Outcome.FINISHED,
    )


def result(label: str, tasks: dict[str, list[str | None]], *, k: int = 2, token_budget: int = 256) -> SuiteResult:
    return SuiteResult(
        label=label,
        version=None,
        k=k,
        token_budget=token_budget,
        finish_needs_pass=False,
        tasks=tuple(
            TaskResult(
                task_id=name,
                cluster=name[0],
                attempts=tuple(attempt(patch) for patch in patches),
                lost=k - len(patches),
            )
            for name, patches in tasks.items()
        ),
    )


BEFORE = result("before", {"a1": [None, None], "a2": ["p", None], "b1": ["p", "q"]})
AFTER = result("after", {"b1": ["p", "p"], "a1": ["p", None], "a2": ["p", "p"]})


def test_rows_are_means_over_tasks() -> None:
    before, after = compare([BEFORE, AFTER]).rows
    assert (before.pass_at_1, before.pass_at_k) == pytest.approx((0.5, 2 / 3))
    assert (after.pass_at_1, after.pass_at_k) == pytest.approx((5 / 6, 1.0))
    assert (before.num_tasks, before.num_attempts, before.k) == (3, 6, 2)
    assert (before.distinct_correct, after.distinct_correct) == (1.0, 1.0)
    assert (before.sampled_tokens, before.calls, before.turns) == (20.0, 3.0, 2.0)


def test_gains_pair_tasks_by_name_whatever_their_order() -> None:
    (gain,) = compare([BEFORE, AFTER]).gains
    assert gain.pass_at_1.value == pytest.approx(1 / 3)
    assert gain.pass_at_1.low < 1 / 3 < gain.pass_at_1.high
    assert gain.pass_at_k.value == pytest.approx(1 / 3)
    assert (gain.before, gain.after, gain.num_clusters) == ("before", "after", 2)


def test_distinct_correct_counts_patches_not_attempts() -> None:
    row = row_of(result("one", {"a": ["p", "p", "q", None]}, k=4))
    assert row.distinct_correct == 2.0


def test_tasks_with_lost_attempts_are_left_out_everywhere_and_counted() -> None:
    after = result("after", {"a1": ["p"], "a2": ["p", "p"], "b1": ["p", "q"]})
    table = compare([BEFORE, after])
    assert (table.num_left_out, [row.num_tasks for row in table.rows]) == (1, [2, 2])


def test_three_policies_are_compared_on_the_tasks_that_all_have() -> None:
    control = result("control", {"a1": [None, None], "a2": ["p"], "b1": ["p", "q"]})
    table = compare([BEFORE, control, AFTER])
    assert [row.label for row in table.rows] == ["before", "control", "after"]
    assert [(gain.before, gain.after) for gain in table.gains] == [("before", "control"), ("before", "after")]
    assert table.rows[0].num_tasks == 2


def test_a_policy_with_fewer_attempts_is_compared_at_its_own_k() -> None:
    once = result("control", {"a1": ["p"], "a2": [None], "b1": ["p"]}, k=1)
    table = compare([BEFORE, once, AFTER])
    assert [row.k for row in table.rows] == [2, 1, 2]
    assert table.rows[1].pass_at_1 == pytest.approx(2 / 3)
    control, after = table.gains
    assert control.pass_at_k.value == pytest.approx(2 / 3 - 1 / 2)  # both at k = 1
    assert after.pass_at_k.value == pytest.approx(1 / 3)


def test_pass_at_8_is_named_only_where_it_was_measured() -> None:
    assert row_of(BEFORE).pass_at_8 is None
    assert row_of(result("one", {"a": ["p", *[None] * 15]}, k=16)).pass_at_8 == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (result("after", {"a1": [None, None]}), "different tasks"),
        (result("after", {"a1": [], "a2": [], "b1": []}, token_budget=128), "different token budgets"),
        (result("after", {"a1": [], "a2": [], "b1": []}), "attempted often enough"),
        (BEFORE, "one label"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: SuiteResult, message: str) -> None:
    with pytest.raises(RunError, match=message):
        compare([BEFORE, other])


def test_a_measurement_needs_nearly_all_of_its_tasks() -> None:
    attempted = {f"a{number}": ["p", None] for number in range(95)}
    lost = {f"b{number}": ["p"] for number in range(5)}
    assert row_of(result("one", attempted | lost)).num_tasks == 95
    message = "one: only 95 of 101 tasks were attempted 2 times\ncause: broken machines lost 6 attempts"
    with pytest.raises(RunError, match=message):
        row_of(result("one", attempted | lost | {"c": ["p"]}))
    with pytest.raises(RunError, match="only 0 of 1 tasks"):
        row_of(result("one", {"a": ["p"]}))
