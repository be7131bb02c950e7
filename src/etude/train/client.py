"""How others speak to a trainer's process. No torch here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from etude.frames import Client
from etude.types import Noun, Sample, Version


class TrainerState(Noun, frozen=True):
    """Where a trainer is."""

    step: int
    """Optimizer steps in the lineage of its weights. After a start: the step of the checkpoint that it resumed from."""
    version: Version
    """The last version that it has committed; right after a start one with exactly its weights."""
    checkpoint_step: int
    """Step of its newest checkpoint, 0 if there is none: batches up to here are never replayed."""


class Scored(Noun, frozen=True):
    """Teacher-forced log-probs."""

    step: int
    """Of the weights."""
    logprobs: np.ndarray
    """[loss positions] float32, in their order."""


class TrainerClient:
    """A trainer behind a socket. Errors of every method: those of the trainer; EngineError if its process is gone."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def step(self, batch: Path) -> dict[str, float]:
        """Train on the batch in a durable file; returns the step's row of numbers. Publishing goes on behind it."""
        return await self._client.call("step", {"batch_path": str(batch)}, dict[str, float])

    async def state(self) -> TrainerState:
        return await self._client.call("state", {}, TrainerState)

    async def score(self, sample: Sample) -> Scored:
        """Log-probs of the sample's loss positions under the weights as they are; its routes are replayed."""
        return await self._client.call("score", sample, Scored)

    async def finish(self) -> TrainerState:
        """Wait until the newest step is published and saved in a checkpoint."""
        return await self._client.call("finish", {}, TrainerState)
