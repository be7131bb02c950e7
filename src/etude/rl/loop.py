"""The loop: asynchronous, single-epoch reinforcement learning. `max_staleness = 0` is the synchronous case.

      _admit                          _play (one task a group)                     _learn
    +---------------------+  key   +-----------------------------+  scored  +---------------------------+
    | ledger.draw, while  |------->| runner: sandbox, agent,     |--------->| the oldest ready groups   |
    | admission allows    |        | engine, grading -> Group    |  group   | -> batch file -> ledger   |
    +---------------------+        | file, then ledger.scored    |  file    | -> trainer.step           |
              ^                    +-----------------------------+          +---------------------------+
              | engine's step                     ^ tokens                               | publishes by itself
              +--------------------------- engine <----------- weight store <------------+

    _admit waits for the engines' newest committed step (admission.py); _learn waits for groups_per_step ready groups,
    and for every running group that one more step would make too old; _play waits for the runner's free places.
    The trainer never waits for the store, the engine never waits for the trainer: it swaps weights between two tokens.

    A file is durable before the ledger's row that names it, so that kill -9 at any point costs only unfinished groups.
    The watchdog says whom everything waits for. Trainer and engine are compared on every version that there is time
    for, and on the last one.

What it does not do: start processes (processes.py), evaluate, or decide rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etude.errors import EngineError
from etude.frames import encode, read_file, write_bytes, write_file
from etude.killpoints import reach
from etude.protocols import Engine, Recorder
from etude.rl.admission import Admission
from etude.rl.engine_watch import EngineWatch, WatchedTrainer
from etude.rl.ledger import Ledger
from etude.rl.recipe import BudgetRecipe, RLRecipe
from etude.rl.replay import ReplayedTrainer, replay
from etude.rl.rows import BusyClock, step_row
from etude.rl.run_folder import RunFolder, digest
from etude.rl.samples import batch_samples, versions_of
from etude.rl.watchdog import watch
from etude.types import Batch, Group, Task


class GroupRunner(Protocol):
    """`agent.runner.Runner`, as the loop sees it."""

    async def run_group(self, key: str, task: Task, size: int, *, min_step: int) -> Group: ...


class StepTrainer(WatchedTrainer, ReplayedTrainer, Protocol):
    """`rl.trainer_handle.ManagedTrainer`, as the loop sees it."""

    async def survivors(self) -> Callable[[int, int], bool]: ...


@dataclass(slots=True)
class _Running:
    admitted_step: int
    since: float
    play: asyncio.Task[None]


class Loop:
    """One run's training. All its state that must last is in the ledger and in files."""

    def __init__(
        self,
        *,
        folder: RunFolder,
        recipe: RLRecipe,
        budget: BudgetRecipe,
        until: int | None = None,
        tasks: Mapping[str, Task],
        ledger: Ledger,
        runner: GroupRunner,
        engine: Engine,
        trainer: StepTrainer,
        recorder: Recorder,
        watchdog_s: float = 60.0,
    ) -> None:
        """until: stop at this step, if the budget does not end first."""
        self._folder, self._recipe, self._budget = folder, recipe, budget
        self._last = min((step for step in (budget.steps, until) if step is not None), default=None)
        self._tasks, self._ledger, self._runner = tasks, ledger, runner
        self._epoch_steps = max(1, len(tasks) // recipe.groups_per_step)
        self._engine, self._trainer, self._recorder = engine, trainer, recorder
        self._admission = Admission(groups_per_step=recipe.groups_per_step, max_staleness=recipe.max_staleness)
        self._running: dict[str, _Running] = {}
        self._changed = asyncio.Event()
        self._watch = EngineWatch(engine, trainer, recorder, changed=self._notify)
        self._epoch_over = False
        self._failure: BaseException | None = None
        self._waiting_for = "start"
        self._watchdog_s = watchdog_s
        self._clock = BusyClock(float(ledger.meta("elapsed_s") or 0.0))

    async def run(self) -> int:
        """Train until the budget or the epoch ends; returns the last step. Cancel it to stop early: nothing is lost."""
        await self._catch_up()
        watchdog = watch(
            self._recorder,
            after_s=self._watchdog_s,
            step=lambda: self._trainer.step,
            waiting_for=lambda: self._waiting_for,
        )
        helpers = [asyncio.create_task(job) for job in (self._watch.run(), self._admit(), watchdog)]
        learning = asyncio.create_task(self._learn())
        try:
            done, _ = await asyncio.wait({learning, *helpers}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {learning}:
                task.result()
            step = await learning
            await self._watch.last_probe()
            return step
        finally:
            await self._cancel([learning, *helpers])
            await self._drop_running()

    # Admitting and playing groups

    async def _admit(self) -> None:
        while True:
            counts = self._ledger.counts()
            admitted = sum(counts.get(state, 0) for state in ("running", "scored", "batched", "abandoned"))
            step = self._watch.step
            if step is not None and self._admission.may_start(
                admitted=admitted, abandoned=counts.get("abandoned", 0), engine_step=step
            ):
                key = self._ledger.draw(step)
                if key is not None:
                    play = asyncio.create_task(self._play(key, step))
                    play.add_done_callback(self._played)
                    self._running[key] = _Running(admitted_step=step, since=time.monotonic(), play=play)
                    continue
                if not self._epoch_over:
                    self._epoch_over = True
                    self._notify()
            await self._change()

    async def _play(self, key: str, step: int) -> None:
        """One group, from the sandbox to the ledger."""
        size = self._recipe.group_size
        group = await self._runner.run_group(key, self._tasks[key], size, min_step=step)
        if len(group.members) < self._recipe.min_group:
            reason = "; ".join(sorted({f"{fault.boundary}: {fault.message}" for fault in group.faults}))
            self._ledger.abandoned(key, reason or "too few members")
        else:
            await asyncio.to_thread(write_file, self._folder.group(key), group)
            reach("group-written")
            self._ledger.scored(key, versions_of(group))
            reach("group-scored")
        del self._running[key]
        self._notify()

    def _played(self, play: asyncio.Task[None]) -> None:
        if not play.cancelled() and (error := play.exception()) is not None:
            self._failure = error
            self._notify()

    # Learning

    async def _learn(self) -> int:
        step = self._trainer.step
        while (self._last is None or step < self._last) and await self._groups_are_ready(step):
            groups = self._take(step)
            batch = Batch(
                step=step + 1,
                samples=batch_samples(groups, self._recipe, step),
                denominator=float(
                    self._recipe.groups_per_step * self._recipe.group_size * self._recipe.tokens_per_episode
                ),
                seed=self._recipe.seed,
                rate=self._budget.rate(wall_s=self._clock.wall_s, step=step + 1, epoch_steps=self._epoch_steps),
            )
            self._watch.sample = batch.samples[0] if batch.samples else None
            data = encode(batch)
            await asyncio.to_thread(write_bytes, self._folder.batch(batch.step), data)
            reach("batch-written")
            self._ledger.batched(batch.step, [group.key for group in groups], digest(data))
            reach("batch-recorded")
            trained = await self._train(batch.step)
            step = batch.step
            self._notify()
            self._ledger.set_meta("elapsed_s", str(self._clock.wall_s))
            reach("step-recorded")
            await self._record(groups, step, trained)
        return step

    async def _record(self, groups: list[Group], step: int, trained: Mapping[str, float]) -> None:
        with contextlib.suppress(EngineError):  # a dying engine costs a row of numbers, not the step
            row = step_row(
                groups, weights_step=step - 1, trained=trained, clock=self._clock, stats=await self._engine.stats()
            )
            self._recorder.record("step", row)

    async def _groups_are_ready(self, step: int) -> bool:
        """Wait for a full batch that leaves nobody behind. False: the budget or the epoch is over."""
        with self._clock.activity("wait"):
            while self._clock.wall_s < self._budget.wall_s:
                if self._failure is not None:
                    raise self._failure
                ready = [entry.admitted_step for entry in self._ledger.ready()]
                running = [group.admitted_step for group in self._running.values()]
                late = self._admission.wait_until(ready=ready, running=running, weights_step=step)
                if len(ready) >= self._recipe.groups_per_step:
                    if late is None:
                        return True
                    if self._recipe.late == "drop":
                        await self._drop_oldest()
                        continue
                if self._epoch_over and not self._running:
                    return False
                self._waiting_for = self._describe(len(ready))
                await self._change(timeout_s=max(0.0, self._budget.wall_s - self._clock.wall_s))
        return False

    def _take(self, step: int) -> list[Group]:
        ready = self._ledger.ready()[: self._recipe.groups_per_step]
        return [read_file(self._folder.group(entry.key), Group) for entry in ready]

    async def _train(self, step: int) -> dict[str, float]:
        self._waiting_for = f"the trainer's step {step}"
        with self._clock.activity("train"):
            try:
                return await self._trainer.train(self._folder.batch(step), step)
            except EngineError as error:
                self._recorder.record("fault", {"boundary": "trainer", "message": error.message})
                await self._trainer.revive()
                return await self._catch_up()

    async def _catch_up(self) -> dict[str, float]:
        """Replay the batches after the trainer's step; then put back what a dead version sampled."""
        self._watch.pause()
        row = await replay(self._ledger, self._folder, self._trainer)
        await self._drop_running()
        back = self._ledger.recover(await self._trainer.survivors())
        if back:
            self._recorder.record("recovered", {"prompts": back})
            self._epoch_over = False
        self._watch.go_on()
        return row

    # Ending, waiting, and saying for whom

    async def _drop_oldest(self) -> None:
        key = min(self._running, key=lambda key: self._running[key].admitted_step)
        await self._cancel([self._running.pop(key).play])
        self._ledger.abandoned(key, "late")

    async def _drop_running(self) -> None:
        """Their prompts stay `running` in the ledger and go back to drawn when it recovers."""
        await self._cancel([running.play for running in self._running.values()])
        self._running.clear()

    @staticmethod
    async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _change(self, timeout_s: float | None = None) -> None:
        changed = self._changed
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), timeout_s)

    def _notify(self) -> None:
        """Wake all who wait for a change; who waits from now on waits for the next."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _describe(self, ready: int) -> str:
        oldest = min(self._running.items(), key=lambda item: item[1].since, default=None)
        if oldest is not None:
            seconds = time.monotonic() - oldest[1].since
            ready_of = f"{ready} of {self._recipe.groups_per_step} groups are ready"
            return f"group {oldest[0][:8]}, running for {seconds:.0f} s ({ready_of})"
        served, trained = self._watch.step, self._trainer.step
        if served is None:
            return "the engine's first version"
        if served < trained:
            return f"the weight store or the engine: step {trained} is trained, step {served} is served"
        return "admission"
