"""Many episodes at once: what is a fault, what is data.

    free place -> sandbox -> run_episode -> close it -> grade in a fresh one -> Scored
         |            |            |                          |
         |      SandboxError   FAULT in the episode     RewardError, SandboxError: grade again, the episode is kept
         |            '---- fault ----' : play again in a fresh sandbox, up to infra_retries, then Fault

- A machine that broke is a fault: the sandbox before the agent's first action, the engine, grading. It is never scored.
- A sandbox that dies after the agent's first action is the agent's doing (loop.py says SANDBOX_DIED) and is scored,
  unless something outside that sandbox shows that the host is ill: `host_evidence` says so, or no fresh sandbox for
  grading can be had.
- An agent that fails in any other way is data.

Every sandbox that was acquired is closed, and every policy, also on cancellation. What it does not do: decide what
happens to a group with missing members (rl).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from etude.agent.loop import Services, run_episode
from etude.agent.mcp import Servers
from etude.agent.recipe import AgentRecipe
from etude.agent.search import search_of
from etude.errors import EtudeError, RewardError, SandboxError, TaskError
from etude.protocols import Policy, Sandbox, SandboxPool
from etude.types import Episode, Evidence, Fault, Group, Outcome, Reward, Scored, Task, digest_of

T = TypeVar("T")
RETRY_WAIT_S = 0.2
"""Before the first retry; doubled for each further one."""
Collect = Callable[[Task, Episode, SandboxPool], Awaitable[Evidence]]
"""`rewards.verify.collect`. Errors: RewardError, SandboxError."""
Score = Callable[[Task, Episode, Evidence], Reward]
"""`rewards.combine.score` with its recipe; pure."""


class MakePolicy(Protocol):
    """Makes one episode's policy. `seed` differs from episode to episode; `min_step` is the oldest allowed version."""

    def __call__(self, *, task: Task, episode_id: str, seed: int, min_step: int | None) -> Policy: ...


class Runner:
    """Plays and grades episodes, at most `recipe.max_episodes` at once over all calls."""

    def __init__(
        self,
        *,
        pool: SandboxPool,
        make_policy: MakePolicy,
        recipe: AgentRecipe,
        collect: Collect,
        score: Score,
        infra_retries: int = 2,
        seed: int = 0,
        host_evidence: Callable[[], str | None] | None = None,
        servers: Servers | None = None,
    ) -> None:
        self._pool, self._make_policy, self._recipe = pool, make_policy, recipe
        self._collect, self._score = collect, score
        self._services = Services(search=search_of(recipe))
        self._servers = servers or Servers({}, ())
        self._infra_retries, self._seed, self._host_evidence = infra_retries, seed, host_evidence
        self._places = asyncio.Semaphore(recipe.max_episodes)
        self.faults: dict[str, int] = {}
        """Broken machines so far, by boundary; those that a retry made good are counted too."""

    async def run_group(self, key: str, task: Task, size: int, *, min_step: int | None = None) -> Group:
        """Play `task` `size` times. Members that stayed missing are in `faults`; members keep their order."""
        results = await together([self.run_one(key, task, number, min_step=min_step) for number in range(size)])
        return Group(
            key=key,
            task_id=task.task_id,
            members=tuple(result for result in results if isinstance(result, Scored)),
            faults=tuple(result for result in results if isinstance(result, Fault)),
        )

    async def run_one(self, key: str, task: Task, number: int, *, min_step: int | None = None) -> Scored | Fault:
        """Play and grade one episode; a Fault if machines broke on every try. Its seed follows from key and number."""
        seed = int(digest_of(str(self._seed), key, str(number))[:16], 16) >> 1
        fault: Fault | None = None
        async with self._places:
            for attempt in range(self._infra_retries + 1):
                if attempt:
                    await asyncio.sleep(RETRY_WAIT_S * 2 ** (attempt - 1))
                episode_id = f"{key}-{number}" + (f"-retry{attempt}" if attempt else "")
                try:
                    episode = await self._play(task, episode_id, seed, min_step)
                    fault = episode.fault or self._host_fault(episode)
                    if fault is None:
                        return await self._grade(task, episode)
                except (SandboxError, RewardError) as error:
                    fault = Fault(boundary=error.boundary, message=str(error))
                self._count(fault)
                if fault.boundary == "reward":  # grading was tried again already
                    break
        assert fault is not None
        return fault

    async def _play(self, task: Task, episode_id: str, seed: int, min_step: int | None) -> Episode:
        start = time.monotonic()
        try:
            sandbox = await self._pool.acquire(task.workspace)
        except OSError as error:
            raise TaskError(f"the workspace of task {task.task_id} cannot be laid out", cause=str(error)) from error
        acquired_s = time.monotonic() - start
        try:
            policy = self._make_policy(task=task, episode_id=episode_id, seed=seed, min_step=min_step)
            try:
                async with self._servers.tools(sandbox) as extra:
                    services = dataclasses.replace(self._services, extra=extra)
                    episode = await run_episode(
                        task, sandbox, policy, self._recipe, episode_id=episode_id, services=services
                    )
            finally:
                await asyncio.shield(policy.close())
        finally:
            await asyncio.shield(_close(sandbox))
        return replace(episode, timings={**episode.timings, "sandbox": acquired_s})

    async def _grade(self, task: Task, episode: Episode) -> Scored:
        """Errors: SandboxError where it shows that the host killed the episode's sandbox, RewardError."""
        start = time.monotonic()
        error: EtudeError | None = None
        for attempt in range(self._infra_retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_WAIT_S * 2 ** (attempt - 1))
            try:
                evidence = await self._collect(task, episode, self._pool)
            except (SandboxError, RewardError) as broken:
                if episode.outcome is Outcome.SANDBOX_DIED:
                    raise SandboxError("no fresh sandbox either", cause=str(broken)) from broken
                error = broken
                continue
            reward = self._score(task, episode, evidence)
            timings = {**episode.timings, "grade": time.monotonic() - start}
            return Scored(episode=replace(episode, timings=timings), evidence=evidence, reward=reward)
        raise RewardError(f"episode {episode.episode_id} cannot be graded", cause=str(error)) from error

    def _host_fault(self, episode: Episode) -> Fault | None:
        """Evidence from outside a sandbox that died."""
        if episode.outcome is not Outcome.SANDBOX_DIED or self._host_evidence is None:
            return None
        evidence = self._host_evidence()
        return None if evidence is None else Fault(boundary=SandboxError.boundary, message=evidence)

    def _count(self, fault: Fault) -> None:
        self.faults[fault.boundary] = self.faults.get(fault.boundary, 0) + 1


async def _close(sandbox: Sandbox) -> None:
    with contextlib.suppress(SandboxError):  # one that cannot be closed any more is gone, which is what was wanted
        await sandbox.close()


async def together(jobs: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. When one raises or the caller is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
