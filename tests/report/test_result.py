import json
from pathlib import Path

import pytest

from etude.errors import RunError
from etude.report.result import Result, differences, headline, read_result, table
from report.made_run import RESULT


def result(folder: Path, **changes: object) -> Result:
    path = folder / "result.json"
    path.write_text(json.dumps({key: value for key, value in {**RESULT, **changes}.items() if value is not None}))
    made = read_result(path)
    assert made is not None
    return made


def test_the_table_has_before_control_and_after_in_this_order(tmp_path: Path) -> None:
    lines = table(result(tmp_path))
    assert [(line.kind, line.pass1, line.passk, line.distinct) for line in lines] == [
        ("before", "28.3%", "58.1%", "1.31"),
        ("control", "36.5%", "58.7%", "1.34"),
        ("after", "41.2%", "60.2%", "1.29"),
    ]
    assert "barred from finishing until a test passes" in lines[1].name


def test_differences_carry_their_intervals(tmp_path: Path) -> None:
    assert [words[1:] for words in differences(result(tmp_path))] == [
        ("+12.9", "+9.6 to +16.2"),
        ("+4.7", "+1.8 to +7.6"),
    ]


@pytest.mark.parametrize(
    ("ci95", "words"),
    [
        ([0.01, 0.2], "Training raised"),
        ([-0.2, -0.01], "Training lowered"),
        ([-0.01, 0.2], "No change is shown"),
        ([0.0, 0.2], "No change is shown"),
        (None, "no interval was computed"),
    ],
)
def test_the_headline_claims_only_what_the_interval_shows(tmp_path: Path, ci95: object, words: str) -> None:
    assert words in headline(result(tmp_path, gain_ci95=ci95))


def test_the_headline_of_a_run_that_is_not_evaluated_says_so(tmp_path: Path) -> None:
    assert "no result yet" in headline(None)
    assert "no evaluation after training" in headline(result(tmp_path, after=None, gain=None, gain_ci95=None))


def test_a_result_that_is_missing_is_none_and_one_that_is_broken_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert read_result(path) is None
    for text in ("", "{", "[]", '{"after": {}}', '{"before": {"pass1": "x", "n": 1}}', '{"before": 3}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(RunError, match=r"result\.json is no result"):
            read_result(path)
