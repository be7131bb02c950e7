import pytest

from agent.scenes import FINISH, FIX, SPOIL, TEST, FragilePool, clamp_task, in_loop, real_pool
from agent.scripted_engine import V1, ScriptedEngine
from agent.text_renderer import TextRenderer, spoken
from etude.agent.recipe import AgentRecipe
from etude.bench.recipe import EvalRecipe
from etude.bench.suite import SuiteResult, run_suite
from etude.errors import EngineError
from etude.protocols import EngineStats, GenerateRequest
from etude.rewards.recipe import RewardRecipe
from etude.types import Outcome, Scored, Task, Version

TASKS = [
    clamp_task(package="one"),
    clamp_task(workspace={"solution.py": "def clamp(x, low, high): 0\n"}, package="two"),
]


def always(*replies: list[int]) -> ScriptedEngine:
    """Says the same in every episode."""

    def answer(request: GenerateRequest) -> list[int]:
        return replies[min(int(request.request_id.rpartition("/")[2]), len(replies) - 1)]

    return ScriptedEngine(answer)


REPAIRS = always(spoken("", FIX, TEST), spoken("", FINISH))


def measure(
    engine: ScriptedEngine,
    tasks: list[Task] = TASKS,
    *,
    refuse: int = 0,
    evaluation: EvalRecipe | None = None,
    **settings: object,
) -> SuiteResult:
    async def run() -> SuiteResult:
        inner = real_pool()
        pool = FragilePool(inner, refuse=refuse)
        result = await run_suite(
            tasks,
            label="before",
            engine=engine,
            renderer_of=lambda task: TextRenderer(),
            pool=pool,
            agent=AgentRecipe(context_tokens=4000, reply_tokens=1000),
            evaluation=evaluation or EvalRecipe(k=2, token_budget=1000),
            reward=RewardRecipe(),
            **settings,  # type: ignore[arg-type]
        )
        assert pool.open == 0
        return result

    return in_loop(run())


def test_every_task_gets_k_attempts_with_their_numbers() -> None:
    seen: list[tuple[int, int, int]] = []
    episodes: list[tuple[int, Scored]] = []
    result = measure(
        REPAIRS,
        progress=lambda done, total, solved: seen.append((done, total, solved)),
        on_episode=lambda number, scored: episodes.append((number, scored)),
    )
    first, second = result.tasks
    assert (first.task_id, first.cluster, first.num_solved, first.lost) == (TASKS[0].task_id, "one", 2, 0)
    assert (second.cluster, second.num_solved) == ("two", 0)
    attempt = first.attempts[0]
    assert (attempt.calls, attempt.turns, attempt.outcome) == (3, 2, Outcome.FINISHED)
    assert attempt.sampled_tokens == len(spoken("", FIX, TEST)) + len(spoken("", FINISH))
    assert 0.9 < attempt.reward < 1.0
    assert attempt.patch_digest == first.attempts[1].patch_digest
    assert attempt.patch_digest != second.attempts[0].patch_digest
    assert [row[:2] for row in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert seen[-1][2] == 2
    assert sorted(number for number, _ in episodes) == [0, 0, 1, 1]
    assert (result.label, result.version, result.k, result.token_budget) == ("before", V1, 2, 1000)


def test_the_token_budget_ends_an_attempt_and_what_it_left_is_graded() -> None:
    budget = len(spoken("", FIX, TEST)) + 5
    result = measure(REPAIRS, TASKS[:1], evaluation=EvalRecipe(k=1, token_budget=budget))
    (attempt,) = result.tasks[0].attempts
    assert (attempt.sampled_tokens, attempt.outcome, attempt.solved) == (budget, Outcome.CONTEXT_LIMIT, True)


def test_seeds_depend_on_recipe_task_and_attempt_alone() -> None:
    def seeds(seed: int, label_of_order: list[Task]) -> dict[str, int | None]:
        engine = always(spoken("stop"))
        measure(engine, label_of_order, evaluation=EvalRecipe(k=2, seed=seed))
        return {request.context_id: request.seed for request in engine.requests}

    first = seeds(0, TASKS)
    assert first == seeds(0, TASKS[::-1])
    assert len(set(first.values())) == 4
    assert set(first.values()).isdisjoint(seeds(1, TASKS).values())


def test_only_the_version_asked_for_is_measured() -> None:
    engine = always(spoken("stop"))
    measure(engine, TASKS[:1])
    assert {request.exact for request in engine.requests} == {V1}
    other = Version(incarnation=2, n=1, step=9)
    result = measure(always(spoken("stop")), TASKS[:1], version=other, infra_retries=0)
    assert (result.tasks[0].attempts, result.tasks[0].lost) == ((), 2)


def test_attempts_that_broken_machines_lost_are_counted_not_scored() -> None:
    result = measure(REPAIRS, TASKS[:1], refuse=1, infra_retries=0)
    assert (len(result.tasks[0].attempts), result.tasks[0].lost) == (1, 1)


def test_the_control_keeps_an_attempt_going_until_the_tests_pass() -> None:
    hasty = always(spoken("", FINISH), spoken("", SPOIL, TEST), spoken("", FINISH))
    free = measure(hasty, TASKS[:1])
    barred = measure(hasty, TASKS[:1], finish_needs_pass=True, evaluation=EvalRecipe(k=2, token_budget=300))
    assert {attempt.turns for attempt in free.tasks[0].attempts} == {1}
    assert {attempt.outcome for attempt in barred.tasks[0].attempts} == {Outcome.CONTEXT_LIMIT}
    assert barred.finish_needs_pass


def test_an_engine_without_a_version_is_refused() -> None:
    class Empty(ScriptedEngine):
        async def stats(self) -> EngineStats:
            return EngineStats(
                version=None, running=0, waiting=0, prefilled_tokens=0, reused_tokens=0, stale_reused_tokens=0,
                sampled_tokens=0, swaps=0, swap_pause_s=0.0, busy_s=0.0,
            )  # fmt: skip

    with pytest.raises(EngineError, match="no version"):
        measure(Empty([]))
