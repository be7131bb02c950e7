"""`etude weights` as a person uses it, on a store of a few small versions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from etude.weights.store import open_store
from weights.versions import new_publisher, publish, tensors


def etude(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "etude.cli.main", "weights", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five versions, every third an anchor."""
    url = f"file://{tmp_path_factory.mktemp('store')}/weights"
    publisher = new_publisher(open_store(url), anchor_every=3)
    for step in range(5):
        publish(publisher, step)
    return url


def test_list_tells_anchors_from_differences(url: str) -> None:
    rows = json.loads(etude("list", url, "--json").stdout)
    assert [row["kind"] for row in rows] == ["anchor", "delta", "delta", "anchor", "delta"]
    assert [row["version"] for row in rows] == [f"1.{n}" for n in range(5)]
    assert all(0 < row["delta"] <= row["stored"] for row in rows[1:])


def test_diff_counts_changed_weights_by_tensor(url: str) -> None:
    rows = {row["tensor"]: row for row in json.loads(etude("diff", url, "1.1", "1.2", "--json").stdout)}
    before, after = tensors(1), tensors(2)
    for name in before:
        assert rows[name]["changed"] == int((before[name].array != after[name].array).sum())
    assert rows["frozen"]["changed"] == rows["frozen"]["bound_bytes"] == 0
    assert rows["all"]["weights"] == 35 + 9 + 12


def test_rebuild_writes_the_version_and_nothing_half(url: str, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    done = etude("rebuild", url, "1.4", "--out", str(out))
    assert done.returncode == 0, done.stderr
    with safe_open(out, framework="np") as file:
        assert (file.get_tensor("head") == tensors(4)["head"].array).all()
        assert file.metadata()["etude_version"] == "1.4"
    failed = etude("rebuild", url, "1.4", "--out", str(tmp_path / "none" / "w"))
    assert failed.returncode == 1
    assert "cannot write" in failed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize(("name", "said"), [("nonsense", "names no version"), ("1.9", "has no version 1.9")])
def test_a_version_that_is_not_there_is_said(url: str, tmp_path: Path, name: str, said: str) -> None:
    done = etude("rebuild", url, name, "--out", str(tmp_path / "w"))
    assert done.returncode == 1
    assert said in done.stderr


def test_gc_keeps_the_last_anchor_and_what_follows(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/weights"
    publisher = new_publisher(open_store(url), anchor_every=3)
    for step in range(5):
        publish(publisher, step)
    found = json.loads(etude("gc", url, "--keep-anchors", "1", "--grace", "0.5", "--json").stdout)
    assert found["versions"] == 3
    assert found["blobs"] >= 3
    assert [row["version"] for row in json.loads(etude("list", url, "--json").stdout)] == ["1.3", "1.4"]
    assert etude("verify", url).returncode == 0
