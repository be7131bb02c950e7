from __future__ import annotations

import threading

import numpy as np
import pytest

from etude.errors import LostRaceError, StoreError
from etude.frames import encode
from etude.types import Manifest, Version
from etude.weights.manifests import (
    IncarnationRecord,
    incarnations,
    lineage,
    manifest_key,
    manifest_numbers,
    read_record,
    record_key,
)
from etude.weights.pieces import Packer, Snapshot, Stored, cut
from etude.weights.publish import Publisher, Snapshots, follow, take_incarnation
from etude.weights.replica import Replica, dtypes, fetch
from etude.weights.store import Store, open_store
from etude.weights.subscribe import latest
from etude.weights.upload import Uploader
from weights.versions import Failing, UnsteadyStore, new_publisher, publish, tensors


def test_a_version_comes_back_bit_for_bit() -> None:
    store = open_store("memory://")
    manifest = publish(new_publisher(store), 3)
    assert manifest.version == Version(incarnation=1, n=0, step=3)
    assert latest(store) == manifest
    found = fetch(store, manifest)
    assert dtypes(manifest) == {name: tensor.dtype for name, tensor in tensors(3).items()}
    assert found.keys() == tensors(3).keys()
    for name, tensor in tensors(3).items():
        np.testing.assert_array_equal(found[name], tensor.array, strict=True)


def test_the_snapshot_does_not_change_with_the_weights() -> None:
    mutable = {"w": Stored("F32", np.ones(4, np.float32))}
    snapshot = Snapshot.take(1, mutable)
    mutable["w"].array[:] = 7
    assert snapshot.tensors["w"].array.tolist() == [1, 1, 1, 1]


def test_a_large_tensor_is_cut_and_small_ones_share_a_blob() -> None:
    parts = {
        "a": Stored("F32", np.arange(10, dtype=np.float32)),
        "b": Stored("U8", np.arange(3, dtype=np.uint8)),
        "empty": Stored("F32", np.zeros((0, 4), np.float32)),
        "scalar": Stored("F32", np.float32(2).reshape(())),
    }
    pieces = list(cut(parts, limit=16))
    assert [(piece.name, piece.offset, piece.count) for piece in pieces] == [
        ("a", 0, 4), ("a", 4, 4), ("a", 8, 2), ("b", 0, 3), ("empty", 0, 0), ("scalar", 0, 1),
    ]  # fmt: skip
    packer = Packer(limit=16)
    blobs = [blob for piece in pieces for blob in packer.add(piece.part(""), piece.data.tobytes())] + [*packer.rest()]
    assert [[(part.name, part.start, part.nbytes) for part in blob.parts] for blob in blobs] == [
        [("a", 0, 16)],
        [("a", 0, 16)],
        [("a", 0, 8), ("b", 8, 3), ("empty", 11, 0), ("scalar", 11, 4)],
    ]


def test_what_did_not_change_is_not_stored_twice() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    first, again, other = publish(publisher, 1), publish(publisher, 1), publish(publisher, 2)
    assert first.digest == again.digest != other.digest
    assert len(store.entries("blobs")) == 3, "two whole versions and a difference"
    assert again.parent == first.version
    assert other.parent == again.version


def test_a_dtype_name_that_does_not_fit_the_numbers_is_refused() -> None:
    with pytest.raises(StoreError, match="cannot be published as BF16"):
        Stored("BF16", np.zeros(3, np.float32))


def test_every_start_takes_the_next_incarnation() -> None:
    store = open_store("memory://")
    first = take_incarnation(store)
    second = take_incarnation(store, parent=Version(incarnation=1, n=4, step=4), checkpoint="000001-00000004")
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert read_record(store, 2) == second


