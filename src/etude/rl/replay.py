"""Replay: bring a trainer that went back to its checkpoint up to the ledger again, batch by batch, as stored.

The trainer is deterministic, so the weights come out as they were; they are published under a new incarnation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from etude.errors import EngineError, RunError
from etude.rl.ledger import Ledger
from etude.rl.run_folder import RunFolder, digest

TRIES = 3


class ReplayedTrainer(Protocol):
    """`rl.trainer_handle.ManagedTrainer`, as replay sees it."""

    @property
    def step(self) -> int: ...
    async def train(self, batch: Path, step: int) -> dict[str, float]: ...
    async def revive(self) -> None: ...


async def replay(ledger: Ledger, folder: RunFolder, trainer: ReplayedTrainer) -> dict[str, float]:
    """Take every step after the trainer's; returns the last one's row, empty if there was none.

    Errors: RunError if a batch file is not the ledger's, or if the trainer dies again and again.
    """
    cause = ""
    for _ in range(TRIES):
        row: dict[str, float] = {}
        try:
            for batch in ledger.batches():
                if batch.step > trainer.step:
                    path = folder.batch(batch.step)
                    if not path.is_file() or digest(path.read_bytes()) != batch.digest:
                        raise RunError(f"{path} is not the batch that the ledger names", hint="restore it from a copy")
                    row = await trainer.train(path, batch.step)
            return row
        except EngineError as error:
            cause = str(error)
            await trainer.revive()
    log = folder.log("trainer")
    raise RunError(f"the trainer failed {TRIES} times on the same batches", cause=cause, hint=f"see {log}")
