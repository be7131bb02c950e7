"""The protocol on a real S3 gateway, and before it a proxy that misbehaves: nothing is lost, nothing wrong served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from etude.errors import LostRaceError, MissingError, StoreError
from etude.types import Version
from etude.weights.gc import Collector
from etude.weights.manifests import incarnations, manifest_numbers
from etude.weights.publish import Publisher, take_incarnation
from etude.weights.replica import Replica, fetch
from etude.weights.store import Store, open_store
from etude.weights.subscribe import Subscriber, latest
from etude.weights.verify import list_versions, verify
from weights.gateway import Proxy, Rule, environment, make_bucket, proxy, s3_gateway
from weights.versions import new_publisher, publish, tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAMS = Path(__file__).with_name("programs.py")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_gateway(tmp_path_factory.mktemp("s3")) as url:
        yield url


@pytest.fixture
def bucket(gateway: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in environment(gateway).items():
        monkeypatch.setenv(name, value)
    return make_bucket(gateway)


class Through:
    """A store whose requests go through a proxy, and the same store without."""

    def __init__(self, url: str, bad: Proxy, direct: Store, bent: Store) -> None:
        self.url, self.bad, self.direct, self.bent = url, bad, direct, bent

    def rule(self, method: str, path: str, what: str, times: int = 1, then: Callable[[], None] = lambda: None) -> None:
        self.bad.rules.append(Rule(method, path, what, times, then))


@pytest.fixture
def through(gateway: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Through]:
    direct = open_store(bucket)
    with proxy(gateway) as bad:
        monkeypatch.setenv("AWS_ENDPOINT_URL", bad.endpoint)
        yield Through(bucket, bad, direct, open_store(bucket))


def assert_holds(found: object, step: int) -> None:
    assert isinstance(found, dict)
    for name, tensor in tensors(step).items():
        np.testing.assert_array_equal(found[name], tensor.array, strict=True)


def test_versions_go_through_a_bucket_as_differences(bucket: str) -> None:
    store = open_store(bucket)
    publisher, replica = new_publisher(store, anchor_every=3), Replica(store)
    subscriber = Subscriber(store, holder="engine-0", poll_s=0.01)
    for step in range(7):
        publish(publisher, step)
        manifest = subscriber.poll()
        assert manifest is not None
        assert_holds(replica.fetch(manifest), step)
    assert verify(store).problems == ()
    assert Collector(store, keep_anchors=1, grace_s=0.0).run().manifests == 3, "5 is leased, with its chain from 3 on"
    subscriber.close()


@pytest.mark.parametrize("what", ["flip", "truncate"])
def test_bytes_that_change_on_the_way_are_never_served(through: Through, what: str) -> None:
    publisher = new_publisher(through.direct, anchor_every=9)
    manifests = [publish(publisher, step) for step in range(3)]
    replica = Replica(through.bent)
    replica.fetch(manifests[0])
    through.rule("GET", "/blobs/", what, times=1)
    for _ in range(3):
        try:
            assert_holds(replica.fetch(manifests[2]), 2)
            break
        except StoreError:
            continue
    else:
        pytest.fail("the reader did not recover")
    assert through.bad.happened


def test_a_missing_difference_is_gone_around_and_a_missing_anchor_is_said(bucket: str) -> None:
    store = open_store(bucket)
    publisher = new_publisher(store, anchor_every=3)
    manifests = [publish(publisher, step) for step in range(5)]
    store.delete(next(part.blob for part in manifests[2].changes if part.blob))
    replica = Replica(store)
    replica.fetch(manifests[1])
    with pytest.raises(MissingError):
        replica.fetch(manifests[2])
    assert_holds(replica.fetch(manifests[4]), 4)
    store.delete(next(part.blob for part in manifests[3].parts))
    with pytest.raises(MissingError, match="blobs/"):
        fetch(store, manifests[4])
    assert_holds(replica.fetch(manifests[4]), 4)


@pytest.mark.parametrize("folder", ["blobs", "manifests"])
def test_a_store_that_answers_500_for_a_moment_costs_nothing(through: Through, folder: str) -> None:
    publisher = new_publisher(through.bent)
    through.rule("PUT", f"/{folder}/", "refuse", times=2)
    assert publish(publisher, 1).version.n == 0
    through.rule("GET", f"/{folder}/", "refuse", times=2)
    newest = latest(through.bent)
    assert newest is not None
    assert_holds(fetch(through.bent, newest), 1)
    assert len(through.bad.happened) == 4


def test_a_store_that_keeps_refusing_aborts_the_version_and_the_next_one_is_whole(through: Through) -> None:
    publisher = new_publisher(through.bent, anchor_every=9)
    publish(publisher, 1)
    through.rule("PUT", "/blobs/", "refuse", times=1000)
    with pytest.raises(StoreError):
        publish(publisher, 2)
    through.bad.rules.clear()
    manifest = publish(publisher, 3)
    assert manifest.parent == Version(incarnation=1, n=0, step=1)
    assert_holds(fetch(through.direct, manifest), 3)


def test_a_stall_is_waited_for_no_longer_than_the_time_limit(through: Through) -> None:
    publisher = new_publisher(through.bent)
    through.rule("PUT", "/blobs/", "stall")
    started = time.monotonic()
    manifest = publish(publisher, 1)
    assert time.monotonic() - started < 7.5, "the stalled request takes 8 s: it was given up and made again"
    assert_holds(fetch(through.direct, manifest), 1)


@pytest.mark.parametrize("what", ["forget", "lose"])
def test_a_create_whose_answer_or_request_is_lost_is_ours(through: Through, what: str) -> None:
    publisher = new_publisher(through.bent)
    through.rule("PUT", "/manifests/", what)
    manifest = publish(publisher, 1)
    assert manifest.version.n == 0
    assert latest(through.direct) == manifest
    assert through.bad.happened == [f"{what} PUT {through.bad.happened[0].split()[2]}"]


def test_of_two_publishers_only_the_later_start_goes_on(bucket: str) -> None:
    store, other = open_store(bucket), open_store(bucket)
    zombie = new_publisher(store)
    publish(zombie, 1)
    heir = new_publisher(other, parent=Version(incarnation=1, n=0, step=1))
    publish(heir, 2)
    with pytest.raises(LostRaceError, match="is over"):
        publish(zombie, 2)
    twin = Publisher(other, heir.record)
    with pytest.raises(LostRaceError, match="belongs to another"):
        publish(twin, 9)
    assert (manifest_numbers(store, 1), manifest_numbers(store, 2)) == ([0], [0])


def test_a_trainer_that_is_overtaken_between_its_look_and_its_commit_disturbs_nobody(through: Through) -> None:
    zombie = new_publisher(through.bent)
    publish(zombie, 1)
    reader = Subscriber(through.direct, holder="engine-0", poll_s=0.01)
    reader.poll()
    heirs: list[Publisher] = []

    def overtake() -> None:
        record = take_incarnation(through.direct, parent=Version(incarnation=1, n=0, step=1))
        heirs.append(Publisher(through.direct, record))
        publish(heirs[0], 7)

    through.rule("HEAD", "/blobs/", "refuse", then=overtake)  # after the look for later trainers, before the commit
    publish(zombie, 2)
    manifest = reader.poll()
    assert manifest is not None
    assert manifest.version == Version(incarnation=2, n=0, step=7)
    assert reader.poll() is None
    with pytest.raises(LostRaceError):
        publish(zombie, 3)


def test_gc_that_races_a_slow_reader_takes_nothing_that_it_needs(through: Through) -> None:
    publisher = new_publisher(through.direct, anchor_every=2)
    for step in range(4):
        publish(publisher, step)
    reader, replica = Subscriber(through.bent, holder="slow", poll_s=0.01), Replica(through.bent)
    manifest = reader.poll()
    assert manifest is not None

    def collect() -> None:
        for step in range(4, 9):
            publish(publisher, step)
        for _ in range(2):
            Collector(through.direct, keep_anchors=1, grace_s=0.0).run()

    through.rule("GET", "/manifests/", "refuse", then=collect)
    assert_holds(replica.fetch(manifest), manifest.version.step)
    assert len(manifest_numbers(through.direct, 1)) < 9


# Processes


def start(role: str, url: str, *words: str, kill_at: Path | None = None) -> subprocess.Popen[str]:
    environment = dict(os.environ) | ({"ETUDE_KILL_AT": str(kill_at)} if kill_at else {})
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, PROGRAMS, role, url, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> dict[str, object]:
    """The JSON that it printed last."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


