"""The studies: one arm for seconds, end to end, and what table and picture say, also of the results that are kept."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

STUDY = Path(__file__).parents[1] / "studies" / "learning.py"


def study(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(STUDY), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_smoke_arm_runs_resumes_and_is_tabled_and_drawn(tmp_path: Path) -> None:
    results = str(tmp_path / "results.jsonl")
    places = (
        "--runs",
        str(tmp_path),
        "--results",
        results,
        "--json",
        str(tmp_path / "table.json"),
        "--plot",
        str(tmp_path / "plot.svg"),
    )
    done = study("--smoke", "--arms", "shuffled", *places)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "table.json").read_text())
    result = json.loads((tmp_path / "shuffled-0" / "result.json").read_text())
    assert (row["arm"], row["seeds"], row["gains"]) == ("shuffled", 1, [result["gain"]])
    assert row["gain"][0] == pytest.approx(result["gain"])
    assert "| shuffled | 1 |" in done.stdout
    words = "".join(ElementTree.parse(tmp_path / "plot.svg").getroot().itertext())
    assert "shuffled" in words
    assert f"{100 * row['gain'][0]:+.1f}" in words
    again = study("--smoke", "--arms", "shuffled", *places)
    assert again.returncode == 0
    assert again.stdout == done.stdout.replace(done.stdout.splitlines()[0] + "\n", "", 1)  # nothing ran again


@pytest.mark.parametrize("name", ["learning", "normalisation", "kl_estimators", "staleness"])
def test_every_study_tables_what_is_kept(name: str) -> None:
    path = STUDY.with_name(f"{name}.py")
    done = subprocess.run([sys.executable, str(path), "--table"], capture_output=True, text=True, check=True)
    kept = STUDY.parent / "results" / f"{name}.jsonl"
    arms = {json.loads(line)["arm"] for line in kept.read_text().splitlines()} if kept.exists() else set()
    assert {line.split("|")[1].strip() for line in done.stdout.splitlines()[2:] if line} == arms


def test_an_arm_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    refused = study("--arms", "longer", "--table", "--runs", str(tmp_path))
    assert refused.returncode == 2
    assert "'longer'" in refused.stderr
