"""The whole of it, small: a real run of a mixture of experts through the command, and all commands that read it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cli.test_commands import etude
from etude.frames import read_file
from etude.metrics import read_rows
from etude.rl.audit import audit_run
from etude.types import Batch
from mixture import write_mixture
from rl.small_run import command, run_to_the_end, write_small_recipe

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    recipe = write_small_recipe(folder, steps=STEPS, model=str(write_mixture(folder / "mixture")))
    result = json.loads(run_to_the_end(recipe, folder / "runs", ["eval.every=2"]))
    assert result["steps"] == STEPS
    return folder / "runs" / "small"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_run_keeps_its_invariants(run: Path) -> None:
    problems = audit_run(run, f"file://{run}/weights")
    assert problems == {"ledger": [], "batches": [], "staleness": [], "policy": [], "weights": []}
    assert etude("check", "small", cwd=run.parents[1]).returncode == 0


def test_its_weights_are_those_of_its_batches_bit_for_bit(run: Path, tmp_path: Path) -> None:
    assert etude("check", "small", "--replay", cwd=run.parents[1]).returncode == 0
    shutil.copytree(run, tmp_path / "runs" / "small", ignore=shutil.ignore_patterns("weights"))
    recipe = tmp_path / "runs" / "small" / "recipe.toml"
    text = recipe.read_text().replace("file://{run}/weights", f"file://{run}/weights")
    changed, count = re.subn(r"(?m)^lr = .*$", "lr = 0.00013", text)
    assert count == 1
    recipe.write_text(changed)
    refused = etude("check", "small", "--replay", "--json", cwd=tmp_path)
    assert refused.returncode == 1
    assert "are not those of its batches" in json.loads(refused.stdout)["replay"][0]


def test_it_is_measured_on_the_way(run: Path) -> None:
    rows = [row["row"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "eval"]
    assert [(row["when"], row["step"]) for row in rows] == [("before", 0), ("control", 0), ("step-2", 2), ("after", 4)]


def test_every_trained_token_knows_its_version_and_its_routes(run: Path) -> None:
    for path in sorted((run / "batches").iterdir()):
        for sample in read_file(path, Batch).samples:
            assert sample.routes is not None
            assert sample.routes.valid.all()
            assert sample.routes.experts.shape[0] == len(sample.ids) - 1
            assert sample.versions[0].start == int(sample.mask.argmax())
            assert (sample.logprobs[sample.mask] < 0).all()


def test_trainer_and_engine_agree_on_fresh_tokens(run: Path) -> None:
    rows = read_rows(run / "metrics.jsonl")
    probes = [row["row"] for row in rows if row["kind"] == "agreement"]
    assert probes
    assert all(row["mismatch_max"] < 1e-4 for row in probes)
    first = next(row["row"] for row in rows if row["kind"] == "step")
    assert first["mismatch_live_count"] > 0
    assert first["mismatch_live_p99"] < 1e-4


def test_a_damaged_batch_is_found(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "small"
    shutil.copytree(run, copy)
    path = copy / "batches" / "000002.mp"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    problems = audit_run(copy, f"file://{run}/weights", only="batches")
    assert "000002.mp is not the batch" in problems["batches"][0]


def test_the_readers_read_it(run: Path) -> None:
    home = run.parents[1]
    listed = json.loads(etude("runs", "list", "--json", cwd=home).stdout)
    assert [(row["name"], row["state"]) for row in listed] == [("small", "done")]
    shown = json.loads(etude("runs", "show", "small", "--json", cwd=home).stdout)
    assert shown["result"]["steps"] == STEPS
    versions = json.loads(etude("weights", "list", "small", "--json", cwd=home).stdout)
    assert versions[-1]["step"] == STEPS
    assert etude("weights", "verify", "small", cwd=home).returncode == 0
    written = home / etude("report", "small", cwd=home).stdout.strip()
    assert written.stat().st_size > 100_000


def test_the_same_command_makes_a_new_run_once_the_first_is_done(run: Path) -> None:
    recipe, runs = run.parents[1] / "small.toml", run.parent
    process = subprocess.Popen(command(recipe, runs), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while not (runs / "small-2" / "logs" / "trainer.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "runs resume small-2" in words.replace("\n", " ")