STEPS = 30


def test_thirty_versions_reach_two_engines_that_serve_while_the_trainer_is_killed_twice(
    bucket: str, tmp_path: Path
) -> None:
    engines = [start("engine", bucket, "--name", f"engine-{number}", "--steps", str(STEPS)) for number in range(2)]
    plan = tmp_path / "kill"
    for point in ("manifest-created 9", "blobs-uploaded 12"):
        plan.write_text(point)
        killed = start("trainer", bucket, "--folder", str(tmp_path), "--steps", str(STEPS), kill_at=plan)
        killed.communicate(timeout=240)
        assert killed.returncode == -signal.SIGKILL
    trainer = ended(start("trainer", bucket, "--folder", str(tmp_path), "--steps", str(STEPS)))
    found = [ended(engine) for engine in engines]
    store = open_store(bucket)
    versions = list_versions(store)
    deltas = [row for row in versions if not row.is_anchor]
    share = float(np.median([row.change_bytes / row.nbytes for row in deltas]))
    print(json.dumps({"trainer": trainer, "engines": found, "deltas": len(deltas), "share": share}))
    assert incarnations(store) == [1, 2, 3]
    assert len(versions) >= STEPS
    assert len(deltas) >= 25
    for engine in found:
        assert engine["digest"] == trainer["digest"]
        assert engine["version"] == trainer["version"]
        assert engine["failed"] == 0
        assert engine["restarts"] == 0
    assert sum(int(str(engine["spanning"])) for engine in found) >= 100
    assert verify(store).problems == ()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The digest after 8 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    words = ("--folder", str(folder), "--steps", "8", "--pause", "0")
    return ended(start("trainer", f"file://{folder}/weights", *words))["digest"]