def test_two_trainers_that_start_at_once_get_different_incarnations() -> None:
    store = UnsteadyStore()
    barrier = threading.Barrier(2, timeout=10)
    store.before = lambda key: barrier.wait() if key == record_key(1) else None
    found = []
    threads = [threading.Thread(target=lambda: found.append(take_incarnation(store))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record.incarnation for record in found) == [1, 2]
    assert incarnations(store) == [1, 2]


def test_a_create_that_timed_out_after_writing_is_ours() -> None:
    store = UnsteadyStore()
    publisher = new_publisher(store)
    store.after = Failing(1)
    manifest = publish(publisher, 1)
    assert latest(store) == manifest


def test_a_create_that_timed_out_before_writing_is_tried_again_with_the_same_bytes() -> None:
    store = UnsteadyStore()
    publisher = new_publisher(store)
    store.before = Failing(2)
    manifest = publish(publisher, 1)
    assert latest(store) == manifest
    assert manifest.version.n == 0


def test_anothers_manifest_under_our_number_means_that_we_lost() -> None:
    store = open_store("memory://")
    publisher, twin = new_publisher(store), None
    twin = Publisher(store, publisher.record)
    publish(twin, 1)
    with pytest.raises(LostRaceError, match="belongs to another trainer"):
        publish(publisher, 1)


def test_an_unreadable_manifest_under_our_number_is_not_anothers_and_burns_the_number() -> None:
    store = UnsteadyStore()
    publisher = new_publisher(store)
    store.put(manifest_key(1, 0), b"cut")
    with pytest.raises(StoreError) as caught:
        publish(publisher, 1)
    assert not isinstance(caught.value, LostRaceError)
    assert publish(publisher, 1).version.n == 1


def test_a_late_write_of_a_given_up_version_disturbs_nobody() -> None:
    store = UnsteadyStore()
    publisher = new_publisher(store)
    publish(publisher, 1)
    lost: list[bytes] = []
    create = Store.create

    def swallow(key: str, data: bytes) -> bool:
        lost.append(bytes(data))
        raise StoreError("timed out")

    store.create = swallow  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError):
        publish(publisher, 2)
    del store.create
    again = publish(publisher, 2)
    assert len(set(lost)) == 1, "a retry must write identical bytes"
    assert create(store, manifest_key(1, 1), lost[0])
    assert latest(store) == again
    assert again.version == Version(incarnation=1, n=2, step=2)
    assert again.parent == Version(incarnation=1, n=0, step=1)


def test_a_trainer_that_sees_a_higher_incarnation_stops_without_publishing() -> None:
    store = open_store("memory://")
    zombie = new_publisher(store)
    publish(zombie, 1)
    new_publisher(store, parent=Version(incarnation=1, n=0, step=1))
    with pytest.raises(LostRaceError, match="is over"):
        publish(zombie, 2)
    assert manifest_numbers(store, 1) == [0]


def test_a_manifest_whose_parts_are_gone_is_not_created() -> None:
    store = UnsteadyStore()
    publisher = new_publisher(store)
    head = store.head
    store.head = lambda key: None  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreError, match="aborted"):
        publish(publisher, 1)
    store.head = head  # type: ignore[method-assign]
    assert latest(store) is None


def test_a_version_is_dead_if_no_later_incarnation_went_on_from_it() -> None:
    store = open_store("memory://")
    first = new_publisher(store)
    for step in range(5):
        publish(first, step)
    new_publisher(store, parent=Version(incarnation=1, n=2, step=2), checkpoint="a")
    third = new_publisher(store, parent=Version(incarnation=1, n=3, step=3), checkpoint="b")
    publish(third, 3)
    found = lineage(store)
    assert [n for n in range(5) if found.survives(1, n)] == [0, 1, 2, 3]
    assert not found.survives(2, 0)
    assert found.survives(3, 0)
    assert found.checkpoints == ("b",)


def test_a_fresh_start_leaves_no_older_version_alive() -> None:
    store = open_store("memory://")
    publish(new_publisher(store), 0)
    new_publisher(store)
    assert not lineage(store).survives(1, 0)


def test_a_record_that_names_a_later_parent_is_damage_and_not_an_endless_walk() -> None:
    store = open_store("memory://")
    later = IncarnationRecord(
        incarnation=1, nonce="x", parent=Version(incarnation=1, n=0, step=0), checkpoint=None
    )  # fmt: skip
    store.put(record_key(1), encode(later))
    with pytest.raises(StoreError, match="names a later one"):
        lineage(store)


def test_an_object_of_another_format_is_refused_by_name() -> None:
    store = open_store("memory://")
    store.put(record_key(1), encode({"format": 2, "something": "new"}))
    with pytest.raises(StoreError, match="has format 2"):
        lineage(store)


# Several ranks


