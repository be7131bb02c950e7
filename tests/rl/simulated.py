"""Workers at the outer edge of the loop, in one process: an engine that follows a trainer, and a runner that sleeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from etude.errors import EngineError
from etude.frames import read_file
from etude.protocols import EngineStats
from etude.train.client import Scored
from etude.types import Batch, Group, Routes, Sample, Task, Version
from rl.builders import context, scored


class SimulatedTrainer:
    """Counts steps; dies before the steps in `dies_at`, and resumes from the last multiple of `checkpoint_every`."""

    def __init__(self, *, dies_at: tuple[int, ...] = (), checkpoint_every: int = 3, step: int = 0) -> None:
        self.step = step
        self.incarnation = 1
        self.trained: list[tuple[int, tuple[str, ...]]] = []
        self._dies_at = list(dies_at)
        self._checkpoint_every = checkpoint_every
        self._heads: dict[int, int] = {}

    async def train(self, batch: Path, step: int) -> dict[str, float]:
        assert step == self.step + 1
        await asyncio.sleep(0.002)
        if step in self._dies_at:
            self._dies_at.remove(step)
            raise EngineError("trainer is gone")
        content = read_file(batch, Batch)
        assert content.step == step
        self.step = step
        self.trained.append((self.incarnation, tuple(sorted({sample.origin.key for sample in content.samples}))))
        return {"loss": 0.0}

    async def revive(self) -> None:
        self.step -= self.step % self._checkpoint_every
        self._heads[self.incarnation] = self.step
        self.incarnation += 1

    async def score(self, sample: Sample) -> Scored:
        return Scored(step=self.step, logprobs=sample.logprobs[sample.mask] + 0.25)

    async def survivors(self) -> Callable[[int, int], bool]:
        heads = dict(self._heads)
        return lambda incarnation, n: (
            n <= min((step for number, step in heads.items() if number >= incarnation), default=10**9)
        )


class SimulatedEngine:
    """Serves the trainer's newest step, a little late."""

    def __init__(self, trainer: SimulatedTrainer) -> None:
        self._trainer = trainer

    async def stats(self) -> EngineStats:
        await asyncio.sleep(0.001)
        zeros = {name: 0 for name in EngineStats.__struct_fields__ if name != "version"}
        trainer = self._trainer
        return EngineStats(version=Version(incarnation=trainer.incarnation, n=trainer.step, step=trainer.step), **zeros)

    async def score(self, ids: np.ndarray, routes: Routes | None = None) -> tuple[np.ndarray, Routes | None]:
        return np.where(np.arange(len(ids)) >= 3, -1.0, 0.0).astype(np.float32), routes

    def served(self) -> tuple[int, int]:
        return self._trainer.step, self._trainer.incarnation


class SimulatedRunner:
    """Groups of random length; their tokens carry the step and incarnation that served when they began."""

    def __init__(
        self,
        engine: SimulatedEngine,
        *,
        seed: int = 0,
        members: Callable[[str], int] | None = None,
        stuck: str | None = None,
    ) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._members = members
        self._stuck = stuck

    async def run_group(self, key: str, task: Task, size: int, *, min_step: int) -> Group:
        step, incarnation = self._engine.served()
        assert step >= min_step
        await asyncio.sleep(100.0 if key == self._stuck else self._rng.choice([0.001, 0.002, 0.03]))
        if self._members is not None:
            size = self._members(key)
        token = context(step=step, incarnation=incarnation)
        members = tuple(scored(float(number % 2), contexts=(token,)) for number in range(size))
        return Group(key=key, task_id=key, members=members, faults=())
