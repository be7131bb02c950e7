import math

from etude.report.series import column, last_row, smooth, staleness_counts, step_rows


def rows(*steps: dict[str, object], kind: str = "step") -> list[dict[str, object]]:
    return [{"time": 0.0, "kind": kind, "row": step} for step in steps]


def test_a_step_that_was_recorded_twice_counts_once_as_it_was_last() -> None:
    made = step_rows(rows({"step": 2, "loss": 1.0}, {"step": 1}, {"step": 2, "loss": 3.0}, {"loss": 9.0}))
    assert [(row["step"], row.get("loss")) for row in made] == [(1, None), (2, 3.0)]


def test_what_is_no_finite_number_is_left_out() -> None:
    (row,) = step_rows(rows({"step": 1, "a": None, "b": "text", "c": math.nan, "d": math.inf, "e": 2, "f": {"x": 1}}))
    assert row == {"step": 1.0, "e": 2.0}


def test_sums_become_what_each_step_took_also_over_a_restart() -> None:
    made = step_rows(
        rows(
            {"step": 1, "wall_s": 10.0, "train_s": 3.0, "wait_s": 7.0, "engine_sampled_tokens": 500},
            {"step": 2, "wall_s": 20.0, "train_s": 5.0, "wait_s": 15.0, "engine_sampled_tokens": 2_500},
            {"step": 3, "wall_s": 30.0, "train_s": 4.0, "wait_s": 2.0, "engine_sampled_tokens": 1_000},
        )
    )
    assert column(made, "step_train_s") == ([1, 2, 3], [3, 2, 4])
    assert column(made, "step_wait_s") == ([1, 2, 3], [7, 8, 2])
    assert column(made, "tokens_per_s") == ([2, 3], [200, 100])


def test_the_trainers_rate_is_not_taken_for_the_engines() -> None:
    steps = [
        {"step": n, "wall_s": 10.0 * n, "trained_tokens_per_s": 7, "engine_sampled_tokens": 50 * n} for n in (1, 2)
    ]
    assert column(step_rows(rows(*steps)), "tokens_per_s") == ([2], [5])


def test_groups_are_counted_by_their_age() -> None:
    made = step_rows(
        rows({"step": 1, "staleness_0": 4, "staleness_2": 1, "staleness_mean": 9}, {"step": 2, "staleness_0": 1})
    )
    assert staleness_counts(made) == {0: 5, 2: 1}


def test_smoothing_keeps_a_line_a_line_and_the_ends_in_place() -> None:
    line = [float(value) for value in range(20)]
    assert smooth(line) == line
    assert smooth([0.0, 3.0, 6.0, 0.0], width=3) == [0.0, 3.0, 3.0, 0.0]
    assert smooth([]) == []


def test_the_last_row_of_a_kind_is_found() -> None:
    assert last_row(rows({"a": 1}, kind="time") + rows({"a": 2}, kind="time"), "time") == {"a": 2.0}
    assert last_row([], "time") == {}
