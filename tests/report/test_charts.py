from pathlib import Path

import plotly.graph_objects as go

from etude.metrics import read_rows
from etude.report.charts import Chart, charts
from etude.report.series import step_rows
from report.made_run import record_steps


def made(folder: Path) -> dict[str, Chart]:
    record_steps(folder, 20)
    return {chart.title: chart for chart in charts(step_rows(read_rows(folder / "metrics.jsonl")))}


def test_every_curve_that_has_numbers_is_drawn(tmp_path: Path) -> None:
    titles = set(made(tmp_path))
    assert {"Solved", "Reward", "Tokens", "Turns", "Staleness", "Mismatch", "Off-policy ratio"} <= titles
    assert {"Trainer's time", "An episode's time", "Tokens per second", "Loss", "Gradient norm", "Entropy"} <= titles


def test_a_curve_without_numbers_is_left_out() -> None:
    assert charts([]) == []
    assert [chart.title for chart in charts([{"step": 1.0, "loss": 2.0}])] == ["Loss"]


def test_without_a_histogram_staleness_is_a_curve() -> None:
    (chart,) = charts([{"step": 1.0, "staleness_mean": 0.5}])
    assert (chart.title, chart.data[0]["y"]) == ("Staleness", [0.5])


def test_the_histogram_sums_groups_over_the_run(tmp_path: Path) -> None:
    (bars,) = made(tmp_path)["Staleness"].data
    assert (bars["x"], bars["y"]) == (["0", "1", "2"], [80, 260, 60])


def test_mismatch_and_off_policy_ratio_stay_apart(tmp_path: Path) -> None:
    shown = made(tmp_path)
    assert {trace["name"] for trace in shown["Mismatch"].data} == {"p99", "live mean"}
    assert {trace["name"] for trace in shown["Off-policy ratio"].data} == {"mean", "p99"}


def test_plotly_accepts_every_figure(tmp_path: Path) -> None:
    def coloured(value: object) -> object:
        if isinstance(value, dict):
            return {key: coloured(inner) for key, inner in value.items()}
        return "#123456" if isinstance(value, str) and value.startswith("--") else value

    for chart in made(tmp_path).values():
        go.Figure(data=[coloured(trace) for trace in chart.data], layout=coloured(chart.layout))


def test_every_colour_is_one_of_the_page_s(tmp_path: Path) -> None:
    from etude.report.html import _asset

    css = str(_asset("page.css"))
    for chart in made(tmp_path).values():
        for trace in chart.data:
            colour = (trace.get("line") or trace.get("marker"))["color"]
            assert css.count(f"{colour}:") == 2, f"{colour} is needed for light and dark"
