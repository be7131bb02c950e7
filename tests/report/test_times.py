import pytest

from etude.report.series import step_rows
from etude.report.times import time_bars

ROWS = [
    {"step": 1, "wall_s": 10, "train_s": 3, "wait_s": 7, "engine_busy_s": 100, "episode_generate_s": 1.0},
    {"step": 2, "wall_s": 20, "train_s": 6, "wait_s": 14, "engine_busy_s": 108, "episode_generate_s": 3.0},
]


def spent(phases: dict[str, float] | None = None) -> dict[str, dict[str, float]]:
    rows = [{"time": 0.0, "kind": "step", "row": row} for row in ROWS]
    bars = time_bars(step_rows(rows), phases or {})
    return {bar.title: {part.name: part.seconds for part in bar.parts} for bar in bars}


def test_each_clock_has_its_own_bar() -> None:
    assert spent({"setup_s": 4.0, "before_s": 6.0, "nothing_s": 0.0}) == {
        "The run": {"setup": 4.0, "before": 6.0},
        "The trainer, while training": {"training": 6.0, "waiting for episodes": 14.0},
        "The engine, while training": {"generating": 8.0, "idle": 12.0},
        "An episode, mean": {"generation": 2.0},
    }


def test_the_parts_of_a_bar_fill_it_from_end_to_end() -> None:
    (bar,) = time_bars([], {"a_s": 1.0, "b_s": 3.0})
    assert [(part.x, part.width) for part in bar.parts] == [(0, pytest.approx(250)), (250, pytest.approx(750))]


def test_without_numbers_there_are_no_bars() -> None:
    assert time_bars([], {}) == []
