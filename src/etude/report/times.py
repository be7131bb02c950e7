"""Where a run's time went, as bars whose parts add up. Pure.

Three clocks that run at once are kept apart: the run's own phases, the trainer's side of the training loop, and the
engine; and beside them what an average episode did with its time, many of which run at the same moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from etude.report.series import Step


@dataclass(frozen=True, slots=True)
class Part:
    """An activity. `x` and `width` place it in a bar that is 1000 wide."""

    name: str
    seconds: float
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class TimeBar:
    """One clock."""

    title: str
    parts: list[Part]


_EPISODE = {"generate": "generation", "tools": "tools", "sandbox": "sandbox start", "grade": "grading"}


def time_bars(steps: Sequence[Step], phases: Mapping[str, float]) -> list[TimeBar]:
    """The bars that there are numbers for. `phases` is the run's last `time` row: seconds by `NAME_s`."""
    busy_s = sum(step.get("step_engine_busy_s", 0.0) for step in steps)
    wall_s = steps[-1].get("wall_s", 0.0) if steps else 0.0
    engine = {"generating": busy_s, "idle": max(0.0, wall_s - busy_s)} if busy_s else {}
    bars = (
        ("The run", {name.removesuffix("_s").replace("_", " "): seconds for name, seconds in phases.items()}),
        ("The trainer, while training", {name: _sum(steps, f"step_{key}_s") for name, key in _TRAINER.items()}),
        ("The engine, while training", engine),
        ("An episode, mean", {name: _mean(steps, f"episode_{key}_s") for key, name in _EPISODE.items()}),
    )
    return [bar for title, spent in bars if (bar := _bar(title, spent)) is not None]


_TRAINER = {"training": "train", "waiting for episodes": "wait"}


def _sum(steps: Sequence[Step], name: str) -> float:
    return sum(step.get(name, 0.0) for step in steps)


def _mean(steps: Sequence[Step], name: str) -> float:
    values = [step[name] for step in steps if name in step]
    return sum(values) / len(values) if values else 0.0


def _bar(title: str, spent: Mapping[str, float]) -> TimeBar | None:
    spent = {name: seconds for name, seconds in spent.items() if seconds > 0}
    total = sum(spent.values())
    parts, x = [], 0.0
    for name, seconds in spent.items():
        width = 1000 * seconds / total
        parts.append(Part(name, seconds, x, width))
        x += width
    return TimeBar(title, parts) if parts else None
