"""The picture of a run for a README: before, control and after on the left, the learning curve on the right.

One SVG of plain shapes: no script, no font, no network; it follows the reader's light or dark scheme.

What it does not do: read files (the caller has the rows and the result), or draw what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from etude.report.result import Measured, Result, points
from etude.report.series import Column, column, smooth, step_rows

WIDTH, HEIGHT = 900, 340
_TOP, _BOTTOM = 76, 292
"""Upper and lower edge of both panels' drawing areas."""
_STYLE = """
.t{font:14px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:#1c1f24}
.h{font-weight:600;font-size:16px}.s{fill:#5c636d;font-size:12.5px}.v{font-weight:700;font-size:18px}
.card{fill:#fff;stroke:#e3e0d8}.grid{stroke:#e3e0d8}.ci{stroke:#1c1f24;stroke-width:1.5}
.before{fill:#71809a}.control{fill:#b7791f}.after{fill:#0d7d6c}.pale{opacity:.28}
.dot{fill:#b9bec6}.curve{fill:none;stroke:#0d7d6c;stroke-width:2.5;stroke-linejoin:round}
@media (prefers-color-scheme:dark){
.t{fill:#e7e5df}.s{fill:#9aa2ad}.card{fill:#1b1e24;stroke:#2e333b}.grid{stroke:#2e333b}.ci{stroke:#e7e5df}
.before{fill:#8f9db5}.control{fill:#e0a84b}.after{fill:#3fbfa7}.dot{fill:#565d68}.curve{stroke:#3fbfa7}}
"""
_BARS = (
    ("before", ("before", "training")),
    ("control", ("before, until", "a test passes")),
    ("after", ("after", "training")),
)


def learning_svg(rows: Sequence[Mapping[str, Any]], result: Result | None) -> str:
    """The picture as SVG text. `rows` as of `metrics.read_rows`; without a result the left panel says so."""
    steps = step_rows(rows)
    by_time = bool(steps) and all("wall_s" in step for step in steps)
    curve = column(steps, "solve_rate", x="wall_s" if by_time else "step")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(_label(result))}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>',
        *_outcome(result),
        *_curve(curve, by_time),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _label(result: Result | None) -> str:
    if result is None or result.after is None:
        return "Learning curve of a run that is not finished"
    return f"Solved at the first try: {result.before.pass1:.1%} before training, {result.after.pass1:.1%} after"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="t {kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _height(share: float, top: float) -> float:
    """The y of a share on an axis that ends at `top`."""
    return _BOTTOM - (_BOTTOM - _TOP) * share / top


# Before and after


def _outcome(result: Result | None) -> list[str]:
    parts = [_text(28, 38, "Held-out tasks solved at the first try", "h")]
    if result is None:
        return [*parts, _text(28, 60, "not evaluated yet", "s")]
    measured: list[tuple[str, tuple[str, str], Measured]] = [
        (kind, words, one) for kind, words in _BARS if (one := getattr(result, kind)) is not None
    ]
    top = _axis_end(max(max(one.pass1, one.pass8 or 0.0, *(one.pass1_ci95 or (0.0,))) for _, _, one in measured))
    parts.append(_text(28, 58, f"pale: in one of {result.before.k} tries; {result.before.n} tasks", "s"))
    for number, (kind, words, one) in enumerate(measured):
        parts += _bar(44 + 128 * number, kind, words, one, top)
    parts.append(f'<path class="grid" d="M28 {_BOTTOM}H{44 + 128 * 3 - 24}"/>')
    if result.gain is not None and result.gain_ci95 is not None:
        low, high = result.gain_ci95
        gain = f"{points(result.gain)} points ({points(low)} to {points(high)})"
        parts[1] = _text(28, 58, f"{gain}; pale: in one of {result.before.k} tries", "s")
    return parts


def _bar(x: float, kind: str, words: tuple[str, str], one: Measured, top: float) -> list[str]:
    width = 76
    y = _height(one.pass1, top)
    parts = []
    if one.pass8 is not None:
        y8 = _height(one.pass8, top)
        parts.append(
            f'<rect class="{kind} pale" x="{x}" y="{y8:.1f}" width="{width}" height="{_BOTTOM - y8:.1f}" rx="4"/>'
        )
    parts.append(f'<rect class="{kind}" x="{x}" y="{y:.1f}" width="{width}" height="{_BOTTOM - y:.1f}" rx="4"/>')
    if one.pass1_ci95 is not None:
        low, high = (_height(share, top) for share in one.pass1_ci95)
        parts.append(f'<path class="ci" d="M{x + width - 10} {low:.1f}V{high:.1f}"/>')
    parts.append(_text(x + width / 2, y - 8, f"{one.pass1:.1%}", "v", "middle"))
    parts += [_text(x + width / 2, _BOTTOM + 18 + 15 * line, word, "s", "middle") for line, word in enumerate(words)]
    return parts


def _axis_end(largest: float) -> float:
    """The next tenth above, so that numbers over the bars fit."""
    return max(0.1, math.ceil(10 * largest + 0.5) / 10)


# The curve

_LEFT, _RIGHT = 500, WIDTH - 28


def _curve(curve: Column, by_time: bool) -> list[str]:
    xs, ys = curve
    parts = [_text(_LEFT - 34, 38, "Training tasks solved, each met once", "h")]
    if len(xs) < 2:
        return [*parts, _text(_LEFT - 34, 58, "no steps yet", "s")]
    low, high = _limits(ys)
    first, last = (0.0, xs[-1]) if by_time else (xs[0], xs[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (_RIGHT - _LEFT) * (x - first) / (last - first)
        return across, _BOTTOM - (_BOTTOM - _TOP) * (y - low) / (high - low)

    parts.append(_text(_LEFT - 34, 58, "points: one optimizer step; line: mean of nine", "s"))
    for tenth in range(round(10 * low), round(10 * high) + 1):
        _, y = place(first, tenth / 10)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{10 * tenth}%", "s", "end"))
    dots = (place(x, y) for x, y in zip(xs, ys, strict=True))
    parts += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in dots]
    line = (place(x, y) for x, y in zip(xs, smooth(ys), strict=True))
    parts.append('<path class="curve" d="M' + "L".join(f"{x:.1f} {y:.1f}" for x, y in line) + '"/>')
    ends = (f"{first / 60:.0f}", f"{last / 60:.1f} minutes") if by_time else (f"{first:.0f}", f"step {last:.0f}")
    parts.append(_text(_LEFT, _BOTTOM + 18, ends[0], "s"))
    parts.append(_text(_RIGHT, _BOTTOM + 18, ends[1], "s", "end"))
    return parts


def _limits(ys: Sequence[float]) -> tuple[float, float]:
    """Tenths around all values."""
    low, high = math.floor(10 * min(ys)) / 10, math.ceil(10 * max(ys)) / 10
    return low, high if high > low else low + 0.1
