"""Group and credit -> samples: one sample a context, every one with its episode's credit as its advantage.

The final reward speaks for every token that the policy sampled in the chain, in whichever context it stands. Nothing
is retokenised: ids, masks, log-probs, versions and routes are those that the engine recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.errors import RunError
from etude.rl.credit import credit
from etude.rl.recipe import RLRecipe
from etude.types import Group, Origin, Sample, Version


def batch_samples(groups: Sequence[Group], recipe: RLRecipe, step: int) -> tuple[Sample, ...]:
    """What step `step` + 1 trains on: the groups' samples, but those whose advantage is too small to be worth it."""
    credits = credit(groups, recipe, seed=f"{recipe.seed} {step}")
    return tuple(
        sample
        for group, credited in zip(groups, credits, strict=True)
        for sample in to_samples(group, credited)
        if abs(sample.advantage) > recipe.min_advantage
    )


def to_samples(group: Group, credit: Sequence[float]) -> tuple[Sample, ...]:
    """Samples of all members' contexts that hold a sampled token. credit: one number a member.

    Errors: RunError if an episode has no contexts (a foreign endpoint's episode cannot be trained on).
    """
    samples = []
    for number, (member, advantage) in enumerate(zip(group.members, credit, strict=True)):
        if not member.episode.contexts:
            raise RunError(
                f"episode {member.episode.episode_id} cannot be trained on",
                cause="it has no token contexts: it was played by a foreign endpoint",
                hint="train only on episodes of Etude's own engine",
            )
        for place, context in enumerate(member.episode.contexts):
            if not context.sampled.any():
                continue
            samples.append(
                Sample(
                    ids=context.ids,
                    mask=context.sampled,
                    logprobs=context.logprobs,
                    advantage=advantage,
                    versions=context.versions,
                    kv_epochs=context.kv_epochs,
                    routes=context.routes,
                    origin=Origin(key=group.key, member=number, context=place),
                )
            )
    return tuple(samples)


def oldest_step(group: Group) -> int | None:
    """Step of the oldest version that sampled a token of the group; None if no token was sampled."""
    return min((version.step for version in versions_of(group)), default=None)


def versions_of(group: Group) -> tuple[Version, ...]:
    """The distinct versions that sampled the group's tokens, in order."""
    found = {run.version for member in group.members for context in member.episode.contexts for run in context.versions}
    return tuple(sorted(found))
