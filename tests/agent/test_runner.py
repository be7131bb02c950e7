import asyncio
from collections.abc import Callable

import pytest

import etude.agent.runner
from agent.scenes import FINISH, FIX, TEST, FragilePool, clamp_task, in_loop, price, real_pool
from agent.scripted_engine import ScriptedEngine
from agent.text_renderer import TextRenderer, spoken
from etude.agent.policy import ScriptedPolicy, TokenLimits, engine_policies, say
from etude.agent.recipe import AgentRecipe
from etude.agent.runner import Collect, Runner, together
from etude.errors import EngineError, RewardError, TaskError
from etude.protocols import Policy, SandboxPool
from etude.rewards.verify import collect
from etude.types import Episode, Evidence, Fault, Group, Outcome, Scored, Task, ToolCall

REPAIR = [say("", FIX, TEST), say("", FINISH)]
Script = Callable[[str], list]


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etude.agent.runner, "RETRY_WAIT_S", 0.001)


class Scene:
    """A runner over a pool that breaks as told; `policies` are those that were made."""

    def __init__(self, script: object = None, *, collect: Collect = collect, **settings: object) -> None:
        self.policies: dict[str, ScriptedPolicy] = {}
        self.seeds: dict[str, int] = {}
        self._script = script or REPAIR
        self._collect, self._settings = collect, settings
        self.pool: FragilePool
        self.runner: Runner

    def _make(self, *, task: Task, episode_id: str, seed: int, min_step: int | None) -> Policy:
        self.seeds[episode_id] = seed
        script = self._script
        self.policies[episode_id] = ScriptedPolicy(script(episode_id) if callable(script) else script)  # type: ignore[arg-type]
        return self.policies[episode_id]

    def play(self, size: int = 1, *, refuse: int = 0, die_at: dict[int, int] | None = None) -> Group:
        async def run() -> Group:
            inner = real_pool()
            self.pool = FragilePool(inner, refuse=refuse, die_at=die_at or {})
            self.runner = Runner(
                pool=self.pool,
                make_policy=self._make,
                collect=self._collect,
                score=price,
                **{"recipe": AgentRecipe(), **self._settings},  # type: ignore[arg-type]
            )
            return await self.runner.run_group("key", clamp_task(), size, min_step=0)

        group = in_loop(run())
        assert self.pool.open == 0, "a sandbox was left open"
        assert all(policy.is_closed for policy in self.policies.values())
        return group


def outcomes(group: Group) -> list[Outcome]:
    return [member.episode.outcome for member in group.members]


def test_a_group_holds_scored_siblings_in_order() -> None:
    scene = Scene(lambda name: REPAIR if name != "key-1" else [say("give up")])
    group = scene.play(3)
    assert [member.episode.episode_id for member in group.members] == ["key-0", "key-1", "key-2"]
    assert [member.reward.total for member in group.members] == [1.0, 0.0, 1.0]
    assert (group.key, group.task_id, group.faults) == ("key", clamp_task().task_id, ())
    assert set(group.members[0].episode.timings) == {"generate", "tools", "sandbox", "grade"}


def test_every_sibling_has_a_seed_of_its_own_that_follows_from_the_key() -> None:
    first, second, other = Scene(seed=1), Scene(seed=1), Scene(seed=2)
    for scene in (first, second, other):
        scene.play(2)
    assert first.seeds == second.seeds
    assert len({*first.seeds.values(), *other.seeds.values()}) == 4


def test_no_sandbox_is_a_fault_and_is_played_again() -> None:
    scene = Scene()
    group = scene.play(refuse=2)
    assert outcomes(group) == [Outcome.FINISHED]
    assert scene.runner.faults == {"sandbox": 2}


def test_a_fault_that_stays_is_a_missing_member_never_a_zero() -> None:
    scene = Scene(infra_retries=1)
    group = scene.play(2, refuse=1000)
    assert group.members == ()
    assert [fault.boundary for fault in group.faults] == ["sandbox", "sandbox"]
    assert scene.runner.faults == {"sandbox": 4}


def test_a_sandbox_that_was_dead_before_the_first_action_is_played_again() -> None:
    scene = Scene()
    group = scene.play(die_at={0: 0})
    assert outcomes(group) == [Outcome.FINISHED]
    assert group.members[0].episode.episode_id == "key-0-retry1"
    assert group.members[0].evidence.solved


def test_a_sandbox_that_dies_after_the_first_action_is_scored_zero_and_not_played_again() -> None:
    scene = Scene()
    group = scene.play(die_at={0: 3})
    (member,) = group.members
    assert (member.episode.outcome, member.reward.total, group.faults) == (Outcome.SANDBOX_DIED, 0.0, ())
    assert "sandbox died" in member.evidence.detail
    assert list(scene.policies) == ["key-0"]


@pytest.mark.parametrize(
    "attack",
    [
        "import os\nos.kill(-1, 9)\n",
        pytest.param(
            "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
            marks=pytest.mark.slow,
        ),
        "import os, signal\n[os.kill(pid, 9) for pid in range(1, 200) if pid != os.getpid()]\n",
        pytest.param("hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))\n", marks=pytest.mark.slow),
        "import os\nos.rename('solution.py', 'moved')\nos.mkdir('solution.py')\nopen('solution.py/x', 'w').close()\n",
        "import os\n[os.close(fd) for fd in range(64)]\nos._exit(0)\n",
    ],
    ids=["kill all", "fork bomb", "kill each", "memory", "file to folder", "close channels"],
)
def test_an_agent_cannot_pass_for_a_broken_machine(attack: str) -> None:
    edit = ToolCall(
        name="edit_file", arguments={"path": "solution.py", "old": "def clamp", "new": f"{attack}def clamp"}
    )
    scene = Scene([say("", edit, TEST), say("", FINISH)], recipe=AgentRecipe(tool_timeout_s=5.0))
    group = scene.play()
    assert group.faults == ()
    assert scene.runner.faults == {}
    assert [member.reward.total for member in group.members] == [0.0]


