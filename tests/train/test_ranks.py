"""Several processes fit as one does, and end together."""

from pathlib import Path

import pytest
import torch

from etude.errors import RunError
from etude.train.ranks import Ranks, together
from train.followers import DOCUMENTS, die, fit_of, follow, leave

pytestmark = pytest.mark.timeout(120)


def test_two_ranks_make_the_gradient_and_the_step_of_one(tmp_path: Path) -> None:
    alone = fit_of(Ranks(), tmp_path)
    with together(2, follow, tmp_path) as ranks:
        both = fit_of(ranks, tmp_path)
        assert both._backward(DOCUMENTS)[0] == pytest.approx(alone._backward(DOCUMENTS)[0], rel=1e-4)
        for mine, theirs in zip(both.params, alone.params, strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5 * float(theirs.grad.abs().max()))
        assert both._step()["loss"] == pytest.approx(alone._step()["loss"], rel=1e-4)
    for mine, theirs in zip(both.params, alone.params, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-4)


def test_a_rank_that_is_killed_is_named() -> None:
    with together(2, die) as ranks:
        ranks.of_first(1.0)
        with pytest.raises(RunError, match="is gone"):
            add_for_long(ranks)


def add_for_long(ranks: Ranks) -> None:
    for _ in range(1000):
        ranks.add(torch.ones(10_000))


def test_a_rank_that_ends_before_it_is_up_is_not_waited_for() -> None:
    with pytest.raises(RunError, match="before it was up"), together(2, leave, Unreadable()):
        pass


class Unreadable:
    """Cannot be read back by another process."""

    def __reduce__(self) -> tuple[object, ...]:
        return leave, (0,)
