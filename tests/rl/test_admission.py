"""The admission rule, simulated: bounded staleness, no deadlock, and exact synchrony at 0."""

import random
from dataclasses import dataclass

import pytest

from etude.rl.admission import Admission


@dataclass
class Outcome:
    worst: int
    steps: int
    abandoned: int


def simulate(
    seed: int, *, max_staleness: int, groups_per_step: int, refund: bool = True, naive: bool = False
) -> Outcome:
    """Random durations, engines that lag behind the trainer, groups that are abandoned.

    `naive` waits only for groups whose deadline is the step at hand.
    """
    steps = 60
    rng = random.Random(seed)
    rule = Admission(groups_per_step=groups_per_step, max_staleness=max_staleness)
    admitted = abandoned = trained = worst = now = idle = 0
    weights = engine = 0
    running: list[tuple[int, int]] = []  # (ends, admitted step)
    ready: list[int] = []
    while weights < steps and idle < 1000:
        now += 1
        idle += 1
        if engine < weights and rng.random() < 0.3:
            engine = rng.randint(engine + 1, weights)
        refunded = abandoned if refund else 0
        while len(running) < 64 and rule.may_start(admitted=admitted, abandoned=refunded, engine_step=engine):
            admitted += 1
            duration = rng.choice([1, 2, 3, 30])
            running.append((now + duration, engine))
        for entry in [entry for entry in running if entry[0] <= now]:
            running.remove(entry)
            if rng.random() < 0.1:
                abandoned += 1
            else:
                ready.append(entry[1])
        steps_of = [step for _, step in running]
        if naive:
            late = any(step <= weights - max_staleness for step in steps_of)
        else:
            late = rule.wait_until(ready=ready, running=steps_of, weights_step=weights) is not None
        if len(ready) >= groups_per_step and not late:
            ready.sort()
            batch, ready = ready[:groups_per_step], ready[groups_per_step:]
            worst = max(worst, *(weights - step for step in batch))
            trained += groups_per_step
            weights += 1
            idle = 0
    return Outcome(worst=worst, steps=weights, abandoned=abandoned)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_staleness_never_exceeds_the_bound_and_nothing_deadlocks(max_staleness: int) -> None:
    for seed in range(25):
        outcome = simulate(seed, max_staleness=max_staleness, groups_per_step=random.Random(seed).randint(1, 6))
        assert outcome.steps == 60
        assert outcome.worst <= max_staleness


def test_the_bound_is_reached_so_that_it_means_something() -> None:
    assert max(simulate(seed, max_staleness=2, groups_per_step=4).worst for seed in range(10)) == 2


def test_without_the_refund_of_abandoned_groups_the_loop_halts() -> None:
    outcomes = [simulate(seed, max_staleness=1, groups_per_step=4, refund=False) for seed in range(5)]
    assert any(outcome.steps < 60 for outcome in outcomes)


def test_waiting_only_for_groups_that_are_due_now_breaks_the_bound() -> None:
    worst = max(simulate(seed, max_staleness=4, groups_per_step=4, naive=True).worst for seed in range(25))
    assert worst > 4


def test_a_synchronous_step_waits_for_everyone() -> None:
    rule = Admission(groups_per_step=2, max_staleness=0)
    assert rule.wait_until(ready=[3, 3], running=[3], weights_step=3) == 3
    assert rule.wait_until(ready=[3, 3], running=[], weights_step=3) is None
