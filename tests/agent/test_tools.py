import logging
from collections.abc import Mapping

import pytest

from agent.scenes import BROKEN, FINISH, FIX, READ, TEST, FragilePool, clamp_task, in_loop, real_pool
from etude.agent.tool import Desk, Tool, schema
from etude.agent.toolbox import Toolbox
from etude.agent.tools import TOOLS
from etude.errors import SandboxError
from etude.types import Task, ToolCall, ToolErrorKind, ToolResult

ALL = ("read_file", "edit_file", "run_tests", "finish")


def answers(
    *calls: ToolCall,
    task: Task | None = None,
    names: tuple[str, ...] = ALL,
    output_chars: int = 1000,
    files: Mapping[str, bytes] | None = None,
    strict: tuple[str, ...] = ALL,
) -> list[ToolResult]:
    """What a toolbox answers to calls made one after the other in one sandbox."""

    async def run() -> list[ToolResult]:
        the_task = task or clamp_task()
        pool = real_pool()
        sandbox = await pool.acquire(the_task.workspace)
        for path, data in (files or {}).items():
            await sandbox.write_file(path, data)
        try:
            box = Toolbox(names, Desk(task=the_task, sandbox=sandbox), output_chars=output_chars, strict=strict)
            return [await box.answer(call) for call in calls]
        finally:
            await sandbox.close()

    return in_loop(run())


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def test_read_file_shows_numbered_lines() -> None:
    assert answers(READ) == [ToolResult(text="1\tdef clamp(x, low, high):\n2\t    return max(low, max(x, high))\n")]


def test_an_edit_changes_the_file_and_says_ok() -> None:
    edited, shown = answers(FIX, READ)
    assert edited == ToolResult(text="ok")
    assert "min(x, high)" in shown.text


def test_run_tests_shows_the_first_visible_failure_then_ok() -> None:
    before, _, after = answers(TEST, FIX, TEST)
    assert before == ToolResult(text="clamp(7, 0, 5) -> 7, expected 5\n2 of 2 fail", passed=False)
    assert after == ToolResult(text="ok", passed=True)


def test_hidden_checks_never_show() -> None:
    spoil = call("edit_file", path="solution.py", old="max(low, max(x, high))", new="min(x, high)")
    _, result = answers(spoil, TEST)
    assert result == ToolResult(text="ok", passed=True)


def test_a_tool_that_is_not_strict_takes_digits_and_leaves_out_what_it_does_not_know() -> None:
    lax = call("edit_file", path="solution.py", old="max(x, high)", new="x", line="2", why="because")
    assert answers(lax, strict=()) == [ToolResult(text="ok")]
    (refused,) = answers(lax)
    assert refused.error is ToolErrorKind.INVALID_ARGUMENTS


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (call("shell", command="ls"), "error: no tool 'shell'; tools: read_file, edit_file, run_tests, finish"),
        (call("read_file"), "error: read_file needs path"),
        (call("read_file", path="a", depth=1), "error: read_file has no argument 'depth'"),
        (call("read_file", path=3), "error: path must be text"),
        (call("read_file", path=""), "error: path is not the name of a file"),
        (call("read_file", path="a\0b"), "error: path is not the name of a file"),
        (call("edit_file", path="solution.py", old="a", new="b", line="two"), "error: line must be a number"),
        (call("edit_file", path="solution.py", old="a", new="b", line=True), "error: line must be a number"),
        (call("edit_file", path="solution.py", old="a", new="b", line=1.0), "error: line must be a number"),
        (call("edit_file", path="solution.py", old="a", new="b", line="²"), "error: line must be a number"),
        (call("run_tests", verbose=True), "error: run_tests has no argument 'verbose'"),
        (call("edit_file", path="solution.py", old="def", new="\ud800"), "error: new is not valid text"),
        (ToolCall(name="edit_file", arguments={}, error="too few arguments"), "error: too few arguments"),
    ],
)
def test_a_malformed_call_is_answered_with_what_is_wrong(wrong: ToolCall, text: str) -> None:
    assert answers(wrong) == [ToolResult(text=text, error=ToolErrorKind.INVALID_ARGUMENTS)]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (call("read_file", path="nothing.py"), "error: no such file"),
        (call("read_file", path="/etc/hostname"), "error: not allowed"),
        (call("read_file", path="../outside"), "error: not allowed"),
        (call("read_file", path="binary"), "error: binary is not text"),
        (call("edit_file", path="solution.py", old="zzz", new="y"), "error: old does not occur in the file"),
    ],
)
def test_a_call_that_the_workspace_contradicts_is_answered_with_what_is_there(wrong: ToolCall, text: str) -> None:
    (result,) = answers(wrong, files={"binary": b"\xff\xfe\x00"})
    assert result == ToolResult(text=text, error=ToolErrorKind.UNEXPECTED_ENVIRONMENT)


