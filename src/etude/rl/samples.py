"""Group -> samples: one sample a context, every one with its episode's advantage.

The final reward speaks for every token that the policy sampled in the chain, in whichever context it stands. Nothing
is retokenised: ids, masks, log-probs, versions and routes are those that the engine recorded.
"""

from __future__ import annotations

from etude.errors import RunError
from etude.rl.advantages import advantages
from etude.types import Group, Origin, Sample, Version


def to_samples(group: Group) -> tuple[Sample, ...]:
    """Samples of all members' contexts that hold a sampled token.

    Errors: RunError if an episode has no contexts (a foreign endpoint's episode cannot be trained on).
    """
    samples = []
    for number, (member, advantage) in enumerate(zip(group.members, advantages(group), strict=True)):
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
