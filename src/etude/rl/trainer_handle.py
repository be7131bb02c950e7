"""The trainer's process as the loop sees it: train on a batch file, and start again when it dies.

A trainer takes a new incarnation at every start and resumes from its newest checkpoint, so that its step may go back;
the loop then replays the batches after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from etude.frames import Client
from etude.rl.processes import Workers
from etude.train.client import Scored, TrainerClient, TrainerState
from etude.types import Sample, Version
from etude.weights.manifests import lineage
from etude.weights.store import Store


class ManagedTrainer:
    """One trainer process; `step` and `incarnation` are what it last said."""

    def __init__(self, workers: Workers, store: Store, role: str = "trainer") -> None:
        self._workers = workers
        self._store = store
        self._role = role
        self._client: TrainerClient | None = None
        self._state: TrainerState | None = None

    @property
    def state(self) -> TrainerState:
        assert self._state is not None, "start() comes first"
        return self._state

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def version(self) -> Version:
        return self.state.version

    @property
    def incarnation(self) -> int:
        return self.state.version.incarnation

    async def start(self) -> None:
        """Up, with its starting version published."""
        await self._workers.start(self._role, self._greet)

    async def revive(self) -> None:
        """Start again after it died. Errors: EngineError if it does not come up."""
        await self._workers.restart(self._role, self._greet)

    async def _greet(self, connection: Client) -> None:
        self._client = TrainerClient(connection)
        self._state = await self._client.state()

    async def train(self, batch: Path, step: int) -> dict[str, float]:
        """Take the step that `batch` makes. Errors: EngineError if the process is gone."""
        assert self._client is not None, "start() comes first"
        assert step == self.step + 1, f"batch {step} does not follow step {self.step}"
        row = await self._client.step(batch)
        self._state = await self._client.state()
        return row

    async def score(self, sample: Sample) -> Scored:
        """Teacher-forced log-probs under the weights as they are. Errors: EngineError if the process is gone."""
        assert self._client is not None, "start() comes first"
        return await self._client.score(sample)

    async def finish(self) -> TrainerState:
        """Wait until the newest step is published and checkpointed."""
        assert self._client is not None, "start() comes first"
        self._state = await self._client.finish()
        return self._state

    async def survivors(self) -> Callable[[int, int], bool]:
        """Whether version (incarnation, n) is in the surviving lineage, as the store says now."""
        return (await asyncio.to_thread(lineage, self._store)).survives