@pytest.mark.parametrize("point", ["snapshot-taken", "blobs-uploaded", "manifest-created", "checkpoint-written"])
def test_a_trainer_killed_at_any_step_of_a_publish_goes_on(tmp_path: Path, straight: object, point: str) -> None:
    url, plan = f"file://{tmp_path}/weights", tmp_path / "kill"
    words = ("--folder", str(tmp_path), "--steps", "8", "--pause", "0")
    plan.write_text(f"{point} 2")
    killed = start("trainer", url, *words, kill_at=plan)
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert ended(start("trainer", url, *words))["digest"] == straight
    assert verify(open_store(url)).problems == ()


@pytest.mark.parametrize("point", ["version-leased", "version-fetched", "swap-staged", "swap-committed"])
def test_an_engine_killed_at_any_step_of_a_swap_is_started_again_and_serves_the_head(
    tmp_path: Path, point: str
) -> None:
    url, plan = f"file://{tmp_path}/weights", tmp_path / "kill"
    plan.write_text(f"{point} 2")
    words = ("--steps", "6", "--at-once", "2")
    engine = start("engine", url, *words, kill_at=plan)
    trainer = start("trainer", url, "--folder", str(tmp_path), "--steps", "6", "--pause", "0.5")
    engine.communicate(timeout=120)
    assert engine.returncode == -signal.SIGKILL
    found = ended(start("engine", url, *words))
    assert found["digest"] == ended(trainer)["digest"]
    assert found["failed"] == 0
