"""Publishing beside training: the trainer hands over a snapshot and goes on.

One thread takes snapshots in order. If it lags, a waiting snapshot gives way to a newer one, unless it is `must` (a
checkpoint step); the latest is always published. A version whose publishing failed is tried again under a new number
unless a newer step waits. After a commit `then` runs in the same thread: a checkpoint is renamed into place there,
never before its version is public; then old versions are collected.

What it does not do: hide a lost race. `check` raises what ended the thread, and the trainer calls it before each step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from etude.errors import EtudeError, LostRaceError, RunError, StoreError
from etude.killpoints import reach
from etude.types import Manifest
from etude.weights.gc import Collector
from etude.weights.pieces import Snapshot, Stored
from etude.weights.publish import Published, Publisher

Then = Callable[[Manifest], None]


@dataclass(slots=True)
class _Job:
    snapshot: Snapshot
    must: bool
    then: Then | None
    manifest: Manifest | None = None
    """Once it is committed: a failure of `then` does not publish again."""


class Background:
    """A publisher in a thread of its own. Methods may be called from any thread."""

    def __init__(self, publisher: Publisher, collector: Collector | None = None, *, give_up_s: float = 120.0) -> None:
        """`give_up_s`: for how long a failing store is tried before the run stops."""
        self.publisher = publisher
        self._collector = collector
        self._give_up_s = give_up_s
        self._state = threading.Condition()
        self._waiting: list[_Job] = []
        self._busy = False
        self._closing = False
        self._failure: EtudeError | None = None
        self._last: Published | None = None
        self.skipped = 0
        """Steps that were never published because a newer one overtook them."""
        self.aborted = 0
        """Versions whose publishing failed and was tried again or overtaken."""
        self.uncollected = 0
        """Times that collecting old versions failed; it is tried again after a later version."""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    @property
    def head(self) -> Manifest | None:
        """The last committed version."""
        last = self.last
        return last.manifest if last else None

    @property
    def last(self) -> Published | None:
        """The last committed version, and what it took."""
        with self._state:
            return self._last

    def check(self) -> None:
        """Errors: LostRaceError if a later trainer has started, StoreError if the store stayed unusable."""
        with self._state:
            if self._failure is not None:
                raise self._failure

    def submit(
        self, step: int, tensors: Mapping[str, Stored], *, must: bool = False, then: Then | None = None
    ) -> tuple[int, ...]:
        """Copy the tensors and return; they are published in the background. Errors: those of `check`.

        Returns the steps that this one overtook: they will not be published.
        """
        self.check()
        snapshot = Snapshot.take(step, tensors)
        reach("snapshot-taken")
        with self._state:
            kept = [job for job in self._waiting if job.must]
            overtaken = tuple(job.snapshot.step for job in self._waiting if not job.must)
            self.skipped += len(overtaken)
            self._waiting = [*kept, _Job(snapshot, must or then is not None, then)]
            self._state.notify_all()
        return overtaken

    def wait(self, timeout_s: float | None = None) -> Manifest | None:
        """Until all that was submitted is public; returns the head. Errors: those of `check`, StoreError when late."""
        with self._state:
            idle = self._state.wait_for(lambda: self._failure or not (self._waiting or self._busy), timeout_s)
            if not idle:
                raise StoreError(f"publishing did not end in {timeout_s} s", hint="is the store slow or full?")
        self.check()
        return self.head

    def close(self, timeout_s: float | None = 60.0) -> None:
        """Publish what waits, then end the thread. Errors: those of `wait`."""
        try:
            self.wait(timeout_s)
        finally:
            with self._state:
                self._closing = True
                self._state.notify_all()
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        finally:  # however the thread ends, nobody must wait for it in vain
            self._end(self._failure or StoreError("the publishing thread has ended", hint="see the trainer's log"))

    def _loop(self) -> None:
        failing_since: float | None = None
        while (job := self._next()) is not None:
            try:
                self._finish(job)
                failing_since = None
            except (LostRaceError, RunError) as error:  # the run is another's, or a rank is gone
                return self._end(error)
            except StoreError as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > self._give_up_s:
                    return self._end(error)
                self._again(job)
                time.sleep(min(1.0, self._give_up_s / 10))

    def _finish(self, job: _Job) -> None:
        if job.manifest is None:
            published = self.publisher.publish(job.snapshot)
            job.manifest = published.manifest
            with self._state:
                self._last = published
        if job.then is not None:
            job.then(job.manifest)
        if self._collector is not None:
            try:
                self._collector.run_if_due()
            except StoreError:
                self.uncollected += 1

    def _next(self) -> _Job | None:
        with self._state:
            self._busy = False
            self._state.notify_all()
            self._state.wait_for(lambda: self._waiting or self._closing)
            if not self._waiting:
                return None
            self._busy = True
            return self._waiting.pop(0)

    def _again(self, job: _Job) -> None:
        with self._state:
            self.aborted += job.manifest is None
            if job.must or not self._waiting:
                self._waiting.insert(0, job)

    def _end(self, failure: EtudeError) -> None:
        with self._state:
            self._failure = failure
            self._busy = False
            self._waiting.clear()
            self._state.notify_all()
