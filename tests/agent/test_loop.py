from collections.abc import Sequence

import pytest

from agent.scenes import BROKEN, FINISH, FIX, FIXED, READ, SPOIL, TEST, FragilePool, clamp_task, in_loop, real_pool
from etude.agent.loop import changed_files, run_episode
from etude.agent.policy import ScriptedPolicy, say
from etude.agent.recipe import AgentRecipe
from etude.errors import EngineError
from etude.protocols import Message, Reply
from etude.types import Effort, Episode, Outcome, StopReason, Task, ToolCall, ToolErrorKind

BAD = ToolCall(name="edit_file", arguments={}, error="too few arguments")


def play(
    policy: ScriptedPolicy,
    recipe: AgentRecipe | None = None,
    *,
    task: Task | None = None,
    die_at: int | None = None,
    clock: Sequence[float] | None = None,
) -> Episode:
    async def run() -> Episode:
        the_task = task or clamp_task()
        inner = real_pool()
        pool = FragilePool(inner, die_at={} if die_at is None else {0: die_at})
        sandbox = await pool.acquire(the_task.workspace)
        try:
            times = {} if clock is None else {"clock": iter(clock).__next__}
            return await run_episode(the_task, sandbox, policy, recipe or AgentRecipe(), episode_id="e", **times)
        finally:
            await sandbox.close()

    return in_loop(run())


def test_a_repair_from_reading_to_finishing() -> None:
    policy = ScriptedPolicy([say("look", READ), say("", FIX, TEST), say("", FINISH)])
    episode = play(policy)
    assert episode.outcome is Outcome.FINISHED
    assert episode.fault is None
    assert dict(episode.files) == {"solution.py": FIXED}
    assert "+    return max(low, min(x, high))" in episode.patch
    assert [[result.text for result in turn.results] for turn in episode.turns] == [
        ["1\tdef clamp(x, low, high):\n2\t    return max(low, max(x, high))\n"],
        ["ok", "ok"],
        ["ok"],
    ]
    assert episode.turns[1].results[1].passed is True
    assert episode.effort == Effort(calls=4, turns=3)
    assert set(episode.timings) == {"generate", "tools"}
    assert episode.timings["tools"] > 0


def test_the_policy_sees_the_opening_and_then_its_replies_with_their_results() -> None:
    policy = ScriptedPolicy([say("look", READ), say("done")])
    play(policy)
    first, second = policy.seen
    assert [message.role for message in first] == ["user"]
    assert first[0].text.startswith("Repair clamp.\nsolution.py\n1\tdef clamp")
    assert second[:1] == first
    assert second[1] == Message(role="assistant", text="look", calls=(READ,))
    assert second[2].role == "tool"
    assert second[2].results[0].text.startswith("1\tdef clamp")


def test_a_turn_without_a_call_ends_the_episode() -> None:
    episode = play(ScriptedPolicy([say("I give up")]))
    assert episode.outcome is Outcome.STOPPED
    assert (episode.patch, dict(episode.files)) == ("", {})
    assert episode.turns[0].results == ()


def test_a_broken_call_is_answered_and_the_episode_goes_on() -> None:
    episode = play(ScriptedPolicy([say("", BAD), say("", FIX), say("", FINISH)]))
    assert episode.outcome is Outcome.FINISHED
    assert episode.turns[0].results[0].error is ToolErrorKind.INVALID_ARGUMENTS
    assert dict(episode.files) == {"solution.py": FIXED}


def test_an_episode_that_ends_on_a_broken_call_is_data() -> None:
    episode = play(ScriptedPolicy([say("", FIX), say("", BAD)]), AgentRecipe(max_turns=2))
    assert (episode.outcome, episode.fault) == (Outcome.TURN_LIMIT, None)
    assert dict(episode.files) == {"solution.py": FIXED}


def test_calls_after_finish_are_answered_but_not_carried_out() -> None:
    episode = play(ScriptedPolicy([say("", FINISH, FIX)]))
    assert episode.outcome is Outcome.FINISHED
    assert [result.error for result in episode.turns[0].results] == [None, ToolErrorKind.INVALID_ARGUMENTS]
    assert dict(episode.files) == {}
    assert episode.effort.calls == 1


@pytest.mark.parametrize(("recipe_turns", "task_turns"), [(3, 12), (12, 3)])
def test_the_lower_turn_limit_holds(recipe_turns: int, task_turns: int) -> None:
    episode = play(
        ScriptedPolicy(lambda conversation: say("", READ)),
        AgentRecipe(max_turns=recipe_turns),
        task=clamp_task(max_turns=task_turns),
    )
    assert (episode.outcome, len(episode.turns)) == (Outcome.TURN_LIMIT, 3)


def test_calls_beyond_the_limit_are_refused_uncounted_and_end_the_episode() -> None:
    episode = play(ScriptedPolicy([say("", READ), say("", READ, FIX, TEST)]), AgentRecipe(max_calls=2))
    assert episode.outcome is Outcome.TURN_LIMIT
    assert [result.error for result in episode.turns[1].results] == [
        None, ToolErrorKind.INVALID_ARGUMENTS, ToolErrorKind.INVALID_ARGUMENTS,
    ]  # fmt: skip
    assert episode.effort.calls == 2
    assert dict(episode.files) == {}


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.CONTEXT])
def test_nothing_of_a_reply_that_was_cut_is_carried_out(stop: StopReason) -> None:
    episode = play(ScriptedPolicy([say("", FIX, stop=stop)]))
    assert (episode.outcome, dict(episode.files), len(episode.turns)) == (Outcome.CONTEXT_LIMIT, {}, 1)


