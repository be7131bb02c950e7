import re
from pathlib import Path
from xml.etree import ElementTree

from etude.metrics import read_rows
from etude.report.picture import HEIGHT, WIDTH, learning_svg
from etude.report.result import read_result
from report.made_run import begin, finish, record_steps


def drawn(folder: Path) -> str:
    begin(folder)
    record_steps(folder)
    finish(folder)
    return learning_svg(read_rows(folder / "metrics.jsonl"), read_result(folder / "result.json"))


def test_the_picture_is_well_formed_and_shows_all_three_policies_and_the_gain(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "run")
    ElementTree.fromstring(picture)
    for text in ("28.3%", "36.5%", "41.2%", "+12.9 points (+9.6 to +16.2)", "a test passes", "5.3 minutes"):
        assert text in picture
    assert picture.count("<circle") == 60


def test_everything_lies_inside_the_frame(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "run")
    xs = [float(x) for x in re.findall(r' c?x="([\d.-]+)"', picture)]
    ys = [float(y) for y in re.findall(r' c?y="([\d.-]+)"', picture)]
    assert 0 <= min(xs) < max(xs) <= WIDTH
    assert 0 <= min(ys) < max(ys) <= HEIGHT


def test_a_run_without_steps_or_result_says_so_in_the_picture() -> None:
    picture = learning_svg([], None)
    ElementTree.fromstring(picture)
    assert "not evaluated yet" in picture
    assert "no steps yet" in picture


def test_without_a_clock_the_curve_runs_over_steps() -> None:
    rows = [{"time": 0.0, "kind": "step", "row": {"step": step, "solve_rate": 0.5}} for step in (1, 2, 3)]
    assert "step 3" in learning_svg(rows, None)


def test_the_picture_loads_and_runs_nothing(tmp_path: Path) -> None:
    picture = drawn(tmp_path / "run").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"<script|<image|href|url\(|@import|https?:", picture)
