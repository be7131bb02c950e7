"""What the ranks after the first do in the tests; apart, so that another process can import it."""

import dataclasses
import os
import signal
from pathlib import Path

from etude.train.fit import Fit
from etude.train.ranks import Ranks
from train.test_fit import SCHEDULE, corpus, model

DOCUMENTS = [3, 1, 4, 15, 9, 2, 6, 5]


def fit_of(ranks: Ranks, folder: Path) -> Fit:
    # The balance loss is left out: it is made of each micro-batch's own loads.
    schedule = dataclasses.replace(SCHEDULE, batch_tokens=120, warmup_share=0.0, balance_coef=0.0)
    return Fit(model(), corpus(), schedule, folder / f"none-{ranks.rank}.pt", ranks)


def follow(ranks: Ranks, folder: Path) -> None:
    fit = fit_of(ranks, folder)
    fit._backward(DOCUMENTS)
    fit._step()


def die(ranks: Ranks) -> None:
    ranks.of_first(0.0)
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> None:
    """Reading it ends the process."""
    os._exit(code)
