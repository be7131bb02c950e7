from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from etude.errors import LostRaceError, RunError, StoreError
from etude.frames import write_file
from etude.train.checkpoint import PINNED, Checkpoints
from etude.types import Manifest, Version
from etude.weights.manifests import pins
from etude.weights.pieces import Snapshot, Stored
from etude.weights.publish import Publisher, take_incarnation
from etude.weights.store import Store, open_store

TENSORS = {"master/w": np.arange(6, dtype=np.float32).reshape(2, 3), "updates": np.array(3, np.int64)}


def publish(publisher: Publisher, step: int) -> Manifest:
    return publisher.publish(Snapshot.take(step, {"w": Stored("F32", np.full(3, step, np.float32))})).manifest


def save(checkpoints: Checkpoints, publisher: Publisher, step: int, **changes: object) -> str:
    settings = {"tensors": TENSORS, "random": np.arange(5, dtype=np.uint8), "fence": publisher.check_incarnation}
    return checkpoints.save(step=step, manifest=publish(publisher, step), **(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
def store() -> Store:
    return open_store("memory://")


def test_what_was_saved_is_loaded_again(tmp_path: Path, store: Store) -> None:
    checkpoints, publisher = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))
    name = save(checkpoints, publisher, 3)
    assert name == "000001-00000003"
    assert checkpoints.resume_from() == name
    loaded = checkpoints.load(name)
    assert (loaded.state.step, loaded.state.version) == (3, Version(incarnation=1, n=0, step=3))
    assert loaded.state.random.tolist() == [0, 1, 2, 3, 4]
    assert loaded.tensors.keys() == TENSORS.keys()
    assert all(np.array_equal(loaded.tensors[key], TENSORS[key]) for key in TENSORS)


def test_the_last_two_and_pinned_ones_stay_and_so_do_their_versions(tmp_path: Path, store: Store) -> None:
    checkpoints, publisher = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))
    first = save(checkpoints, publisher, 1)
    (tmp_path / "c" / first / PINNED).touch()
    for step in (2, 3, 4):
        save(checkpoints, publisher, step)
    assert checkpoints.names() == ["000001-00000001", "000001-00000003", "000001-00000004"]
    assert sorted(pin.version.step for pin in pins(store)) == [1, 3, 4]
    assert not list((tmp_path / "c").glob(".*"))


def test_a_new_incarnation_resumes_where_its_record_says_until_it_has_its_own(tmp_path: Path, store: Store) -> None:
    checkpoints, first = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))
    named = save(checkpoints, first, 1)
    parent = Version(incarnation=1, n=0, step=1)
    late = publish(first, 2)
    second = Publisher(store, take_incarnation(store, parent=parent, checkpoint=named))
    shutil.copytree(tmp_path / "c" / named, tmp_path / "c" / "000001-00000002")
    state = Checkpoints(tmp_path / "c", store).load(named).state
    zombies = msgspec.structs.replace(state, name="000001-00000002", step=2, version=late.version)
    write_file(tmp_path / "c" / "000001-00000002" / "state.mp", zombies)  # renamed just before it would have looked
    assert checkpoints.resume_from() == named
    own = save(checkpoints, second, 2)
    assert checkpoints.resume_from() == own
    assert checkpoints.names() == [named, own], "the zombie's is dead and goes"


def test_a_zombie_does_not_rename_its_checkpoint_into_place(tmp_path: Path, store: Store) -> None:
    checkpoints, first = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))
    manifest = publish(first, 1)
    take_incarnation(store)
    with pytest.raises(LostRaceError):
        checkpoints.save(
            step=1, manifest=manifest, random=np.zeros(1, np.uint8), tensors=TENSORS, fence=first.check_incarnation
        )
    assert checkpoints.names() == []


def test_a_run_that_died_before_its_first_checkpoint_starts_again(tmp_path: Path, store: Store) -> None:
    take_incarnation(store)
    assert Checkpoints(tmp_path / "c", store).resume_from() is None


def test_a_cut_or_changed_checkpoint_is_named(tmp_path: Path, store: Store) -> None:
    checkpoints, publisher = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))
    name = save(checkpoints, publisher, 1)
    tensors, state = tmp_path / "c" / name / "tensors.safetensors", tmp_path / "c" / name / "state.mp"
    data = tensors.read_bytes()
    tensors.write_bytes(data[:-1])
    with pytest.raises(StoreError, match=r"tensors.safetensors is damaged"):
        checkpoints.load(name)
    tensors.unlink()
    with pytest.raises(StoreError, match=r"tensors.safetensors cannot be read"):
        checkpoints.load(name)
    tensors.write_bytes(data)
    state.write_bytes(state.read_bytes()[:-2])
    with pytest.raises(StoreError, match=r"state.mp is not a CheckpointState"):
        checkpoints.load(name)


def test_checkpoints_of_another_run_and_missing_ones_are_refused(tmp_path: Path, store: Store) -> None:
    checkpoints, publisher = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))
    name = save(checkpoints, publisher, 1)
    with pytest.raises(RunError, match="does not belong to"):
        Checkpoints(tmp_path / "c", open_store("memory://")).resume_from()
    take_incarnation(store, parent=Version(incarnation=1, n=0, step=1), checkpoint=name)
    with pytest.raises(RunError, match=f"checkpoint {name} is missing"):
        Checkpoints(tmp_path / "other", store).resume_from()


def test_what_a_killed_trainer_left_half_written_is_no_checkpoint_and_is_swept(tmp_path: Path, store: Store) -> None:
    checkpoints = Checkpoints(tmp_path / "c", store)
    (tmp_path / "c" / ".000001-00000001.tmp").mkdir()
    assert checkpoints.names() == []
    checkpoints.sweep()
    assert list((tmp_path / "c").iterdir()) == []


def test_a_disk_that_refuses_is_a_store_error_and_leaves_nothing(tmp_path: Path, store: Store) -> None:
    checkpoints, publisher = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))

    def full() -> None:
        raise OSError("disk full")

    with pytest.raises(StoreError, match="cannot write checkpoint"):
        save(checkpoints, publisher, 1, fence=full)
    assert list((tmp_path / "c").iterdir()) == []


def test_the_pin_of_a_checkpoint_that_never_came_to_be_is_swept(tmp_path: Path, store: Store) -> None:
    checkpoints, publisher = Checkpoints(tmp_path / "c", store), Publisher(store, take_incarnation(store))
    save(checkpoints, publisher, 1)

    def fence() -> None:
        raise LostRaceError("a later trainer has started")

    with pytest.raises(LostRaceError):
        save(checkpoints, publisher, 2, fence=fence)
    assert sorted(pin.version.step for pin in pins(store)) == [1, 2]
    checkpoints.sweep()
    assert [pin.version.step for pin in pins(store)] == [1]
