"""Advantages: reward minus the mean of its group, and nothing else.

    A_i = R_i - (1/G) sum_j R_j

Source: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783) as the Composer 2 report uses it: no division by the group's
standard deviation, which in a group where all are equally right would blow tiny differences of length up to full
size; and no division by length, which would make long wrong answers cheap. The mean includes the episode itself, so
the expected gradient is (G - 1)/G of REINFORCE with a leave-one-out baseline: a constant that the learning rate
absorbs.
"""

from __future__ import annotations

from etude.types import Group


def advantages(group: Group) -> tuple[float, ...]:
    """One advantage a member, in order; they sum to 0.

    >>> # rewards 1, 0, 0, 1 -> 0.5, -0.5, -0.5, 0.5
    """
    rewards = [member.reward.total for member in group.members]
    mean = sum(rewards) / len(rewards)
    return tuple(reward - mean for reward in rewards)
