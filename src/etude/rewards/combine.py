"""Reward = sum of parts. Pure: the same episode and evidence can be priced again at any time, offline."""

from __future__ import annotations

from etude.rewards.length import penalty
from etude.rewards.recipe import SOLVED_VALUE, RewardRecipe
from etude.types import Episode, Evidence, Reward, Task


def score(task: Task, episode: Episode, evidence: Evidence, recipe: RewardRecipe) -> Reward:
    """The reward of an episode with its named parts. Errors: ValueError if the three do not belong together.

    >>> score(task, episode, evidence, RewardRecipe())
    Reward(total=0.93, parts={"verify": 1.0, "length": -0.07})
    """
    if evidence.episode_id != episode.episode_id or not task.task_id == episode.task_id == evidence.task_id:
        raise ValueError(f"evidence about {evidence.episode_id} does not speak of episode {episode.episode_id}")
    priced = {
        "verify": SOLVED_VALUE if evidence.solved else 0.0,
        "length": -penalty(episode.effort, recipe.length),
    }
    parts = {name: priced[name] for name in recipe.parts}
    return Reward(total=sum(parts.values()), parts=parts)
