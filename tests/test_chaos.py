"""A run that everything happens to: kills, a disk that fills up, a store that stalls."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos import Chaos, campaign
from etude.build import check_run
from etude.metrics import read_rows
from rl.small_run import command, run_to_the_end, write_small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 12


@pytest.mark.campaign
def test_twenty_kills_cost_nothing(tmp_path: Path) -> None:
    assert sum(campaign(tmp_path, kills=20).values()) == 20


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, 300 MB large."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def start(recipe: Path, runs: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(recipe, runs, *overrides), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


def steps_of(run: Path) -> int:
    """Optimizer steps that the run has recorded."""
    with contextlib.suppress(OSError):
        return max((row["row"]["step"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "step"), default=0)
    return 0


def wait_until(happened: Callable[[], bool], *, timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_full_disk_ends_the_run_with_its_name_and_nothing_is_lost(tmp_path: Path, mounted: Path) -> None:
    recipe, run = write_small_recipe(tmp_path, steps=STEPS), mounted / "small"
    process = start(recipe, mounted)
    wait_until(lambda: steps_of(run) >= 2)
    with contextlib.suppress(OSError), (mounted / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 20))
    _, words = process.communicate(timeout=240)
    assert process.returncode == 1, words[-2000:]
    words = " ".join(words.split())
    assert "No space left" in words or "disk is full" in words
    assert "Traceback" not in words
    (mounted / "filler").unlink()
    run_to_the_end(recipe, mounted)
    assert not any(check_run(run).values())
    assert json.loads((run / "result.json").read_text())["steps"] == STEPS


def remount(folder: Path, mode: str) -> None:
    """Once the processes that were killed have let go of it."""
    command = ["mount", "-o", f"remount,{mode}", folder]
    wait_until(lambda: subprocess.run(command, capture_output=True).returncode == 0, timeout_s=30)


def test_a_run_on_a_disk_that_became_read_only_says_so_and_goes_on_later(tmp_path: Path, mounted: Path) -> None:
    recipe, run = write_small_recipe(tmp_path, steps=STEPS), mounted / "small"
    process = start(recipe, mounted)
    wait_until(lambda: steps_of(run) >= 2)
    process.kill()
    process.communicate()
    remount(mounted, "ro")
    done = subprocess.run(command(recipe, mounted), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "Read-only file system" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    remount(mounted, "rw")
    run_to_the_end(recipe, mounted)
    assert not any(check_run(run).values())


def test_a_run_whose_folders_are_closed_in_the_middle_says_so_and_goes_on_later(tmp_path: Path) -> None:
    """Root may write where nobody may, unless it gave that power up."""
    recipe, runs = write_small_recipe(tmp_path, steps=STEPS), tmp_path / "runs"
    run = runs / "small"
    words = command(recipe, runs)
    if os.geteuid() == 0:
        words = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override", *words]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: steps_of(run) >= 2)
    folders = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        _, said = process.communicate(timeout=240)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert process.returncode == 1, said[-2000:]
    assert "Permission denied" in " ".join(said.split())
    assert "Traceback" not in said
    run_to_the_end(recipe, runs)
    assert not any(check_run(run).values())


SERVER = """
import sys
from weights.fake_s3 import fake_s3
with fake_s3(conditional=True) as (endpoint, _):
    print(endpoint, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def bucket() -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A bucket's process, and the environment that leads to it."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert server.stdout is not None
    environment = {
        "AWS_ENDPOINT_URL": server.stdout.readline().strip(), "AWS_ACCESS_KEY_ID": "test", "AWS_REGION": "us-east-1",
        "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    try:
        yield server, environment
    finally:
        server.kill()
        server.communicate()


def test_a_store_that_stalls_is_named_and_waited_for(
    tmp_path: Path, bucket: tuple[subprocess.Popen[str], dict[str, str]]
) -> None:
    server, environment = bucket
    recipe, runs = write_small_recipe(tmp_path, steps=STEPS), tmp_path / "runs"
    process = start(recipe, runs, "weights.store=s3://bucket/weights", "budget.wall_s=600", **environment)
    wait_until(lambda: steps_of(runs / "small") >= 2)
    server.send_signal(signal.SIGSTOP)
    try:
        time.sleep(75)  # the watchdog speaks after a minute
    finally:
        server.send_signal(signal.SIGCONT)
    _, words = process.communicate(timeout=400)
    assert process.returncode == 0, words[-2000:]
    waits = [
        row["row"]["waiting_for"] for row in read_rows(runs / "small" / "metrics.jsonl") if row["kind"] == "watchdog"
    ]
    assert any("the weight store" in wait for wait in waits), waits


def test_a_chaotic_run_that_lost_a_batch_is_found_out(tmp_path: Path) -> None:
    """What the proof is worth: one batch less, and it fails."""
    chaos = Chaos(tmp_path, steps=3)
    chaos.finish()
    chaos.prove()
    (chaos.run / "batches" / "000002.mp").unlink()
    with pytest.raises(AssertionError):
        chaos.prove()
