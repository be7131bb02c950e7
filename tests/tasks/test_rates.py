from pathlib import Path

import pytest
import zstandard

from etude.errors import RecipeError, TaskError
from etude.tasks.file import load_tasks
from etude.tasks.rates import Rates, choose, load_rates, write_rates
from etude.tasks.recipe import TasksRecipe
from etude.types import IOChecks, Task


def a_task(number: int) -> Task:
    verifier = IOChecks(path="solution.py", checks=())
    return Task.make(prompt=f"task {number}", workspace={}, verifier=verifier, category="repair", source={})


TASKS = [a_task(number) for number in range(6)]
RATES = Rates(tasks="x/train", model="m", k=4, solved={task.task_id: number for number, task in enumerate(TASKS[:5])})


@pytest.mark.parametrize(
    ("span", "numbers"), [((0.25, 0.75), [1, 2, 3]), ((0.0, 0.2), [0]), ((0.0, 1.0), [0, 1, 2, 3, 4])]
)
def test_tasks_within_the_span_are_chosen_in_their_order(span: tuple[float, float], numbers: list[int]) -> None:
    assert [TASKS.index(task) for task in choose(TASKS, RATES, span)] == numbers


def test_no_task_left_says_how_many_were_measured() -> None:
    with pytest.raises(TaskError, match=r"5 of 6 tasks were measured, 4 attempts each, on x/train"):
        choose(TASKS, RATES, (0.3, 0.4))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_rates(tmp_path / "rates.zst", RATES)
    assert load_rates(str(tmp_path / "rates.zst")) == RATES


@pytest.mark.parametrize(
    "data",
    [b"", b"plain", zstandard.compress(b"[]"), zstandard.compress(b'{"kind": "other"}'), zstandard.compress(b"{")],
)
def test_a_file_that_holds_no_rates_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.zst").write_bytes(data)
    with pytest.raises(TaskError, match=r"bad\.zst holds no rates"):
        load_rates(str(tmp_path / "bad.zst"))
    with pytest.raises(TaskError, match="cannot read"):
        load_rates(str(tmp_path / "absent.zst"))


@pytest.mark.parametrize("span", [(0.8, 0.2), (-0.1, 0.5), (0.5, 1.1)])
def test_a_span_that_is_none_is_refused(span: tuple[float, float]) -> None:
    with pytest.raises(RecipeError, match="solve_rate"):
        TasksRecipe(solve_rate=span)


def test_the_shipped_rates_speak_of_the_shipped_training_tasks() -> None:
    rates = load_rates("etude:repair")
    tasks = load_tasks(rates.tasks)
    assert rates.tasks == "etude:repair/train"
    assert len(rates.solved) == 6_000
    assert len(rates.solved.keys() & {task.task_id for task in tasks}) > 0.99 * len(rates.solved)
    assert all(0 <= solved <= rates.k for solved in rates.solved.values())
