from __future__ import annotations

import threading

import numpy as np
import pytest

from etude.errors import LostRaceError, StoreError
from etude.types import Manifest
from etude.weights.background import Background
from etude.weights.manifests import manifest_numbers, read_manifest
from etude.weights.pieces import Stored
from etude.weights.replica import fetch
from etude.weights.subscribe import latest
from weights.versions import Failing, UnsteadyStore, new_publisher, tensors


class Gate:
    """Holds back creates of manifests until it is opened."""

    def __init__(self, store: UnsteadyStore) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        store.before = self

    def __call__(self, key: str) -> None:
        if key.startswith("manifests/"):
            self.reached.set()
            assert self.open.wait(10)


def steps(store: UnsteadyStore) -> list[int]:
    return [read_manifest(store, 1, n).version.step for n in manifest_numbers(store, 1)]


def test_a_lagging_publisher_skips_steps_but_neither_checkpoints_nor_the_latest() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store))
    gate = Gate(store)
    background.submit(0, tensors(0))
    assert gate.reached.wait(10)
    for step in range(1, 6):
        background.submit(step, tensors(step), must=step == 2)
    gate.open.set()
    head = background.wait(10)
    background.close()
    assert steps(store) == [0, 2, 5]
    assert background.skipped == 3
    assert head is not None
    assert head.version.step == 5


def test_training_waits_for_the_snapshot_only() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store))
    gate = Gate(store)
    weights = np.ones(3, np.float32)
    background.submit(0, {"w": Stored("F32", weights)})
    assert gate.reached.wait(10)
    weights[:] = 5
    assert background.head is None
    gate.open.set()
    background.close()
    found = latest(store)
    assert found is not None
    assert fetch(store, found)["w"].tolist() == [1, 1, 1]


def test_a_checkpoint_is_written_only_after_its_manifest_is_there() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store))
    seen: list[tuple[Manifest, Manifest | None]] = []
    background.submit(4, tensors(4), then=lambda manifest: seen.append((manifest, latest(store))))
    background.close()
    assert len(seen) == 1
    assert seen[0][0] == seen[0][1]


def test_an_aborted_version_is_published_again_under_a_new_number() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store), give_up_s=5)
    store.before = Failing(5)
    background.submit(1, tensors(1))
    background.close()
    assert manifest_numbers(store, 1) == [1]
    assert background.aborted == 1


def test_an_aborted_version_gives_way_to_a_newer_step() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store), give_up_s=5)
    failing = Failing(4)
    store.before = failing
    background.submit(1, tensors(1))
    while failing.left == 4:
        pass
    background.submit(2, tensors(2))
    background.close()
    assert steps(store) == [2]


def test_a_checkpoint_that_cannot_be_written_is_tried_again_without_a_second_version() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store), give_up_s=5)
    left = [1]

    def write(manifest: Manifest) -> None:
        if left[0]:
            left[0] -= 1
            raise StoreError("disk full")

    background.submit(1, tensors(1), then=write)
    background.close()
    assert left == [0]
    assert manifest_numbers(store, 1) == [0]


def test_a_lost_race_reaches_the_trainer() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store))
    new_publisher(store)
    background.submit(1, tensors(1))
    with pytest.raises(LostRaceError):
        background.wait(10)
    with pytest.raises(LostRaceError):
        background.submit(2, tensors(2))
    with pytest.raises(LostRaceError):
        background.close()


def test_a_store_that_stays_dead_ends_the_run_with_its_own_error() -> None:
    store = UnsteadyStore()
    background = Background(new_publisher(store), give_up_s=0.1)
    store.before = Failing(1000)
    background.submit(1, tensors(1))
    with pytest.raises(StoreError, match="could not be created"):
        background.close()