def test_host_evidence_turns_a_dead_sandbox_into_a_fault() -> None:
    evidence = iter(["the host ran out of memory", None])
    scene = Scene(host_evidence=lambda: next(evidence))
    group = scene.play(die_at={0: 3, 1: 3})
    assert outcomes(group) == [Outcome.SANDBOX_DIED]
    assert group.members[0].episode.episode_id == "key-0-retry1"
    assert scene.runner.faults == {"sandbox": 1}


def test_a_host_that_gives_no_fresh_sandbox_either_is_the_culprit() -> None:
    scene = Scene()
    group = scene.play(die_at={0: 3, 1: 0})  # number 1 would prove that the host is well
    assert outcomes(group) == [Outcome.FINISHED]
    assert group.members[0].evidence.solved
    assert scene.runner.faults == {"sandbox": 1}


def test_an_engine_fault_is_played_again_in_a_fresh_sandbox() -> None:
    engine = ScriptedEngine(
        [spoken("", FIX), spoken("half a reply"), spoken("", FIX), spoken("done")], errors={1: EngineError("gone")}
    )

    async def run() -> tuple[Scored | Fault, int]:
        inner = real_pool()
        pool = FragilePool(inner)
        limits = TokenLimits(context_tokens=4000, reply_tokens=1000)
        runner = Runner(
            pool=pool,
            make_policy=engine_policies(engine, lambda task: TextRenderer(), limits),
            recipe=AgentRecipe(),
            collect=collect,
            score=price,
        )
        return await runner.run_one("key", clamp_task(), 0), pool.open

    result, left_open = in_loop(run())
    assert isinstance(result, Scored)
    assert result.evidence.solved
    assert [turn.text for turn in result.episode.turns] == ["", "done"]
    assert left_open == 0
    assert engine.forgotten == ["key-0", "key-0-retry1"]


def test_grading_that_breaks_is_done_again_and_the_episode_is_kept() -> None:
    tries = []

    async def shaky(task: Task, episode: Episode, pool: SandboxPool) -> Evidence:
        tries.append(episode.episode_id)
        if len(tries) < 3:
            raise RewardError("the grader broke")
        return await collect(task, episode, pool)

    scene = Scene(collect=shaky)
    group = scene.play()
    assert group.members[0].evidence.solved
    assert tries == ["key-0"] * 3
    assert scene.runner.faults == {}


def test_grading_that_stays_broken_is_a_reward_fault() -> None:
    async def broken(task: Task, episode: Episode, pool: SandboxPool) -> Evidence:
        raise RewardError("the grader broke")

    scene = Scene(collect=broken)
    group = scene.play()
    assert group.members == ()
    assert [fault.boundary for fault in group.faults] == ["reward"]
    assert "the grader broke" in group.faults[0].message
    assert list(scene.policies) == ["key-0"]


def test_no_more_episodes_run_at_once_than_the_recipe_allows() -> None:
    running = most = 0

    async def slow(task: Task, episode: Episode, pool: SandboxPool) -> Evidence:
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        running -= 1
        return Evidence(task_id=task.task_id, episode_id=episode.episode_id, passed=(True,), detail="", wall_s=0)

    group = Scene([say("stop")], collect=slow, recipe=AgentRecipe(max_episodes=2)).play(6)
    assert len(group.members) == 6
    assert most == 2


def test_cancelling_closes_every_sandbox_and_policy() -> None:
    class Stuck(ScriptedPolicy):
        async def reply(self, conversation):  # type: ignore[no-untyped-def]
            await asyncio.sleep(60)

    policies: list[Stuck] = []

    def make(*, task: Task, episode_id: str, seed: int, min_step: int | None) -> Policy:
        policies.append(Stuck([]))
        return policies[-1]

    async def run() -> int:
        inner = real_pool()
        pool = FragilePool(inner)
        runner = Runner(pool=pool, make_policy=make, recipe=AgentRecipe(), collect=collect, score=price)
        play = asyncio.create_task(runner.run_group("key", clamp_task(), 4))
        while len(policies) < 4:
            await asyncio.sleep(0.01)
        play.cancel()
        with pytest.raises(asyncio.CancelledError):
            await play
        return pool.open

    assert in_loop(run()) == 0
    assert all(policy.is_closed for policy in policies)


def test_a_bug_in_one_job_cancels_the_others_and_is_raised_as_it_is() -> None:
    ended = []

    async def buggy() -> None:
        raise ZeroDivisionError

    async def patient() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("patient")

    with pytest.raises(ZeroDivisionError):
        in_loop(together([patient(), buggy()]))
    assert ended == ["patient"]


def test_a_task_that_cannot_be_laid_out_is_named() -> None:
    async def run() -> None:
        pool = real_pool()
        runner = Runner(
            pool=pool,
            make_policy=lambda **_: ScriptedPolicy([]),
            recipe=AgentRecipe(),
            collect=collect,
            score=price,
        )
        await runner.run_one("key", clamp_task(workspace={"../outside.py": "x"}), 0)

    with pytest.raises(TaskError, match="cannot be laid out"):
        in_loop(run())
