"""Random schedules of the whole weight protocol, on its own code, in simulated time.

    python tests/weights/simulate.py --schedules 100000      a violation is printed with the seed that repeats it
    python tests/weights/simulate.py --plant                 each planted fault must be found

Actors are greenlets, of which one runs at a time: trainers that publish, save and are killed, of which an old one may
go on beside a new one; readers that follow, are killed, and read slowly; gc. At each operation of the store others may
run first, time may pass, the operation may fail before or after it took effect, a lost create may arrive much later, or
the actor is killed. What the code would do side by side is done in order here. In the end nothing fails any more: one
more trainer publishes, readers follow, gc runs, and what must hold is looked at.

    content   whatever a reader fetches is, bit for bit, what was published under that version
    order     a reader never goes back
    fences    a trainer commits at most one version after a later one began; nothing committed is replaced
    leases    what a reader leases can be fetched while the lease runs
    end       the head, every pin, and all that gc left can be rebuilt; readers hold the head
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import greenlet
import numpy as np

from etude.errors import LostRaceError, MissingError, StoreError
from etude.types import Manifest, Version
from etude.weights.gc import Collector
from etude.weights.manifests import (
    Lease,
    head,
    incarnations,
    is_blob,
    pin,
    pins,
    read_manifest,
    read_object,
    read_record,
)
from etude.weights.pieces import Snapshot, Stored
from etude.weights.publish import Publisher, take_incarnation
from etude.weights.replica import Replica, fetch
from etude.weights.store import Data, Entry, Store
from etude.weights.subscribe import Subscriber
from etude.weights.upload import Uploader

GRACE_S, LEASE_S = 150.0, 600.0
PUBLISH_S, LATE_S, POLL_S, ROUND_S = 110.0, 30.0, 100.0, 40.0
"""What the protocol presumes (gc.py): within a grace a publish is over, its lost creates too; and so are a reader's
poll and a round of gc together. Time does not pass beyond these while one is under way."""
Name = tuple[int, int]


class Killed(BaseException):
    """The actor's process is gone."""


@dataclass
class World:
    """Objects, time, and what the checks know."""

    random: random.Random
    grace_s: float = GRACE_S
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    late: list[tuple[str, bytes, float]] = field(default_factory=list)
    """Creates whose answer never came, and that may still arrive; when they were sent."""
    now_s: float = 0.0
    is_calm: bool = False
    content: dict[Name, Mapping[str, Stored]] = field(default_factory=dict)
    """What a trainer meant to publish under each version."""
    until_s: dict[str, float] = field(default_factory=dict)
    """What is under way -> when it is over at the latest."""
    behind: dict[int, int] = field(default_factory=dict)
    """Incarnation -> versions that it committed after a later one began."""
    violations: list[str] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)

    def violated(self, what: str) -> None:
        self.violations.append(what)

    def pass_time(self) -> None:
        """A little, now and then a lot, but not past the end of what is under way; a lost create may arrive."""
        later_s = self.now_s + self.random.expovariate(1.0) * (30 if self.random.random() < 0.02 else 1)
        self.now_s = max(self.now_s, min([later_s, *self.until_s.values()]))
        if self.late and self.random.random() < 0.1:
            key, data, sent_s = self.late.pop(self.random.randrange(len(self.late)))
            if self.now_s < sent_s + LATE_S:
                self.objects.setdefault(key, (data, self.now_s))

    @contextlib.contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        self.until_s[what] = self.now_s + seconds
        try:
            yield
        finally:
            del self.until_s[what]


