"""What all benchmarks share: arms in turn, medians with ranges and raw values, goals, one JSON form.

    rows = in_turn({"ours": measure_ours, "peer": measure_peer}, repeats=5)
    report("sandbox", rows, {"ready_per_s": median(...)}, json_path)

A figure means little alone on a machine that others use: arms of one repeat run within moments of each other, and goals
that name a peer are ratios of the same run. Goals live in goals.toml.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

GOALS = Path(__file__).with_name("goals.toml")
Row = dict[str, Any]


def arguments(text: str | None, *, repeats: int = 5) -> argparse.ArgumentParser:
    """--json and --repeats; a benchmark adds its own."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--repeats", type=int, default=repeats, help="rounds in which every arm runs once")
    return parser


def in_turn(arms: Mapping[str, Callable[[], Mapping[str, float]]], *, repeats: int) -> list[Row]:
    """One row an arm and a quantity: median, range and raw values over rounds in which every arm runs once."""
    raw: dict[tuple[str, str], list[float]] = {}
    for round_ in range(repeats):
        for arm, measure in arms.items():
            for quantity, value in measure().items():
                raw.setdefault((arm, quantity), []).append(value)
            print(f"round {round_ + 1} of {repeats}: {arm}", flush=True)
    return [
        {"arm": arm, "quantity": quantity, "median": statistics.median(values), "min": min(values),
         "max": max(values), "raw": values}
        for (arm, quantity), values in raw.items()
    ]  # fmt: skip


def median(rows: Sequence[Row], arm: str, quantity: str) -> float:
    """Errors: StopIteration if it was not measured."""
    return float(next(row["median"] for row in rows if (row["arm"], row["quantity"]) == (arm, quantity)))


def ratio(rows: Sequence[Row], arm: str, peer: str, quantity: str) -> float:
    """Median over rounds of arm / peer, both of the same round."""
    ours, theirs = (
        next(row["raw"] for row in rows if (row["arm"], row["quantity"]) == (name, quantity)) for name in (arm, peer)
    )
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def judged(subject: str, values: Mapping[str, float], limits: Mapping[str, str], goals: Path = GOALS) -> list[Row]:
    """Every goal of the subject with its value; NaN: it was left out this time. Errors: KeyError if one is missing."""
    found = []
    for goal in tomllib.loads(goals.read_text()).get(subject, []):
        measured = values[goal["name"]]
        value = None if math.isnan(measured) else measured
        met = None if value is None else value >= goal["goal"] if goal["better"] == "higher" else value <= goal["goal"]
        found.append({"name": goal["name"], "value": value, "unit": goal["unit"], "goal": goal["goal"],
                      "better": goal["better"], "met": met, "limit": limits.get(goal["name"], "")})  # fmt: skip
    return found


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": cpu[0] if cpu else platform.machine(), "cores": len(cpu), "python": platform.python_version(),
            "kernel": platform.release()}  # fmt: skip


def report(subject: str, rows: Sequence[Row], values: Mapping[str, float], path: Path | None, *,
           limits: Mapping[str, str] | None = None) -> bool:  # fmt: skip
    """Print rows and goals, write the JSON; whether every goal that was measured is met."""
    goals = judged(subject, values, limits or {})
    for row in rows:
        span = f"{row['min']:,.4g} to {row['max']:,.4g}"
        print(f"{row['arm']:<28} {row['quantity']:<24} {row['median']:>12,.4g}   ({span})")
    for goal in goals:
        sign = "at least" if goal["better"] == "higher" else "at most"
        if goal["met"] is None:
            print(f"left out {goal['name']}")
            continue
        verdict = "met" if goal["met"] else "NOT met"
        limit = f"; limit: {goal['limit']}" if goal["limit"] else ""
        print(f"{verdict:<8} {goal['name']} {goal['value']:,.4g} {goal['unit']}, goal {sign} {goal['goal']:,}{limit}")
    if path is not None:
        body = {"subject": subject, "machine": machine(), "rows": list(rows), "goals": goals}
        path.write_text(json.dumps(body, indent=1))
    return all(goal["met"] is not False for goal in goals)