def test_no_room_for_a_reply_ends_the_episode_without_a_turn() -> None:
    full = Reply(text="", calls=(), stop=StopReason.CONTEXT, effort=Effort(), span=None)
    episode = play(ScriptedPolicy([say("", FIX), full]))
    assert (episode.outcome, len(episode.turns)) == (Outcome.CONTEXT_LIMIT, 1)
    assert dict(episode.files) == {"solution.py": FIXED}


def test_only_the_tools_time_counts_against_the_wall_limit() -> None:
    # clock: reply start and end, call start and end, turn end; the model takes 100 s, the call 7 s
    policy = ScriptedPolicy([say("", READ, FIX)])
    episode = play(policy, AgentRecipe(wall_s=5.0), clock=[0.0, 100.0, 100.0, 107.0, 107.0])
    assert episode.outcome is Outcome.TIME_LIMIT
    assert episode.timings == {"generate": 100.0, "tools": 7.0}
    assert dict(episode.files) == {}
    within = play(ScriptedPolicy([say("", READ)]), AgentRecipe(wall_s=50.0, max_turns=1), clock=[0, 100, 100, 107, 107])
    assert within.outcome is Outcome.TURN_LIMIT


def test_code_that_loops_forever_fails_its_checks_and_leaves_the_episode_whole() -> None:
    loop = ToolCall(
        name="edit_file",
        arguments={"path": "solution.py", "old": "    return", "new": "    while True: pass\n    return"},
    )
    episode = play(ScriptedPolicy([say("", loop, TEST), say("", FINISH)]), AgentRecipe(tool_timeout_s=5.0))
    assert episode.turns[0].results[1].text.startswith("clamp(7, 0, 5) -> timeout, expected 5")
    assert episode.outcome is Outcome.FINISHED


def test_a_sandbox_that_is_dead_before_the_first_action_is_a_fault() -> None:
    episode = play(ScriptedPolicy([say("", FIX)]), die_at=0)
    assert episode.outcome is Outcome.FAULT
    assert episode.fault is not None
    assert episode.fault.boundary == "sandbox"


@pytest.mark.parametrize("die_at", [1, 2, 3])
def test_a_sandbox_that_dies_from_the_first_action_on_is_the_agents_failure(die_at: int) -> None:
    episode = play(ScriptedPolicy([say("", FIX, TEST), say("", FINISH)]), die_at=die_at)
    assert (episode.outcome, episode.fault) == (Outcome.SANDBOX_DIED, None)
    assert (episode.patch, dict(episode.files)) == ("", {})


def test_a_sandbox_that_dies_while_its_files_are_read_is_the_agents_failure_too() -> None:
    policy = ScriptedPolicy([say("", READ), say("", FINISH)])
    episode = play(policy, die_at=2)  # probe, read_file, then list_files
    assert episode.outcome is Outcome.SANDBOX_DIED
    assert len(episode.turns) == 2


def test_an_engine_that_fails_is_a_fault_whatever_the_agent_did() -> None:
    def script(conversation: Sequence[Message]) -> Reply:
        if len(conversation) > 1:
            raise EngineError("the engine is gone")
        return say("", FIX)

    episode = play(ScriptedPolicy(script))
    assert episode.outcome is Outcome.FAULT
    assert episode.fault is not None
    assert episode.fault.boundary == "engine"


def test_the_control_bars_finishing_and_stopping_until_the_tests_pass() -> None:
    script = [say("I stop"), say("", FINISH), say("", SPOIL, TEST), say("", FINISH), say("bye")]
    barred = play(ScriptedPolicy(script), AgentRecipe(finish_needs_pass=True, max_turns=5))
    assert barred.outcome is Outcome.TURN_LIMIT
    assert barred.turns[0].results[0].text == "error: run_tests has not passed yet"
    repaired = play(
        ScriptedPolicy([say("", FINISH), say("", FIX, TEST), say("", FINISH)]), AgentRecipe(finish_needs_pass=True)
    )
    assert (repaired.outcome, len(repaired.turns)) == (Outcome.FINISHED, 3)


def test_files_that_code_made_are_kept_within_bounds_and_deleted_ones_are_seen() -> None:
    async def run() -> dict[str, str | None]:
        task = clamp_task(workspace={"solution.py": BROKEN, "gone.py": "x = 1\n"})
        pool = real_pool()
        sandbox = await pool.acquire(task.workspace)
        await sandbox.run_python(
            "import os\nos.remove('gone.py')\nopen('binary', 'wb').write(b'\\xff')\n"
            "os.makedirs('many')\n[open(f'many/{i}', 'w').write('z') for i in range(100)]\n"
            "open('solution.py', 'a').write('# edited')\nopen('large', 'w').write('z' * (1 << 21))\n",
            timeout_s=20.0,
        )
        try:
            return await changed_files(task, sandbox)
        finally:
            await sandbox.close()

    changed = in_loop(run())
    assert changed["solution.py"] == BROKEN + "# edited"
    assert changed["gone.py"] is None
    assert "binary" not in changed
    assert "large" not in changed
    assert len(changed) <= 64