def test_a_tool_that_the_recipe_leaves_out_is_unknown() -> None:
    (result,) = answers(TEST, names=("read_file", "finish"))
    assert result.text == "error: no tool 'run_tests'; tools: read_file, finish"


def test_long_answers_are_cut_and_say_how_much() -> None:
    (result,) = answers(READ, output_chars=100, task=clamp_task(workspace={"solution.py": "x = 1\n" * 100}))
    assert result.text.startswith("1\tx = 1\n2\tx")
    assert result.text.endswith("\n(792 characters cut)")


def test_a_task_without_visible_tests_says_so() -> None:
    task = clamp_task()
    spec = task.verifier
    hidden = Task.make(
        prompt="p",
        workspace=task.workspace,
        verifier=type(spec)(path=spec.path, checks=spec.checks[2:]),
        category="repair",
        source={},
    )
    (result,) = answers(TEST, task=hidden)
    assert result == ToolResult(
        text="error: this task has no visible tests", error=ToolErrorKind.UNEXPECTED_ENVIRONMENT
    )


def test_a_bug_in_a_tool_becomes_an_unknown_error_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(Tool):
        """Breaks."""

        name = "buggy"

        async def run(self) -> str:
            raise ZeroDivisionError

    try:
        with caplog.at_level(logging.ERROR):
            (result,) = answers(call("buggy"), names=("buggy",))
    finally:
        del Tool.registry["buggy"]
    assert result == ToolResult(text="error: the tool broke", error=ToolErrorKind.UNKNOWN)
    assert "ZeroDivisionError" in caplog.text


def test_a_broken_sandbox_is_raised_for_the_loop_to_judge() -> None:
    async def run() -> None:
        inner = real_pool()
        sandbox = await FragilePool(inner, die_at={0: 0}).acquire({"solution.py": BROKEN})
        try:
            await Toolbox(ALL, Desk(task=clamp_task(), sandbox=sandbox), output_chars=1000).answer(READ)
        finally:
            await sandbox.close()

    with pytest.raises(SandboxError):
        in_loop(run())


def test_finish_can_be_barred_until_the_tests_have_passed() -> None:
    async def run() -> tuple[list[ToolResult], list[bool]]:
        pool = real_pool()
        sandbox = await pool.acquire({"solution.py": BROKEN})
        desk = Desk(task=clamp_task(), sandbox=sandbox, finish_needs_pass=True)
        box = Toolbox(ALL, desk, output_chars=1000)
        results, states = [], []
        for each in (FINISH, FIX, FINISH, TEST, FINISH):
            results.append(await box.answer(each))
            states.append(desk.is_finished)
        await sandbox.close()
        return results, states

    results, states = in_loop(run())
    refused = ToolResult(text="error: run_tests has not passed yet", error=ToolErrorKind.UNEXPECTED_ENVIRONMENT)
    assert results[0] == results[2] == refused
    assert states == [False, False, False, False, True]


def test_the_schema_follows_from_the_signature() -> None:
    assert schema(TOOLS["read_file"]) == {
        "name": "read_file",
        "description": "Show a file with line numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "start": {"type": "integer", "description": "counted from 1, included"},
                "end": {"type": "integer", "description": "counted from 1, included"},
            },
            "required": ["path"],
            "additionalProperties": False,
        },
    }
    edits = schema(TOOLS["edit_file"])["parameters"]["properties"]["edits"]
    assert edits["items"]["required"] == ["old", "new"]
    assert "$ref" not in str([schema(tool) for tool in TOOLS.values()])
