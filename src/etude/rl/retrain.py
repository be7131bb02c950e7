"""Do the weights of a run follow from its batches? Train all of them again, in order, from the model it began with.

Training is deterministic on one machine, so the last version must come out bit for bit, however often the run was
killed. It takes as long as the run's own steps did. What it does not do: check the batches themselves (audit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from etude.errors import StoreError
from etude.frames import read_file
from etude.rl.ledger import Ledger
from etude.rl.run_folder import RunFolder
from etude.types import Batch


class Retrained(Protocol):
    """`train.step.Trainer`, as a replay sees it."""

    def train(self, batch: Batch) -> Mapping[str, float]: ...


def retrain(
    folder: RunFolder,
    trainer: Retrained,
    *,
    weights: Callable[[], Mapping[str, np.ndarray]],
    published: Mapping[str, np.ndarray],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Problems, each a sentence. `weights` are the trainer's after the last batch, `published` the last version's."""
    ledger = Ledger(folder.path / "ledger.sqlite")
    try:
        steps = [row.step for row in ledger.batches()]
    finally:
        ledger.close()
    for number, step in enumerate(steps, 1):
        try:
            trainer.train(read_file(folder.batch(step), Batch))
        except StoreError as error:
            return [f"step {step} cannot be taken again: {error}"]
        progress(number, len(steps))
    found = weights()
    if found.keys() != published.keys():
        return [f"the last version holds other tensors: {sorted(found.keys() ^ published.keys())[:3]}"]
    wrong = [name for name, array in found.items() if not np.array_equal(array, published[name], equal_nan=True)]
    if wrong:
        return [f"the weights of step {steps[-1] if steps else 0} are not those of its batches: {len(wrong)} tensors "
                f"of {len(found)} differ, the first is {wrong[0]}"]  # fmt: skip
    return []
