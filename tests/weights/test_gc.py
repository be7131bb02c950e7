from __future__ import annotations

import pytest

from etude.errors import MissingError, StoreError
from etude.types import Version
from etude.weights.gc import Collected, Collector
from etude.weights.manifests import manifest_key, manifest_numbers, pin, unpin
from etude.weights.replica import fetch
from etude.weights.store import Store, open_store
from weights.versions import new_publisher, publish


class Clock:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._store.now() + self.ahead_s


def collector(store: Store, keep: int = 2) -> tuple[Collector, Clock]:
    clock = Clock(store)
    return Collector(store, keep_anchors=keep, grace_s=60, now=clock), clock


def after_the_grace(gc: Collector, clock: Clock) -> Collected:
    """A round that sees what is not needed, and one when it has not been for long enough."""
    gc.run()
    clock.ahead_s += 61
    return gc.run()


def test_the_last_anchors_stay_and_manifests_and_then_blobs_go_only_after_the_grace() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    manifests = [publish(publisher, step) for step in range(5)]
    gc, clock = collector(store)
    for clock.ahead_s in (0, 59):
        assert gc.run() == Collected(manifests=0, blobs=0, nbytes=0)
    clock.ahead_s = 61
    first = gc.run()
    assert (first.manifests, first.blobs) == (3, 0)
    assert manifest_numbers(store, 1) == [3, 4]
    fetch(store, manifests[0])  # a reader that had read the manifest before can still finish
    clock.ahead_s = 61 + 59
    assert gc.run().blobs == 0
    clock.ahead_s = 61 + 61
    last = gc.run()
    assert last.blobs == 5, "three anchors, and the differences of the second and third"
    assert last.nbytes > 0
    for manifest in manifests[3:]:
        fetch(store, manifest)
    with pytest.raises(MissingError):
        fetch(store, manifests[0])


def test_a_new_collector_waits_the_grace_anew() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    for step in range(5):
        publish(publisher, step)
    after_the_grace(*collector(store))
    gc, clock = collector(store)
    clock.ahead_s = 1000
    assert gc.run().blobs == 0
    clock.ahead_s = 1061
    assert gc.run().blobs == 5


def test_pins_stay_until_they_are_unpinned() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    manifests = [publish(publisher, step) for step in range(4)]
    pin(store, "reference", manifests[0].version, "the policy that training started from")
    gc, clock = collector(store, keep=1)
    after_the_grace(gc, clock)
    assert manifest_numbers(store, 1) == [0, 3]
    unpin(store, "reference")
    after_the_grace(gc, clock)
    assert manifest_numbers(store, 1) == [3]


def test_a_pin_that_comes_while_a_version_waits_for_its_end_saves_it_and_its_chain() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store, anchor_every=3)
    manifests = [publish(publisher, step) for step in range(7)]
    gc, clock = collector(store, keep=1)
    gc.run()
    pin(store, "arm", manifests[2].version, "an experiment")
    clock.ahead_s = 61
    gc.run()
    assert manifest_numbers(store, 1) == [0, 1, 2, 6]


def test_what_is_gone_cannot_be_pinned() -> None:
    store = open_store("memory://")
    with pytest.raises(MissingError, match="to pin as reference"):
        pin(store, "reference", Version(incarnation=1, n=0, step=0), "why")
    assert store.entries("pins") == []


def test_versions_of_dead_lineages_go_and_do_not_count_as_anchors() -> None:
    store = open_store("memory://")
    first = new_publisher(store)
    for step in range(5):
        publish(first, step)
    second = new_publisher(store, parent=Version(incarnation=1, n=2, step=2))
    gc, clock = collector(store)
    after_the_grace(gc, clock)
    assert manifest_numbers(store, 1) == [1, 2], "the parent is what new readers take until there is a child"
    publish(second, 3)
    after_the_grace(gc, clock)
    assert manifest_numbers(store, 1) == [2]
    assert manifest_numbers(store, 2) == [0]


def test_fresh_blobs_that_no_manifest_names_yet_stay() -> None:
    store = open_store("memory://")
    publish(new_publisher(store), 0)
    store.put("blobs/being-published", b"bytes")
    gc, clock = collector(store)
    gc.run()
    clock.ahead_s = 30
    gc.run()
    assert store.head("blobs/being-published") is not None


def test_content_that_comes_again_after_its_version_went_has_blobs_of_its_own() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    first = publish(publisher, 0)
    for step in (1, 2):
        publish(publisher, step)
    gc, clock = collector(store, keep=1)
    after_the_grace(gc, clock)
    again = publish(publisher, 0)  # while the first one's blobs wait for their end
    assert again.digest == first.digest
    assert not {part.blob for part in again.parts} & {part.blob for part in first.parts}
    clock.ahead_s += 61
    assert gc.run().blobs > 0
    fetch(store, again)


def test_a_manifest_that_cannot_be_read_stops_the_collection_of_blobs() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    for step in range(4):
        publish(publisher, step)
    gc, clock = collector(store)
    store.put(manifest_key(1, 3), b"cut")
    clock.ahead_s = 1000
    before = len(store.entries("blobs"))
    with pytest.raises(StoreError):
        gc.run()
    assert len(store.entries("blobs")) == before


def test_rounds_are_spaced() -> None:
    store = open_store("memory://")
    gc, _ = collector(store)
    assert gc.run_if_due() is not None
    assert gc.run_if_due() is None
