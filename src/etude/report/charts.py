"""The curves of a run as plotly figures in plain data. Colours are names of CSS variables, filled in by page.js, so
that the same figures serve light and dark pages.

What it does not do: draw (plotly.js does, in the reader's browser), or show a curve that has no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from etude.report.series import Step, column, smooth, staleness_counts

Trace = dict[str, Any]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One figure: `note` says how to read it."""

    title: str
    note: str
    data: list[Trace]
    layout: dict[str, Any]


def charts(steps: Sequence[Step]) -> list[Chart]:
    """Every curve that these steps have numbers for, the important ones first."""
    made: list[Chart | None] = [
        _curve(steps, "Solved", "Share of training episodes that solved their task.", "solve_rate", percent=True),
        _curve(steps, "Reward", "Mean reward of the episodes trained on.", "reward_mean"),
        _curve(steps, "Tokens", "Tokens that an episode sampled, mean.", "sampled_tokens_mean"),
        _curve(steps, "Turns", "Replies of the agent in an episode, mean.", "turns_mean"),
        _staleness(steps),
        _speed(steps),
        _mismatch(steps),
        _family(
            steps,
            "Off-policy ratio",
            "Probability under the trainer over probability when sampled, for tokens of older versions.",
            "off_policy_ratio",
        ),
        _curve(
            steps,
            "Route overlap",
            "Replayed experts that the trainer would have chosen.",
            "route_overlap",
            percent=True,
        ),
        _curve(steps, "Replaced routes", "Replayed experts that were implausible.", "replaced_share", percent=True),
        _curve(steps, "Distance from the reference", "KL a token, by its estimate k1, in nats.", "kl_k1"),
        _areas(
            steps,
            "Trainer's time",
            "Seconds of each step: taking it, and waiting for episodes.",
            {"step_train_s": "training", "step_wait_s": "waiting"},
        ),
        _areas(
            steps,
            "An episode's time",
            "Mean seconds of an episode by activity. Episodes run at once, so this is not the run's time.",
            {
                "episode_generate_s": "generation",
                "episode_tools_s": "tools",
                "episode_sandbox_s": "sandbox start",
                "episode_grade_s": "grading",
            },
        ),
        _curve(steps, "Groups without signal", "Groups whose episodes all earned the same.", "zero_variance_groups"),
        _curve(steps, "Loss", "Policy-gradient loss; its level means little, its jumps do.", "loss"),
        _curve(steps, "Gradient norm", "Before clipping.", "grad_norm"),
        _curve(steps, "Entropy", "Of the next-token distribution at sampled tokens, in nats.", "entropy"),
    ]
    return [chart for chart in made if chart is not None]


def _line(x: list[float], y: list[float], name: str, colour: str, **more: Any) -> Trace:
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "name": name, "line": {"color": colour}} | more


def _curve(steps: Sequence[Step], title: str, note: str, name: str, *, percent: bool = False) -> Chart | None:
    x, y = column(steps, name)
    if not x:
        return None
    raw: Trace = {"type": "scatter", "mode": "markers", "x": x, "y": y, "name": "a step"}
    raw |= {"marker": {"color": "--faint", "size": 4}}
    layout: dict[str, Any] = {"yaxis": {"tickformat": ".0%" if percent else "~g"}}
    return Chart(
        title=title, note=note, data=[raw, _line(x, smooth(y), "mean of nine steps", "--after")], layout=layout
    )


def _staleness(steps: Sequence[Step]) -> Chart | None:
    counts = staleness_counts(steps)
    note = "Groups by the number of optimizer steps between sampling their oldest token and training on it."
    if not counts:
        return _curve(steps, "Staleness", "Mean over the groups of a step, in optimizer steps.", "staleness_mean")
    bars: Trace = {"type": "bar", "x": [str(age) for age in counts], "y": list(counts.values()), "name": "groups"}
    layout = {"xaxis": {"title": {"text": "optimizer steps old"}, "type": "category"}}
    return Chart(title="Staleness", note=note, data=[bars | {"marker": {"color": "--after"}}], layout=layout)


def _speed(steps: Sequence[Step]) -> Chart | None:
    return _curve(steps, "Tokens per second", "Sampled by the engine, by the run's clock.", "tokens_per_s")


def _names(steps: Iterable[Step], prefix: str) -> list[str]:
    return sorted({name for step in steps for name in step if name.startswith(prefix) and not name.endswith("_count")})


def _family(steps: Sequence[Step], title: str, note: str, prefix: str) -> Chart | None:
    """All statistics of one measure, a line each."""
    return _lines(steps, title, note, {name: name.removeprefix(f"{prefix}_") for name in _names(steps, prefix)}, {})


def _mismatch(steps: Sequence[Step]) -> Chart | None:
    labels = {name: name.removeprefix("mismatch_").replace("_", " ") for name in _names(steps, "mismatch")}
    note = (
        "Difference of log-probabilities between engine and trainer, logarithmic. "
        "“live”: tokens sampled by the very version that trains on them."
    )
    return _lines(steps, "Mismatch", note, labels, {"yaxis": {"type": "log", "exponentformat": "e"}})


_COLOURS = ("--after", "--control", "--before", "--extra", "--faint")


def _lines(
    steps: Sequence[Step], title: str, note: str, labels: Mapping[str, str], layout: dict[str, Any]
) -> Chart | None:
    data = [
        _line(*column(steps, name), label, _COLOURS[number % len(_COLOURS)])
        for number, (name, label) in enumerate(labels.items())
        if column(steps, name)[0]
    ]
    return Chart(title=title, note=note, data=data, layout=layout | {"showlegend": True}) if data else None


def _areas(steps: Sequence[Step], title: str, note: str, labels: Mapping[str, str]) -> Chart | None:
    """Stacked: the labels' values add up."""
    data = [
        _line(*column(steps, name), label, colour, stackgroup="one")
        for (name, label), colour in zip(labels.items(), _COLOURS, strict=False)
        if any(step.get(name) for step in steps)
    ]
    layout = {"showlegend": True, "yaxis": {"ticksuffix": " s", "rangemode": "tozero"}}
    return Chart(title=title, note=note, data=data, layout=layout) if data else None
