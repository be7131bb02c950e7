import msgspec
import pytest

from agent.scenes import clamp_task
from etude.agent.policy import task_renderers
from etude.agent.recipe import AgentRecipe
from etude.config import convert
from etude.errors import RecipeError, TaskError


def test_the_quickstart_table_loads() -> None:
    table = {
        "tools": ["read_file", "edit_file", "run_tests", "finish"],
        "context_tokens": 1024,
        "max_turns": 12,
        "max_episodes": 160,
    }
    assert convert(table, AgentRecipe, where="quickstart") == AgentRecipe()


def test_an_unknown_tool_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError) as caught:
        AgentRecipe(tools=("run_test",))
    assert caught.value.message == "agent.tools: unknown tool 'run_test'"
    assert caught.value.hint == "did you mean run_tests?"


@pytest.mark.parametrize(
    "settings",
    [
        {"tools": ()},
        {"tools": ("finish", "finish")},
        {"tools": ("read_file", "finish"), "finish_needs_pass": True},
        {"context_tokens": 0},
        {"max_turns": 0},
        {"max_calls": 0},
        {"max_episodes": 0},
        {"reply_tokens": 0},
        {"wall_s": 0.0},
        {"tool_timeout_s": float("nan")},
        {"tool_output_chars": 10},
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_load(settings: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=r"agent\."):
        AgentRecipe(**settings)  # type: ignore[arg-type]


def test_a_task_of_its_own_tools_is_told_of_those_and_unknown_ones_are_named() -> None:
    told: list[list[str]] = []
    of = task_renderers(
        lambda schemas: told.append([one["name"] for one in schemas]), AgentRecipe(), [{"name": "mcp__a__b"}]
    )  # type: ignore[func-returns-value, arg-type]
    plain = clamp_task()
    own = msgspec.structs.replace(plain, tools=("shell", "finish"), strict=("shell",))
    for task in (plain, own, plain, own):
        of(task)
    assert told == [["read_file", "edit_file", "run_tests", "finish", "mcp__a__b"], ["shell", "finish", "mcp__a__b"]]
    assert AgentRecipe().for_task(own).strict == ("shell",)
    with pytest.raises(TaskError) as caught:
        of(msgspec.structs.replace(plain, tools=("shel",)))
    assert caught.value.message == f"task {plain.task_id}: agent.tools: unknown tool 'shel'"
    assert caught.value.hint == "did you mean shell?"
