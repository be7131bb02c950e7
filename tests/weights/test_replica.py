from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from etude.errors import MissingError, StoreError
from etude.types import Manifest, Version
from etude.weights.gc import Collector
from etude.weights.manifests import manifest_key, manifest_numbers, pin
from etude.weights.pieces import Snapshot, Stored
from etude.weights.publish import Publisher
from etude.weights.replica import Replica, fetch, path_to
from etude.weights.store import Store, open_store
from weights.versions import new_publisher, publish, tensors


def steps(path: list[Manifest]) -> list[int]:
    return [manifest.version.step for manifest in path]


def published(count: int, anchor_every: int, **record: object) -> tuple[Store, Publisher, list[Manifest]]:
    store = open_store("memory://")
    publisher = new_publisher(store, anchor_every=anchor_every, **record)
    return store, publisher, [publish(publisher, step) for step in range(count)]


def assert_holds(found: object, step: int) -> None:
    assert isinstance(found, dict)
    assert found.keys() == tensors(step).keys()
    for name, tensor in tensors(step).items():
        np.testing.assert_array_equal(found[name], tensor.array, strict=True)


def test_versions_between_anchors_are_differences_and_each_can_be_had() -> None:
    store, _, manifests = published(7, anchor_every=3)
    assert [manifest.is_anchor for manifest in manifests] == [True, False, False, True, False, False, True]
    assert [bool(manifest.changes) for manifest in manifests] == [False, True, True, True, True, True, True]
    for step, manifest in enumerate(manifests):
        assert_holds(fetch(store, manifest), step)


def test_what_did_not_change_is_neither_stored_nor_copied() -> None:
    store, _, manifests = published(3, anchor_every=9)
    unchanged = [part for part in manifests[1].changes if not part.blob]
    assert [part.name for part in unchanged] == ["frozen"]
    replica = Replica(store)
    first, second = replica.fetch(manifests[0]), replica.fetch(manifests[1])
    assert second["frozen"] is first["frozen"]
    assert_holds(first, 0)


def test_a_reader_goes_along_differences_even_across_an_anchor() -> None:
    store, _, manifests = published(8, anchor_every=4)
    replica = Replica(store)
    replica.fetch(manifests[3])
    assert replica.last is not None
    assert replica.last.is_whole
    assert_holds(replica.fetch(manifests[5]), 5)
    assert (replica.last.versions, replica.last.is_whole) == (2, False)
    assert steps(path_to(store, manifests[5], held=manifests[3].version)) == [4, 5]
    assert steps(path_to(store, manifests[7], held=None)) == [4, 5, 6, 7]


def test_a_reader_far_behind_takes_the_anchor_where_that_is_less() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store, anchor_every=6)
    random = np.random.default_rng(0)
    made = [
        publisher.publish(Snapshot.take(n, {"w": Stored("F32", random.normal(size=500).astype(np.float32))})).manifest
        for n in range(8)
    ]
    assert steps(path_to(store, made[7], held=made[0].version)) == [6, 7], "seven differences are more than an anchor"
    assert steps(path_to(store, made[7], held=made[5].version)) == [6, 7]
    assert steps(path_to(store, made[7], held=made[6].version)) == [7]


def test_a_reader_that_is_ahead_or_elsewhere_starts_at_the_anchor() -> None:
    store, _, manifests = published(4, anchor_every=9)
    assert steps(path_to(store, manifests[1], held=manifests[3].version)) == [0, 1]
    assert steps(path_to(store, manifests[1], held=Version(incarnation=9, n=0, step=1))) == [0, 1]


def test_after_a_restart_readers_that_hold_the_parent_load_nothing() -> None:
    store, _, manifests = published(3, anchor_every=9)
    replica = Replica(store)
    replica.fetch(manifests[1])
    parent = manifests[1]
    second = Publisher(store, new_publisher(store, parent=parent.version).record, parent=parent, anchor_every=9)
    resumed = publish(second, 1)
    assert resumed.is_anchor
    assert all(not part.blob for part in resumed.changes)
    assert_holds(replica.fetch(resumed), 1)
    assert replica.last is not None
    assert (replica.last.nbytes, replica.last.is_whole) == (0, False)
    next_one = publish(second, 5)
    assert not next_one.is_anchor
    assert_holds(replica.fetch(next_one), 5)
    assert_holds(fetch(store, next_one), 5)


def test_an_aborted_version_leaves_no_trace_in_the_next_difference() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store, anchor_every=9)
    publish(publisher, 0)
    head = store.head
    store.head = lambda key: None  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="aborted"):
        publish(publisher, 1)
    store.head = head  # type: ignore[method-assign]
    manifest = publish(publisher, 2)
    assert manifest.parent == Version(incarnation=1, n=0, step=0)
    assert not manifest.is_anchor
    assert_holds(fetch(store, manifest), 2)


# Damage and loss


