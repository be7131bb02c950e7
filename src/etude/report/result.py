"""`result.json` of a run, and what it says in words: the before/after table and the sentence on top of the report.

What it does not do: compute any of it. The intervals come from the evaluation, and are only shown here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from etude.errors import RunError

Interval = tuple[float, float]
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on the held-out tasks. Shares are between 0 and 1."""

    pass1: float
    n: int
    """Tasks."""
    k: int = 8
    """Episodes of each task."""
    pass8: float | None = None
    """Unbiased pass@8; None with fewer than 8 episodes."""
    pass1_ci95: Interval | None = None
    distinct: float | None = None
    """Different correct patches, a task."""
    tokens: float | None = None
    """Tokens that an episode sampled, mean."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished run measured. Keys that are not named here are ignored."""

    before: Measured
    after: Measured | None = None
    control: Measured | None = None
    """The starting policy, barred from finishing until a test passes."""
    gain: float | None = None
    gain_ci95: Interval | None = None
    """Paired, of after - before in pass@1."""
    gain_over_control: float | None = None
    gain_over_control_ci95: Interval | None = None
    wall_s: float | None = None
    steps: int | None = None


def read_result(path: Path) -> Result | None:
    """None while the run has not written it. Errors: RunError if it is not what a run writes."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise RunError(f"{path} is no result of a run", cause=str(error), hint="restore it, or delete it") from error


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the before/after table, as text; `share` is pass@1 for the bar."""

    kind: str
    name: str
    pass1: str
    pass1_ci95: str
    passk: str
    n: str
    distinct: str
    tokens: str
    share: float


NAMES = {
    "before": "Before training",
    "control": "Before training, barred from finishing until a test passes",
    "after": "After training",
}
"""The three policies, in the table's order."""


def table(result: Result) -> list[TableRow]:
    """Before, control and after, as far as they were measured."""
    rows = []
    for kind, name in NAMES.items():
        measured: Measured | None = getattr(result, kind)
        if measured is not None:
            rows.append(_row(kind, name, measured))
    return rows


def _row(kind: str, name: str, measured: Measured) -> TableRow:
    return TableRow(
        kind=kind,
        name=name,
        pass1=f"{measured.pass1:.1%}",
        pass1_ci95=_span(measured.pass1_ci95, "{:.1%}") if measured.pass1_ci95 else "",
        passk="-" if measured.pass8 is None else f"{measured.pass8:.1%}",
        n=f"{measured.n} {TIMES} {measured.k}",
        distinct="-" if measured.distinct is None else f"{measured.distinct:.2f}",
        tokens="-" if measured.tokens is None else f"{measured.tokens:,.0f}",
        share=min(max(measured.pass1, 0.0), 1.0),
    )


def differences(result: Result) -> list[tuple[str, str, str]]:
    """(what, points, 95% interval) of after - before and after - control."""
    pairs = (
        (f"after {MINUS} before", result.gain, result.gain_ci95),
        (f"after {MINUS} control", result.gain_over_control, result.gain_over_control_ci95),
    )
    return [(name, points(gain), _span(ci95, "{}") if ci95 else "-") for name, gain, ci95 in pairs if gain is not None]


def points(share: float) -> str:
    """A difference of shares in points: `+12.9`, with a true minus sign."""
    return f"{100 * share:+.1f}".replace("-", MINUS)


def _span(ci95: Interval, form: str) -> str:
    low, high = (points(value) if form == "{}" else form.format(value) for value in ci95)
    return f"{low} to {high}"


def headline(result: Result | None) -> str:
    """One sentence: what the run shows, and whether it shows anything."""
    if result is None:
        return "This run has no result yet: it is unfinished, or stopped before its evaluation ended."
    before, after = result.before, result.after
    if after is None:
        return (
            f"Before training the agent solved {before.pass1:.1%} of {before.n} held-out tasks at the first try. "
            "There is no evaluation after training yet."
        )
    change = f"from {before.pass1:.1%} to {after.pass1:.1%} of {after.n} held-out tasks"
    if result.gain is None or result.gain_ci95 is None:
        return f"What the agent solves at the first try went {change}; no interval was computed."
    low, high = result.gain_ci95
    interval = f"{points(result.gain)} points, 95% interval {points(low)} to {points(high)}"
    if low > 0:
        return f"Training raised what the agent solves at the first try {change} ({interval})."
    if high < 0:
        return f"Training lowered what the agent solves at the first try {change} ({interval})."
    return f"No change is shown: what the agent solves at the first try went {change} ({interval})."
