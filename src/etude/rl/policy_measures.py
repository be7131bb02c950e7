"""How far trainer and engine were one policy, over a whole run: from its metrics rows, for `etude check --only policy`.

    mismatch             a probe of each version: engine as it serves, trainer as it trains, same tokens and routes
    mismatch_live        |log pi - log mu| of trained tokens whose version and whole KV were the trainer's own
    off_policy_ratio     pi / mu of all other trained tokens
    route_overlap        share of replayed experts that the trainer's routers would have chosen too
    replaced_share       share of replayed experts that the plausibility filter replaced
    missing_route_rows   tokens without a recorded route
    split_groups         prompts that could not be shared because their routes differ

The first three are never merged (docs/semantics.md 5.2). Rows keep a step's mean, median and 99th percentile; here the
mean is weighted by counts, the median is that of the steps' medians, and the 99th percentile the worst of the steps'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

DISTRIBUTIONS = ("mismatch", "mismatch_live", "off_policy_ratio")
SHARES = ("route_overlap", "replaced_share")
COUNTS = ("missing_route_rows", "split_groups")
BOUND = 1e-3
"""Of the probe's 99th percentile where nothing is rounded: ten times what rounding of float32 gives."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table. `value` is a mean, a mean share, or a sum; p50 and p99 are None but for distributions."""

    name: str
    value: float
    count: int
    """Tokens; steps for shares and sums."""
    p50: float | None = None
    p99: float | None = None


def policy_measures(rows: Iterable[Mapping[str, Any]]) -> list[Measure]:
    """Those that the run has numbers for. rows: as `metrics.read_rows` gives them."""
    numbers = [entry["row"] for entry in rows if entry["kind"] in ("step", "agreement")]
    found = [_distribution(name, numbers) for name in DISTRIBUTIONS]
    for name in SHARES:
        values = [row[name] for row in numbers if name in row]
        found.append(Measure(name, fmean(values), len(values)) if values else None)
    for name in COUNTS:
        values = [row[name] for row in numbers if name in row]
        found.append(Measure(name, sum(values), len(values)) if values else None)
    return [measure for measure in found if measure is not None]


def _distribution(name: str, rows: Iterable[Mapping[str, Any]]) -> Measure | None:
    filled = [row for row in rows if row.get(f"{name}_count")]
    if not filled:
        return None
    count = sum(row[f"{name}_count"] for row in filled)
    mean = sum(row[f"{name}_mean"] * row[f"{name}_count"] for row in filled) / count
    p50, p99 = median(row[f"{name}_p50"] for row in filled), max(row[f"{name}_p99"] for row in filled)
    return Measure(name, mean, int(count), p50, p99)


def policy_problems(measures: Iterable[Measure], *, is_rounded: bool, filters: bool) -> list[str]:
    """What cannot be rounding. is_rounded: the policy is published in 16 bits; filters: so are replayed experts."""
    if is_rounded or filters:
        return []
    return [
        f"trainer and engine differ by {measure.p99:.2g} (p99) in a log-prob of the same version: more than rounding"
        for measure in measures
        if measure.name in ("mismatch", "mismatch_live") and measure.p99 is not None and measure.p99 > BOUND
    ]