class SimulatedStore(Store):
    """The world's objects. Operations of an actor are points where the scheduler decides."""

    def __init__(self, world: World, actor: Actor | None = None) -> None:
        self.url = "simulated://"
        self._world, self._actor = world, actor

    @contextlib.contextmanager
    def _operation(self, write: Callable[[], None] | None = None) -> Iterator[None]:
        world, actor = self._world, self._actor
        if actor is None:
            yield
            return
        actor.give_way()
        fate = world.random.random() / actor.failing
        if world.is_calm or fate > 1:
            yield
        elif fate < 0.3:
            raise Killed
        else:
            if write is not None and fate < 0.6:
                write()
            raise StoreError("simulated: the request or its answer was lost")

    def get(self, key: str) -> bytes:
        with self._operation():
            if key not in self._world.objects:
                raise MissingError(f"no object {key}")
            return self._world.objects[key][0]

    def head(self, key: str) -> Entry | None:
        with self._operation():
            found = self._world.objects.get(key)
            return Entry(key, len(found[0]), found[1]) if found else None

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        with self._operation():
            return [
                Entry(key, len(data), modified)
                for key, (data, modified) in sorted(self._world.objects.items())
                if key.startswith(f"{prefix}/") and (after is None or key > after)
            ]

    def put(self, key: str, data: Data) -> None:
        with self._operation(lambda: self._write(key, bytes(data))):
            self._write(key, bytes(data))

    def create(self, key: str, data: Data) -> bool:
        if key.startswith("manifests/"):
            self._look_for_zombies(int(key.split("/")[1]))
        try:
            with self._operation(lambda: self._create(key, bytes(data))):
                return self._create(key, bytes(data))
        except StoreError:
            if self._world.random.random() < 0.5:
                self._world.late.append((key, bytes(data), self._world.now_s))
            raise

    def _create(self, key: str, data: bytes) -> bool:
        if key in self._world.objects:
            return False
        self._write(key, data)
        return True

    def _write(self, key: str, data: bytes) -> None:
        if key.startswith(("manifests/", "incarnations/")) and key in self._world.objects:
            self._world.violated(f"{key} was replaced")
        if key.startswith("blobs/") and not is_blob(key, data):
            self._world.violated(f"{key} holds something else")
        self._world.objects[key] = (data, self._world.now_s)

    def _look_for_zombies(self, incarnation: int) -> None:
        later = [int(key.split("/")[1]) for key in self._world.objects if key.startswith("incarnations/")]
        if max(later, default=0) > incarnation:
            self._world.behind[incarnation] = self._world.behind.get(incarnation, 0) + 1
            if self._world.behind[incarnation] > 4:  # one version: its create is tried four times
                self._world.violated(f"incarnation {incarnation} goes on behind a later one")

    def delete(self, key: str) -> None:
        with self._operation(lambda: self._delete(key)):
            self._delete(key)

    def _delete(self, key: str) -> None:
        self._world.objects.pop(key, None)

    def now(self) -> float:
        with self._operation():
            return self._world.now_s


