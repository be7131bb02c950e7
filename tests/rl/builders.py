"""Small episodes, groups and versions for the tests of the loop."""

from __future__ import annotations

import numpy as np

from etude.types import Context, Effort, Episode, Evidence, Opened, Outcome, Reward, Run, Scored, Version


def version(step: int, incarnation: int = 1) -> Version:
    return Version(incarnation=incarnation, n=step, step=step)


def context(*, step: int = 0, prompt: int = 3, reply: int = 2, incarnation: int = 1) -> Context:
    size = prompt + reply
    sampled = np.arange(size) >= prompt
    return Context(
        ids=np.arange(size, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        versions=(Run(start=prompt, version=version(step, incarnation)),),
        kv_epochs=(),
        routes=None,
        opened=Opened.TASK,
    )


def scored(
    total: float, *, contexts: tuple[Context, ...] | None = None, solved: bool | None = None, tokens: int = 2
) -> Scored:
    """tokens: sampled ones, where no contexts are given."""
    episode = Episode(
        episode_id="e", task_id="t", contexts=(context(reply=tokens),) if contexts is None else contexts, turns=(),
        outcome=Outcome.FINISHED, patch="", files={}, effort=Effort(turns=1), fault=None, timings={},
    )  # fmt: skip
    passed = (total > 0.5) if solved is None else solved
    evidence = Evidence(task_id="t", episode_id="e", passed=(passed,), detail="", wall_s=0.0)
    return Scored(episode=episode, evidence=evidence, reward=Reward(total=total, parts={"verify": total}))