def drifting(step: int) -> dict[str, Stored]:
    """3,000 weights of which a few change at each step: differences are far smaller than the whole."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(30, 100)).astype(np.float32)
    for later in range(step):
        weights.reshape(-1)[np.random.default_rng(later + 1).integers(0, 3000, 20)] += 0.01
    return {"w": Stored("F32", weights)}


def drifted(count: int, anchor_every: int) -> tuple[Store, list[Manifest]]:
    store = open_store("memory://")
    publisher = new_publisher(store, anchor_every=anchor_every)
    return store, [publisher.publish(Snapshot.take(step, drifting(step))).manifest for step in range(count)]


def assert_drifted(found: object, step: int) -> None:
    assert isinstance(found, dict)
    np.testing.assert_array_equal(found["w"], drifting(step)["w"].array, strict=True)


def flipped(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 4
    store.put(key, data)


def cut_off(store: Store, key: str) -> None:
    store.put(key, store.get(key)[:-1])


@pytest.mark.parametrize("harm", [flipped, cut_off])
def test_a_damaged_blob_is_named(harm: Callable[[Store, str], None]) -> None:
    store, _, manifests = published(1, anchor_every=1)
    harm(store, manifests[0].parts[0].blob)
    with pytest.raises(StoreError, match="is damaged"):
        fetch(store, manifests[0])
    store.delete(manifests[0].parts[0].blob)
    with pytest.raises(MissingError, match=manifests[0].parts[0].blob):
        fetch(store, manifests[0])


@pytest.mark.parametrize("harm", [flipped, cut_off, lambda store, key: store.delete(key)])
def test_a_reader_whose_path_is_broken_starts_again_at_an_anchor(harm: Callable[[Store, str], None]) -> None:
    store, manifests = drifted(6, anchor_every=3)
    replica = Replica(store)
    replica.fetch(manifests[1])
    harm(store, manifests[2].changes[0].blob)
    assert_drifted(replica.fetch(manifests[5]), 5)
    assert replica.restarts == 1
    assert replica.last is not None
    assert replica.last.is_whole
    assert_drifted(replica.fetch(manifests[4]), 4)
    with pytest.raises(StoreError):
        fetch(store, manifests[2])


def test_a_copy_that_went_wrong_is_noticed_and_thrown_away() -> None:
    store, manifests = drifted(3, anchor_every=9)
    replica = Replica(store)
    held = replica.fetch(manifests[0])
    held["w"][2, 2] += 1  # not ours to change: as bad memory would
    assert_drifted(replica.fetch(manifests[1]), 1)
    assert replica.restarts == 1


def test_what_cannot_be_had_leaves_the_copy_as_it_was() -> None:
    store, manifests = drifted(5, anchor_every=9)
    replica = Replica(store)
    replica.fetch(manifests[1])
    store.delete(manifests[0].parts[0].blob)
    store.delete(manifests[3].changes[0].blob)
    with pytest.raises(MissingError):
        replica.fetch(manifests[4])
    assert replica.version == manifests[1].version
    assert_drifted(replica.fetch(manifests[2]), 2)
    assert replica.last is not None
    assert not replica.last.is_whole


def test_a_missing_manifest_above_the_anchor_is_an_error_and_below_it_none() -> None:
    store, _, manifests = published(6, anchor_every=3)
    store.delete(manifest_key(1, 1))
    replica = Replica(store)
    replica.fetch(manifests[0])
    assert_holds(replica.fetch(manifests[4]), 4)
    store.delete(manifest_key(1, 4))
    with pytest.raises(MissingError):
        fetch(store, manifests[5])


def test_a_chain_without_an_anchor_is_refused() -> None:
    store, _, manifests = published(2, anchor_every=9)
    orphan = msgspec.structs.replace(manifests[1], parent=None)
    with pytest.raises(StoreError, match="no anchor is below it"):
        fetch(store, orphan)


def test_a_manifest_that_names_a_later_parent_is_damage_and_no_endless_walk() -> None:
    store, _, manifests = published(2, anchor_every=9)
    odd = msgspec.structs.replace(manifests[1], parent=Version(incarnation=1, n=1, step=1))
    with pytest.raises(StoreError, match="names a later parent"):
        fetch(store, odd)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("count", 34, "incomplete"),
        ("offset", 1, "do not fit together"),
        ("shape", (-5, -7), "cannot have the shape|incomplete"),
        ("dtype", "F128", "unknown dtype"),
        ("blob", "", "lies nowhere"),
    ],
)
def test_parts_that_do_not_make_whole_tensors_are_refused(field: str, value: object, message: str) -> None:
    store, _, manifests = published(1, anchor_every=1)
    number = next(n for n, part in enumerate(manifests[0].parts) if part.name == "head")
    parts = list(manifests[0].parts)
    parts[number] = msgspec.structs.replace(parts[number], **{field: value})
    with pytest.raises(StoreError, match=message):
        fetch(store, msgspec.structs.replace(manifests[0], parts=tuple(parts)))


def test_a_difference_that_names_other_tensors_is_refused() -> None:
    store, _, manifests = published(2, anchor_every=9)
    less = msgspec.structs.replace(manifests[1], changes=manifests[1].changes[1:])
    with pytest.raises(StoreError, match="other tensors"):
        fetch(store, less)


# gc


def test_what_is_kept_is_kept_with_all_that_it_takes_to_rebuild_it() -> None:
    store, _, manifests = published(12, anchor_every=3)
    pin(store, "arm", manifests[2].version, "an experiment")
    Collector(store, keep_anchors=2, grace_s=0).run()
    assert manifest_numbers(store, 1) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    later = Collector(store, keep_anchors=2, grace_s=0, now=lambda: store.now() + 9)
    later.run()
    later.run()
    for step in (0, 1, 2, 6, 7, 8, 9, 10, 11):
        assert_holds(fetch(store, manifests[step]), step)