class Actor:
    """A process. `work` runs in a greenlet of its own, whenever the scheduler says so."""

    failing = 0.03
    """Share of operations that something befalls."""
    pace = 1
    """Operations in one turn."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = SimulatedStore(world, self)
        self.is_over = False
        world.actors.append(self)
        self._scheduler = greenlet.getcurrent()
        self._own = greenlet.greenlet(self._run)

    def _run(self) -> None:
        try:
            self.work()
        except Killed:
            pass
        except Exception as error:  # the simulator's purpose: nothing but typed errors of the store may come out
            self.world.violated(f"{type(self).__name__} ended with {type(error).__name__}: {error}")
        self.is_over = True

    def work(self) -> None:
        raise NotImplementedError

    def give_way(self) -> None:
        self._scheduler.switch()

    def end(self) -> None:
        """Let go of what it holds: a greenlet that has begun is never collected otherwise."""
        if self._own:
            self._own.throw(greenlet.GreenletExit)

    def run_a_while(self) -> None:
        """Until it gives way. Called by the scheduler."""
        self._own.switch()

    def again(self, function: Callable[[], Any]) -> Any:
        """Until the store answers."""
        while True:
            try:
                return function()
            except (MissingError, LostRaceError):
                raise
            except StoreError:
                continue


def weights(step: int, incarnation: int) -> dict[str, Stored]:
    """Content that tells step and incarnation; most of it is that of step 0."""
    made = np.arange(24)
    made[:2] = step, incarnation
    return {"w": Stored("I64", made), "same": Stored("U8", np.arange(3, dtype=np.uint8))}


class Trainer(Actor):
    """Starts from the checkpoint that the store's records say, publishes some steps, saves every other one."""

    pace = 3

    def __init__(self, world: World, steps: int) -> None:
        self.steps = steps
        super().__init__(world)

    def work(self) -> None:
        saved = self.again(self._checkpoint)
        name = f"checkpoint-{saved.incarnation}-{saved.n}" if saved else None
        record = self.again(lambda: take_incarnation(self.store, parent=saved, checkpoint=name))
        parent: Manifest | None = None
        if saved is not None:
            try:
                parent = self.again(lambda: read_manifest(self.store, saved.incarnation, saved.n))
            except MissingError:
                return self.world.violated(f"the checkpoint's version {saved.name} is gone")
        anchor_every = self.world.random.choice((1, 2, 3, 5))
        publisher = Publisher(self.store, record, parent=parent, anchor_every=anchor_every)
        start = saved.step if saved else 0
        for step in range(start, start + self.steps):
            resumed = saved is not None and step == start
            tensors = self.world.content[saved.incarnation, saved.n] if resumed else weights(step, record.incarnation)
            try:
                self._publish(publisher, step, tensors)
            except LostRaceError:
                return None
        return None

    def _checkpoint(self) -> Version | None:
        """As train/checkpoint.py: the newest of the highest incarnation, else the one that it went on from."""
        numbers = incarnations(self.store)
        if not numbers:
            return None
        own = [one.version for one in pins(self.store) if one.version.incarnation == numbers[-1]]
        if own:
            return max(own, key=lambda version: version.n)
        return read_record(self.store, numbers[-1]).parent

    def _publish(self, publisher: Publisher, step: int, tensors: Mapping[str, Stored]) -> None:
        incarnation = publisher.record.incarnation

        def publish() -> Manifest:
            self.world.content[incarnation, publisher._n] = tensors
            with self.world.within(PUBLISH_S, f"publish {incarnation}"):
                return publisher.publish(Snapshot.take(step, tensors)).manifest

        version = self.again(publish).version
        if version.n % 2 == 0:
            self.again(publisher.check_incarnation)
            name = f"checkpoint-{incarnation}-{version.n}"
            self.again(lambda: pin(self.store, name, version, "checkpoint"))


