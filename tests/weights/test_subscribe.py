from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from etude.errors import StoreError
from etude.types import Manifest, Version
from etude.weights.gc import Collector
from etude.weights.manifests import manifest_key, manifest_numbers, named_key
from etude.weights.replica import Replica, fetch
from etude.weights.store import FileStore, Store, open_store
from etude.weights.subscribe import Subscriber, latest
from weights.versions import new_publisher, publish, tensors


def reader(store: Store, **settings: float) -> Subscriber:
    return Subscriber(store, holder="engine-0", poll_s=0.01, **settings)


def test_a_reader_sees_each_new_version_once_and_skips_what_was_overtaken() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    subscriber = reader(store)
    assert subscriber.poll() is None
    publish(publisher, 0)
    assert subscriber.poll().version.step == 0
    assert subscriber.poll() is None
    publish(publisher, 1)
    publish(publisher, 2)
    assert subscriber.poll().version.step == 2
    assert subscriber.poll() is None


def test_the_iterator_yields_versions_as_they_come() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)

    async def read() -> list[int]:
        steps = []
        async for manifest in reader(store).manifests():
            steps.append(manifest.version.step)
            if len(steps) == 3:
                return steps
            await asyncio.to_thread(publish, publisher, len(steps))
        raise AssertionError

    publish(publisher, 0)
    assert asyncio.run(asyncio.wait_for(read(), 10)) == [0, 1, 2]


def test_a_reader_that_serves_keeps_its_version_while_the_newest_incarnation_has_none() -> None:
    store = open_store("memory://")
    first = new_publisher(store)
    for step in range(3):
        publish(first, step)
    serving = reader(store)
    assert serving.poll().version == Version(incarnation=1, n=2, step=2)
    second = new_publisher(store, parent=Version(incarnation=1, n=1, step=1))
    assert serving.poll() is None
    assert serving.orphaned_polls == 1
    fresh = Subscriber(store, holder="engine-1", poll_s=0.01)
    assert fresh.poll().version == Version(incarnation=1, n=1, step=1)
    assert latest(store).version == Version(incarnation=1, n=1, step=1)
    publish(second, 1)
    assert serving.poll().version == Version(incarnation=2, n=0, step=1)
    assert fresh.poll().version == Version(incarnation=2, n=0, step=1)


def test_a_version_of_an_older_incarnation_never_comes_back() -> None:
    store = open_store("memory://")
    zombie = new_publisher(store)
    publish(zombie, 0)
    publish(new_publisher(store), 0)
    subscriber = reader(store)
    assert subscriber.poll().version.incarnation == 2
    zombie.check_incarnation = lambda: None  # a zombie that has not looked yet
    publish(zombie, 9)
    assert subscriber.poll() is None


def test_a_lease_keeps_what_a_reader_fetches_and_ends_by_the_clock_of_the_store() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    subscriber = reader(store, lease_s=30)
    publish(publisher, 0)
    held = subscriber.poll()
    for step in range(1, 5):
        publish(publisher, step)
    Collector(store, keep_anchors=1, grace_s=0).run()
    assert manifest_numbers(store, 1) == [0, 4]
    assert held is not None
    fetch(store, held)
    Collector(store, keep_anchors=1, grace_s=0, now=lambda: time.time() + 31).run()
    assert manifest_numbers(store, 1) == [4]


def test_a_reader_renews_its_lease_and_gives_it_back() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    subscriber = reader(store, lease_s=0.03)
    publish(publisher, 0)
    subscriber.poll()
    key = named_key("leases", "engine-0")
    before = store.head(key).modified
    time.sleep(0.02)
    subscriber.poll()
    assert store.head(key).modified > before
    subscriber.close()
    assert store.head(key) is None


def test_a_version_that_was_collected_while_it_was_leased_is_not_yielded() -> None:
    store = open_store("memory://")
    publisher = new_publisher(store)
    publish(publisher, 0)
    subscriber = reader(store)
    hold = subscriber.hold

    def late(*versions: Version) -> None:
        store.delete(manifest_key(1, 0))
        hold(*versions)

    subscriber.hold = late  # type: ignore[method-assign]
    assert subscriber.poll() is None


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden"])
def test_a_lease_cannot_leave_its_folder(name: str) -> None:
    with pytest.raises(StoreError, match="cannot name an object"):
        named_key("leases", name)


def test_readers_never_see_half_a_version_while_a_writer_runs(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    publisher = new_publisher(open_store(url), anchor_every=4)
    done = threading.Event()

    def write() -> None:
        for step in range(12):
            publish(publisher, step)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    store = open_store(url)
    assert isinstance(store, FileStore)
    subscriber, replica = reader(store), Replica(store)
    seen: list[Manifest] = []
    while not done.is_set() or not seen or seen[-1].version.step < 11:
        if (manifest := subscriber.poll()) is not None:
            found = replica.fetch(manifest)
            want = tensors(manifest.version.step)
            assert all(found[name].tobytes() == want[name].array.tobytes() for name in want)
            seen.append(manifest)
        time.sleep(0.001)
    writer.join()
    assert [m.version.step for m in seen] == sorted({m.version.step for m in seen})
