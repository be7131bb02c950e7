"""Run one policy version k times on every task, at a fixed budget of sampled tokens.

    tasks x k --Runner: sandbox, episode, grade--> Attempt --progress--> SuiteResult

The engine is asked for exactly one version, so that no swap can mix two in a result. An attempt's seed follows from the
recipe's seed, the task and the attempt's number, so two versions meet the same draws. Attempts that broken machines
lost are left out and counted. What it does not do: compare (compare.py), or load a version (its caller).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from etude.agent.mcp import Servers
from etude.agent.policy import TokenLimits, engine_policies
from etude.agent.recipe import AgentRecipe
from etude.agent.runner import Runner, together
from etude.bench.recipe import EvalRecipe
from etude.data.render import Renderer
from etude.errors import EngineError
from etude.protocols import Engine, SandboxPool
from etude.rewards.combine import score
from etude.rewards.recipe import RewardRecipe
from etude.rewards.verify import collect
from etude.types import FORMAT, Fault, Noun, Outcome, Scored, Task, Version, digest_of


class Attempt(Noun, frozen=True):
    """One graded episode, without its tokens."""

    solved: bool
    reward: float
    patch_digest: str
    """Names the patch; equal patches of a task have equal digests."""
    sampled_tokens: int
    calls: int
    turns: int
    outcome: Outcome


class TaskResult(Noun, frozen=True):
    """All attempts at one task."""

    task_id: str
    cluster: str
    """What the task shares with its neighbours: its package."""
    attempts: tuple[Attempt, ...]
    lost: int
    """Attempts without a result because machines broke."""

    @property
    def num_solved(self) -> int:
        return sum(attempt.solved for attempt in self.attempts)


class SuiteResult(Noun, frozen=True):
    """One policy on a suite. `label` is for people: before, after, ..."""

    label: str
    version: Version | None
    k: int
    token_budget: int
    finish_needs_pass: bool
    tasks: tuple[TaskResult, ...]
    format: int = FORMAT


Progress = Callable[[int, int, int], None]
"""Called after every attempt: attempts done, attempts in all, solved so far."""


async def run_suite(
    tasks: Sequence[Task],
    *,
    label: str,
    engine: Engine,
    renderer_of: Callable[[Task], Renderer],
    pool: SandboxPool,
    agent: AgentRecipe,
    evaluation: EvalRecipe,
    reward: RewardRecipe,
    version: Version | None = None,
    finish_needs_pass: bool = False,
    infra_retries: int = 2,
    servers: Servers | None = None,
    progress: Progress | None = None,
    on_episode: Callable[[int, Scored], None] | None = None,
) -> SuiteResult:
    """Measure `version` (the engine's serving one if None) on `tasks`. `on_episode` gets (attempt number, episode).

    `finish_needs_pass` is the control that shows what persistence alone is worth. Errors: EngineError if no version
    serves; broken machines only lose attempts.
    """
    version = version or (await engine.stats()).version
    if version is None:
        raise EngineError("the engine serves no version yet", hint="load one before evaluating")
    limits = TokenLimits(
        context_tokens=agent.context_tokens,
        reply_tokens=agent.reply_tokens,
        sampled_tokens=evaluation.token_budget,
    )
    temperature = evaluation.temperature
    runner = Runner(
        pool=pool,
        make_policy=engine_policies(
            engine, renderer_of, limits, temperature=temperature, exact=version, prefix=f"{label}/"
        ),
        recipe=dataclasses.replace(agent, finish_needs_pass=finish_needs_pass),
        collect=collect,
        score=functools.partial(score, recipe=reward),
        infra_retries=infra_retries,
        seed=evaluation.seed,
        servers=servers,
    )
    total = len(tasks) * evaluation.k
    done = solved = 0

    async def attempt(task: Task, number: int) -> Attempt | None:
        nonlocal done, solved
        result = await runner.run_one(task.task_id, task, number)
        done += 1
        if isinstance(result, Scored):
            solved += result.evidence.solved
            if on_episode is not None:
                on_episode(number, result)
        if progress is not None:
            progress(done, total, solved)
        return None if isinstance(result, Fault) else _attempt(result)

    flat = await together([attempt(task, number) for task in tasks for number in range(evaluation.k)])
    return SuiteResult(
        label=label,
        version=version,
        k=evaluation.k,
        token_budget=evaluation.token_budget,
        finish_needs_pass=finish_needs_pass,
        tasks=tuple(
            _task_result(task, flat[place * evaluation.k : (place + 1) * evaluation.k])
            for place, task in enumerate(tasks)
        ),
    )


def _task_result(task: Task, found: Sequence[Attempt | None]) -> TaskResult:
    kept = tuple(attempt for attempt in found if attempt is not None)
    return TaskResult(
        task_id=task.task_id,
        cluster=task.source.get("package", task.task_id),
        attempts=kept,
        lost=len(found) - len(kept),
    )


def _attempt(scored: Scored) -> Attempt:
    episode = scored.episode
    return Attempt(
        solved=scored.evidence.solved,
        reward=scored.reward.total,
        patch_digest=digest_of(episode.patch),
        sampled_tokens=sum(int(context.sampled.sum()) for context in episode.contexts),
        calls=episode.effort.calls,
        turns=episode.effort.turns,
        outcome=episode.outcome,
    )
