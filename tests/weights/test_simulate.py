"""A few of the simulator's schedules; `python tests/weights/simulate.py` runs as many as one likes."""

from __future__ import annotations

import pytest

from weights.simulate import PLANTED, simulate


@pytest.mark.slow
def test_no_random_schedule_violates_the_protocol() -> None:
    assert simulate(range(150)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANTED))
def test_each_planted_fault_is_found(name: str) -> None:
    with PLANTED[name]():
        assert simulate(range(150)) is not None
