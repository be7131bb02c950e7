"""Ranks in step: rank 0 is asked, and says to the others what comes next before it does it itself.

    Lead, rank 0          train(batch) --frame, broadcast--> follow(), ranks 1 to n - 1: train(batch)

When a rank is gone the others end too: whoever started the trainer starts it again, and it resumes from its checkpoint.
What it does not do: anything of its own. Alone, nothing is sent.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from etude.errors import EtudeError, LostRankError, RunError
from etude.frames import convert, decode, encode
from etude.train.step import Trainer
from etude.types import Batch, Sample, Version
from etude.weights.pieces import Snapshot, Stored
from etude.weights.publish import Snapshots


class Lead:
    """A trainer whose other ranks follow. Errors of all methods: the trainer's; SystemExit if a rank is gone."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def step(self) -> int:
        return self._trainer.step

    def train(self, batch: Batch, *, is_current: Callable[[Version], bool] = lambda _: False) -> dict[str, float]:
        with self._all("train", batch):
            return self._trainer.train(batch, is_current=is_current)

    def score(self, sample: Sample) -> np.ndarray:
        with self._all("score", sample):
            return self._trainer.score(sample)

    def set_reference(self, tensors: Mapping[str, Stored]) -> None:
        with self._all("reference", {name: [stored.dtype, stored.array] for name, stored in tensors.items()}):
            self._trainer.set_reference(tensors)

    def published(self) -> dict[str, Stored]:
        with self._all("published"):
            return self._trainer.masters.published()

    def stretches(self, dropped: Sequence[int] = ()) -> dict[str, Stored]:
        """What rank 0 publishes of the weights as they are; the others keep theirs, and forget the steps `dropped`."""
        with self._all("snapshot", list(dropped)):
            return self._trainer.masters.stretches()

    def state(self) -> dict[str, np.ndarray]:
        with self._all("state"):
            return self._trainer.masters.state()

    def restore(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """What `state` gave, whatever the number of ranks was then."""
        with self._all("restore", {"step": step, "arrays": dict(arrays)}):
            _restore(self._trainer, step, arrays)

    def close(self) -> None:
        """Let the others end."""
        with self._all("end"):
            return

    @contextlib.contextmanager
    def _all(self, what: str, argument: object = None) -> Iterator[None]:
        """What is done inside is done by all ranks."""
        try:
            if self._trainer.ranks.count > 1:
                self._trainer.ranks.tell(encode({"what": what, "argument": argument}))
            yield
        except LostRankError as error:
            sys.exit(str(error))
        except RuntimeError as error:  # a collective of FSDP2 that found a connection closed
            if self._trainer.ranks.count == 1 or isinstance(error, EtudeError):
                raise
            sys.exit(f"a process of the fit is gone: {error}")


def follow(trainer: Trainer, snapshots: Snapshots | None = None) -> None:
    """Do what rank 0 says, until it says `end`. An error of a step is one of all ranks, and rank 0 reports it.

    snapshots: where this rank's publishing thread finds them; None where nothing is published.
    """
    while True:
        order = decode(trainer.ranks.tell(b""), dict[str, Any])
        what, argument = order["what"], order["argument"]
        try:
            if what == "train":
                trainer.train(convert(argument, Batch))
            elif what == "score":
                trainer.score(convert(argument, Sample))
            elif what == "reference":
                given = {name: Stored(dtype, convert(array, np.ndarray)) for name, (dtype, array) in argument.items()}
                trainer.set_reference(given)
            elif what == "published":
                trainer.masters.published()
            elif what == "snapshot" and snapshots is not None:
                snapshots.keep(Snapshot.take(trainer.step, trainer.masters.stretches()), argument)
            elif what == "state":
                trainer.masters.state()
            elif what == "restore":
                arrays = {name: convert(array, np.ndarray) for name, array in argument["arrays"].items()}
                _restore(trainer, argument["step"], arrays)
            else:
                return
        except RunError as error:
            if what != "train" or isinstance(error, LostRankError):
                raise


def _restore(trainer: Trainer, step: int, arrays: Mapping[str, np.ndarray]) -> None:
    trainer.masters.restore(arrays)
    trainer.step = step
