from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import MissingError, RecipeError, StoreError
from etude.weights.store import Store, open_store
from weights.fake_s3 import fake_s3


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/store" if request.param == "file" else "memory://")


def test_what_was_put_is_read_back_and_listed(store: Store) -> None:
    store.put("blobs/a", b"one")
    store.put("blobs/b", b"three")
    assert store.get("blobs/a") == b"one"
    assert [(entry.key, entry.size) for entry in store.entries("blobs")] == [("blobs/a", 3), ("blobs/b", 5)]
    assert [entry.key for entry in store.entries("blobs", after="blobs/a")] == ["blobs/b"]
    assert store.entries("leases") == []


def test_a_second_create_is_refused_and_changes_nothing(store: Store) -> None:
    assert store.create("k/1", b"ours")
    assert not store.create("k/1", b"theirs")
    assert store.get("k/1") == b"ours"


def test_a_missing_object_has_its_own_error_and_a_none_head(store: Store) -> None:
    with pytest.raises(MissingError, match="no object blobs/none"):
        store.get("blobs/none")
    assert store.head("blobs/none") is None
    store.delete("blobs/none")


def test_the_clock_of_the_store_is_that_of_its_objects(store: Store) -> None:
    now = store.now()
    store.put("blobs/a", b"one")
    after = store.head("blobs/a")
    assert after is not None
    assert after.modified >= now - 0.1
    assert store.entries("clock") == []


def test_a_file_is_synced_before_it_can_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}/store")
    calls: list[str] = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda *a: (calls.append("link"), link(*a))[1])
    assert store.create("probe/one", b"data")
    assert calls == ["sync", "link", "sync"]


def test_writers_leave_no_temporary_files_and_those_of_the_dead_are_swept(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    store.put("blobs/a", b"one")
    assert not store.create("blobs/a", b"two")
    folder = tmp_path / "store" / "tmp"
    assert list(folder.iterdir()) == []
    (folder / "cut").write_bytes(b"half")
    assert store.sweep_temporary(3600) == 0
    os.utime(folder / "cut", (1, 1))
    assert store.sweep_temporary(3600) == 1


def test_of_many_processes_exactly_one_creates_a_key(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    source = f"""
from etude.weights.store import open_store
store = open_store({url!r})
print(sum(store.create(f"k/{{i}}", str(i).encode()) for i in range(50)))
"""
    workers = [subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) for _ in range(3)]
    assert sum(int(worker.communicate()[0]) for worker in workers) == 50


def test_a_full_or_forbidden_folder_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError):
        open_store(f"file://{tmp_path}/file/store")


@pytest.mark.parametrize("url", ["weights", "file://relative/weights", "http://host/x", "s3://", "file:"])
def test_a_url_that_is_none_of_ours_is_refused(url: str) -> None:
    with pytest.raises(RecipeError, match="is not a weight store"):
        open_store(url)


def test_a_folder_with_a_space_and_a_percent_sign_works(tmp_path: Path) -> None:
    from etude.weights.recipe import WeightsRecipe

    run = tmp_path / "my run 100%"
    open_store(WeightsRecipe().url(run)).put("a", b"1")
    assert (run / "weights" / "a").read_bytes() == b"1"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "laptop", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "eu-west-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_s3_takes_its_options_from_the_environment(aws: pytest.MonkeyPatch) -> None:
    with fake_s3(conditional=True) as (endpoint, seen):
        aws.setenv("AWS_ENDPOINT_URL", endpoint)
        store = open_store("s3://bucket/some/prefix")
        assert store.create("blobs/a", b"one")
        assert not store.create("blobs/a", b"two")
        assert [entry.key for entry in store.entries("blobs")] == ["blobs/a"]
        assert store.get("blobs/a") == b"one"
        assert store.now() > 1e9
        assert "Credential=laptop/" in seen[0]
        assert "/eu-west-1/" in seen[0]


def test_a_store_that_cannot_create_conditionally_is_refused_at_start(aws: pytest.MonkeyPatch) -> None:
    with fake_s3(conditional=False) as (endpoint, _):
        aws.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StoreError, match="cannot create objects conditionally"):
            open_store("s3://bucket/prefix")