class InProcess:
    """Peers that are threads of one process."""

    def __init__(self, rank: int, count: int, shared: dict[str, object]) -> None:
        self._rank, self._count, self._shared = rank, count, shared
        self._barrier: threading.Barrier = shared["barrier"]  # type: ignore[assignment]

    def tell(self, data: bytes) -> bytes:
        if self._rank == 0:
            self._shared["told"] = data
        self._barrier.wait(10)
        told = self._shared["told"]
        self._barrier.wait(10)
        assert isinstance(told, bytes)
        return told

    def gather(self, data: bytes) -> list[bytes]:
        self._shared[f"given-{self._rank}"] = data
        self._barrier.wait(10)
        given = [self._shared[f"given-{rank}"] for rank in range(self._count)] if self._rank == 0 else []
        self._barrier.wait(10)
        return given  # type: ignore[return-value]


def stretch(rank: int, step: int) -> dict[str, Stored]:
    """What rank 0 or 1 of two has: a row-wise cut `w`, and `b` on rank 0 alone."""
    whole = np.random.default_rng(step).normal(size=(6, 4)).astype(np.float32)
    part = Stored("F32", whole[:3] if rank == 0 else whole[3:], shape=(6, 4), offset=12 * rank)
    return {"w": part} | ({"b": Stored("U8", np.arange(3, dtype=np.uint8))} if rank == 0 else {})


class TwoRanks:
    def __init__(self, store: Store, *, anchor_every: int = 3) -> None:
        shared: dict[str, object] = {"barrier": threading.Barrier(2)}
        self.store = store
        self.publisher = Publisher(
            store, take_incarnation(store), anchor_every=anchor_every, peers=InProcess(0, 2, shared)
        )
        self.snapshots = Snapshots()
        self.uploader = Uploader(store, threads=1)
        self.follower = threading.Thread(
            target=follow, args=(self.uploader, InProcess(1, 2, shared), self.snapshots), daemon=True
        )
        self.follower.start()

    def publish(self, step: int) -> Manifest:
        self.snapshots.keep(Snapshot.take(step, stretch(1, step)))
        return self.publisher.publish(Snapshot.take(step, stretch(0, step))).manifest

    def end(self) -> None:
        self.publisher.end()
        self.follower.join(10)
        assert not self.follower.is_alive()


def test_two_ranks_publish_what_one_would_have_each_from_its_own_baseline() -> None:
    ranks = TwoRanks(open_store("memory://"))
    replica = Replica(ranks.store)
    for step in range(5):
        manifest = ranks.publish(step)
        assert manifest.is_anchor == (step % 3 == 0)
        assert bool(manifest.changes) == (step > 0)
        whole = np.concatenate([stretch(rank, step)["w"].array for rank in (0, 1)])
        for found in (replica.fetch(manifest), fetch(ranks.store, manifest)):
            np.testing.assert_array_equal(found["w"], whole, strict=True)
            assert found["b"].tolist() == [0, 1, 2]
    assert replica.restarts == 0
    ranks.end()


def test_a_rank_that_fails_aborts_the_version_and_not_the_run() -> None:
    ranks = TwoRanks(open_store("memory://"))
    ranks.publish(0)
    upload = ranks.uploader.upload
    ranks.uploader.upload = lambda *_, **__: (_ for _ in ()).throw(StoreError("rank 1's disk is full"))  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="aborted") as caught:
        ranks.publish(1)
    assert "rank 1: rank 1's disk is full" in str(caught.value.cause)
    ranks.uploader.upload = upload  # type: ignore[method-assign]
    manifest = ranks.publish(2)
    assert manifest.version.n == 2
    assert manifest.parent == Version(incarnation=1, n=0, step=0)
    np.testing.assert_array_equal(fetch(ranks.store, manifest)["w"][3:], stretch(1, 2)["w"].array)
    ranks.end()


def test_a_rank_forgets_the_snapshots_that_will_not_be_published() -> None:
    snapshots = Snapshots()
    for step in (1, 2, 3):
        snapshots.keep(Snapshot.take(step, stretch(1, step)), dropped=(2,) if step == 3 else ())
    assert sorted(snapshots._kept) == [1, 3]
    assert snapshots.take(3).step == 3
    assert sorted(snapshots._kept) == [3], "3 may be published again, 1 will not"
