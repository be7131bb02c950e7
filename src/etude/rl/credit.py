"""What each episode of a batch is credited with: the recipe's rule, and others that studies hold beside it.

    group_mean   reward minus the mean of its group (advantages.py)
    group_std    that, divided by the group's standard deviation: GRPO (Shao et al. 2024, arXiv 2402.03300)
    per_length   that, divided by the episode's sampled tokens, and times `tokens_per_episode`: GRPO's mean over tokens
    shuffled     the same after the batch's rewards were dealt out anew: a control from which nothing can be learned
    rejection    1 for an episode that solved its task, nothing for any other, no baseline: rejection-sampling
                 fine-tuning (Yuan et al. 2023, arXiv 2308.01825), on the policy's own newest attempts

What it does not do: leave samples out (samples.py), or weigh tokens (train/losses.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import stdev

import msgspec

from etude.rl.advantages import advantages
from etude.rl.recipe import RLRecipe
from etude.types import Group

_LEAST_STD = 1e-6
"""Added to a group's standard deviation, as is usual: a group without one has no advantages either."""


def credit(groups: Sequence[Group], recipe: RLRecipe, *, seed: str) -> list[tuple[float, ...]]:
    """One number a member, group by group. `seed` fixes how `shuffled` deals."""
    if recipe.credit == "rejection":
        return [tuple(float(member.evidence.solved) for member in group.members) for group in groups]
    if recipe.credit == "shuffled":
        return [advantages(group) for group in _dealt_anew(groups, seed)]
    if recipe.credit == "group_std":
        return [_over_std(group) for group in groups]
    if recipe.credit == "per_length":
        return [_over_length(group, recipe.tokens_per_episode) for group in groups]
    return [advantages(group) for group in groups]


def _over_std(group: Group) -> tuple[float, ...]:
    spread = stdev(member.reward.total for member in group.members) + _LEAST_STD
    return tuple(advantage / spread for advantage in advantages(group))


def _over_length(group: Group, tokens_per_episode: int) -> tuple[float, ...]:
    lengths = [sum(int(context.sampled.sum()) for context in member.episode.contexts) for member in group.members]
    pairs = zip(advantages(group), lengths, strict=True)
    return tuple(advantage * tokens_per_episode / max(1, length) for advantage, length in pairs)


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