class Reader(Actor):
    """An engine: follows, fetches, and compares with what was published."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.seen: list[Name] = []
        super().__init__(world)

    def work(self) -> None:
        subscriber = Subscriber(self.store, holder=self.name, poll_s=1.0, lease_s=LEASE_S)
        replica = Replica(self.store, threads=1)

        def poll() -> Manifest | None:
            with self.world.within(POLL_S, f"poll of {self.name}"):
                return subscriber.poll()

        while True:
            manifest = self.again(poll)
            if manifest is None:
                continue
            leased_s = self.world.now_s
            for _ in range(self.world.random.choice((0, 0, 3, 80))):  # slow
                self.give_way()
            try:
                found = self.again(lambda manifest=manifest: replica.fetch(manifest))
            except MissingError as error:
                if self.world.now_s - leased_s < LEASE_S:
                    self.world.violated(f"version {manifest.version.name} is leased, and gone: {error.message}")
                subscriber.resume(replica.version)
                continue
            self._look(manifest, found)

    def holds(self, version: Version) -> bool:
        return self.seen[-1:] == [(version.incarnation, version.n)]

    def _look(self, manifest: Manifest, found: Mapping[str, np.ndarray]) -> None:
        name = (manifest.version.incarnation, manifest.version.n)
        if not same(found, self.world.content[name]):
            self.world.violated(f"version {manifest.version.name} came out as something else")
        if self.seen and name <= self.seen[-1]:
            self.world.violated(f"a reader went from {self.seen[-1]} to {name}")
        self.seen.append(name)


class Gc(Actor):
    failing = 0.005
    pace = 10

    def work(self) -> None:
        collector = Collector(self.store, keep_anchors=self.world.random.choice((1, 2)), grace_s=self.world.grace_s)
        while True:
            with contextlib.suppress(StoreError), self.world.within(ROUND_S, "gc"):
                collector.run()
            self.give_way()


def same(found: Mapping[str, np.ndarray], meant: Mapping[str, Stored]) -> bool:
    return found.keys() == meant.keys() and all(np.array_equal(found[name], meant[name].array) for name in found)


def _one_by_one(function: Callable[[Any], Any], items: Iterable[Any], threads: int) -> Iterator[Any]:
    return map(function, items)


class Simulation:
    """One schedule."""

    def __init__(self, seed: int, *, grace_s: float = GRACE_S) -> None:
        self.world = World(random.Random(seed), grace_s=grace_s)
        self._trainers: list[Actor] = []
        self._others: list[Actor] = [Reader(self.world, "engine-0"), Reader(self.world, "engine-1"), Gc(self.world)]

    def run(self) -> list[str]:
        """What was violated."""
        world = self.world
        clock = SimpleNamespace(monotonic=lambda: world.now_s, sleep=lambda _: None, perf_counter=time.perf_counter)
        with (
            mock.patch("etude.weights.subscribe.time", clock),
            mock.patch("etude.weights.publish.time", clock),
            mock.patch("etude.weights.publish.in_order", _one_by_one),
        ):
            try:
                for _ in range(world.random.randint(60, 400)):
                    self._turn()
                    if world.violations:
                        return world.violations
                self._calm_down()
            finally:
                for actor in world.actors:
                    actor.end()
        return world.violations

    def _turn(self) -> None:
        world = self.world
        alive = [trainer for trainer in self._trainers if not trainer.is_over]
        if not alive or world.random.random() < 0.01:  # a crash, or somebody starts a second one
            alive.append(Trainer(world, steps=world.random.randint(1, 9)))
        self._trainers = alive
        self._start_again()
        actor = world.random.choice([*alive, *alive, *self._others])
        for _ in range(actor.pace):
            if not actor.is_over:
                actor.run_a_while()
        world.pass_time()

    def _start_again(self) -> None:
        """Readers and gc that were killed."""
        for number, actor in enumerate(self._others):
            if actor.is_over:
                self._others[number] = Reader(self.world, actor.name) if isinstance(actor, Reader) else Gc(self.world)

    def _calm_down(self) -> None:
        """Nothing fails any more: a last trainer, readers that catch up, gc; then look."""
        world = self.world
        world.is_calm = True
        self._start_again()
        last = Trainer(world, steps=4)
        for _ in range(3000):
            alive = [actor for actor in (*self._trainers, last) if not actor.is_over]
            if not alive or world.violations:
                break
            world.random.choice(alive).run_a_while()
        readers = [actor for actor in self._others if isinstance(actor, Reader)]
        store = SimulatedStore(world)
        newest = head(store)
        for turn in range(3000):
            if turn > 600 and newest is not None and all(reader.holds(newest.version) for reader in readers):
                break
            world.random.choice(self._others).run_a_while()
            world.pass_time()
        if newest is None or newest.version.incarnation != incarnations(store)[-1]:
            return world.violated("the last trainer's versions are not the head")
        for reader in readers:
            if not reader.holds(newest.version):
                world.violated(f"a reader holds {reader.seen[-1:]}, not the head {newest.version.name}")
        for version in [newest.version, *(one.version for one in pins(store))]:
            self._rebuild(store, version)
        return None

    def _rebuild(self, store: Store, version: Version) -> None:
        try:
            found = fetch(store, read_manifest(store, version.incarnation, version.n), threads=1)
        except StoreError as error:
            return self.world.violated(f"version {version.name} cannot be rebuilt: {error.message}")
        if not same(found, self.world.content[version.incarnation, version.n]):
            self.world.violated(f"version {version.name} is rebuilt as something else")
        return None


# Faults that the simulator must find


def _overwrite(self: SimulatedStore, key: str, data: bytes) -> bool:
    self._write(key, data)
    return True


def _commit_early(self: Uploader, snapshot: Snapshot, version: Version, *, anchor: bool) -> Any:
    uploaded = _upload(self, snapshot, version, anchor=anchor)
    self.committed(snapshot, uploaded)
    return uploaded


def _always_the_first(self: Subscriber) -> Name | None:
    found = _newest(self)
    if found is None or self._current is None or self._current.n % 3:
        return found
    return (found[0], 0)


def _lease_of_nothing(store: Store, key: str, kind: type) -> Any:
    found = read_object(store, key, kind)
    return Lease(holder=found.holder, versions=(), ttl_s=found.ttl_s) if kind is Lease else found


_upload, _newest = Uploader.upload, Subscriber._newest
PLANTED: dict[str, Callable[[], Any]] = {
    "create overwrites what is there": lambda: mock.patch.object(SimulatedStore, "_create", _overwrite),
    "gc forgets what a version is a difference from":
        lambda: mock.patch.object(Collector, "_with_chains", lambda self, kept: kept),
    "gc forgets pins": lambda: mock.patch("etude.weights.gc.pins", return_value=[]),
    "gc forgets leases": lambda: mock.patch("etude.weights.gc.read_object", _lease_of_nothing),
    "gc waits for nobody": lambda: mock.patch(f"{__name__}.GRACE_S", -1.0),
    "an aborted version becomes the baseline": lambda: mock.patch.object(Uploader, "upload", _commit_early),
    "a trainer does not look for later ones": lambda: mock.patch.object(Publisher, "check_incarnation"),
    "a reader goes back": lambda: mock.patch.object(Subscriber, "_newest", _always_the_first),
    "a reader applies differences to whatever it has, unchecked": lambda: _unchecked(),
}  # fmt: skip


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    def goes_on(path: list[Manifest], held: Version | None) -> bool:
        return held is not None and bool(path[0].changes)

    with (
        mock.patch("etude.weights.replica._continues", goes_on),
        mock.patch("etude.weights.replica.digest_bytes", _believed),
        mock.patch("etude.weights.replica.is_blob", return_value=True),
    ):
        yield


class _Believed(str):
    """A digest that equals any other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def _believed(data: object) -> str:
    return _Believed()


