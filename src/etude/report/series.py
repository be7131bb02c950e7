"""From metrics rows to columns of numbers: what `charts` and `picture` draw. Pure.

Rows come as `metrics.read_rows` gives them. Seconds in `step` rows (`train_s`, `wait_s`) and the engine's counters are
sums since the start of a process, so that a fall means that the run was resumed.

What it does not do: read files, or choose what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Step = Mapping[str, float]
Column = tuple[list[float], list[float]]
"""x and y, of the steps that have a value."""


def step_rows(rows: Sequence[Mapping[str, Any]]) -> list[Step]:
    """The numbers of each optimizer step in order; of a step that was recorded twice, the later row.

    A version's probe (kind `agreement`) is put beside the step that made it.
    """
    steps: dict[int, Step] = {}
    probes: dict[int, Step] = {}
    for entry in rows:
        row = _numbers(entry["row"])
        if entry["kind"] in ("step", "agreement") and "step" in row:
            (steps if entry["kind"] == "step" else probes)[int(row["step"])] = row
    steps = {step: {**probes.get(step, {}), **row} for step, row in steps.items()}
    return _with_rates([steps[number] for number in sorted(steps)])


def last_row(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, float]:
    """The numbers of the last row of a kind, empty if there is none."""
    return next((_numbers(entry["row"]) for entry in reversed(rows) if entry["kind"] == kind), {})


def _numbers(row: Mapping[str, Any]) -> Step:
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, float | int) and math.isfinite(float(value))
    }


def _with_rates(steps: Sequence[Step]) -> list[Step]:
    """Adds what one step alone took (`step_train_s`, `step_wait_s`, `step_engine_busy_s`), and `tokens_per_s`.

    The engine also works before training, so that its first row only tells where the counters stand.
    """
    done: list[Step] = []
    before: Step = {}
    for step in steps:
        row = dict(step)
        for name in ("train_s", "wait_s", "engine_busy_s"):
            if name in step:
                row[f"step_{name}"] = _increase(before, step, name) if before or name != "engine_busy_s" else 0.0
        wall_s = step.get("wall_s", 0.0) - before.get("wall_s", math.inf)
        if "engine_sampled_tokens" in step and wall_s > 0:
            row["tokens_per_s"] = _increase(before, step, "engine_sampled_tokens") / wall_s
        done.append(row)
        before = step
    return done


def _increase(before: Step, now: Step, name: str) -> float:
    old = before.get(name, 0.0)
    return now[name] - old if now[name] >= old else now[name]


def column(steps: Sequence[Step], name: str, x: str = "step") -> Column:
    """The values of `name` over `x`."""
    pairs = [(step[x], step[name]) for step in steps if name in step and x in step]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def smooth(values: Sequence[float], width: int = 9) -> list[float]:
    """Mean over a window of `width` values around each one; the window shrinks at the ends, evenly on both sides.

    >>> smooth([0.0, 3.0, 6.0, 0.0], width=3)
    [0.0, 3.0, 3.0, 0.0]
    """
    means = []
    for middle in range(len(values)):
        reach = min(width // 2, middle, len(values) - 1 - middle)
        window = values[middle - reach : middle + reach + 1]
        means.append(sum(window) / len(window))
    return means


def staleness_counts(steps: Sequence[Step]) -> dict[int, int]:
    """Groups by staleness (optimizer steps between sampling and training), summed over all steps."""
    counts: dict[int, int] = {}
    for step in steps:
        for key, value in step.items():
            age = key.removeprefix("staleness_")
            if age != key and age.isdigit():
                counts[int(age)] = counts.get(int(age), 0) + int(value)
    return dict(sorted(counts.items()))
