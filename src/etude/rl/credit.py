"""What each episode of a batch is credited with: the recipe's rule, and two that studies hold beside it.

    group_mean   reward minus the mean of its group (advantages.py)
    shuffled     the same after the batch's rewards were dealt out anew: a control from which nothing can be learned
    rejection    1 for an episode that solved its task, nothing for any other, no baseline: rejection-sampling
                 fine-tuning (Yuan et al. 2023, arXiv 2308.01825), on the policy's own newest attempts

What it does not do: leave samples out (samples.py), or weigh tokens (train/losses.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from etude.rl.advantages import advantages
from etude.types import Group


def credit(groups: Sequence[Group], kind: str, *, seed: str) -> list[tuple[float, ...]]:
    """One number a member, group by group. `seed` fixes how `shuffled` deals."""
    if kind == "rejection":
        return [tuple(float(member.evidence.solved) for member in group.members) for group in groups]
    return [advantages(group) for group in (_dealt_anew(groups, seed) if kind == "shuffled" else groups)]


def _dealt_anew(groups: Sequence[Group], seed: str) -> list[Group]:
    rewards = [member.reward for group in groups for member in group.members]
    random.Random(seed).shuffle(rewards)
    dealt = iter(rewards)
    return [
        msgspec.structs.replace(
            group, members=tuple(msgspec.structs.replace(member, reward=next(dealt)) for member in group.members)
        )
        for group in groups
    ]