def simulate(seeds: range) -> tuple[int, list[str]] | None:
    """The first seed that violates something, and what."""
    for seed in seeds:
        if found := Simulation(seed, grace_s=GRACE_S).run():
            return seed, found
    return None


def simulate_all(seeds: range, processes: int) -> tuple[int, list[str]] | None:
    """As `simulate`, on several cores; progress on stderr."""
    chunks = [seeds[start : start + 500] for start in range(0, len(seeds), 500)]
    with multiprocessing.Pool(processes) as pool:
        for number, found in enumerate(pool.imap(simulate, chunks), 1):
            print(f"\r{min(number * 500, len(seeds)):,} of {len(seeds):,}", end="", file=sys.stderr, flush=True)
            if found is not None:
                return found
    print(file=sys.stderr)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--plant", action="store_true", help="find each planted fault instead")
    chosen = parser.parse_args()
    seeds = range(chosen.first, chosen.first + chosen.schedules)
    if not chosen.plant:
        started = time.monotonic()
        found = simulate_all(seeds, chosen.processes)
        print(f"{len(seeds)} schedules, {time.monotonic() - started:.0f} s: {found or 'no violation'}")
        sys.exit(1 if found else 0)
    missed = 0
    for name, plant in PLANTED.items():
        with plant():
            found = simulate(seeds)
        missed += found is None
        print(f"{name}: {f'seed {found[0]}: {found[1][0]}' if found else 'NOT FOUND'}", flush=True)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
