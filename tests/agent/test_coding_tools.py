"""The tools of a coding agent in a real sandbox: files, patches, search, a shell that lives on, jobs, lints, people."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import pytest

from agent.scenes import clamp_task, in_loop, real_pool
from etude.agent.tool import Desk, Found, ProviderError, Tool, UserAbortedError
from etude.agent.toolbox import Toolbox
from etude.agent.tools import TOOLS
from etude.types import ToolCall, ToolErrorKind, ToolResult

FILES = {
    "a.py": "import os\n\ndef first():\n    return 1\n\ndef second():\n    return 2\n",
    "src/deep/b.py": "VALUE = 1  # TODO\n",
    "src/c.txt": "todo: nothing\n",
}


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def answers(*calls: ToolCall, files: Mapping[str, str] = FILES, **desk: object) -> list[ToolResult]:
    """Of all tools, one call after the other, in one sandbox."""

    async def run() -> list[ToolResult]:
        sandbox = await real_pool().acquire(files)
        try:
            box = Toolbox(tuple(TOOLS), Desk(task=clamp_task(), sandbox=sandbox, **desk), output_chars=2000)  # type: ignore[arg-type]
            return [await box.answer(one) for one in calls]
        finally:
            await sandbox.close()

    return in_loop(run())


def texts(*calls: ToolCall, **more: object) -> list[str]:
    return [result.text for result in answers(*calls, **more)]  # type: ignore[arg-type]


def test_a_range_of_lines_keeps_their_numbers() -> None:
    shown, rest, beyond = answers(
        call("read_file", path="a.py", start=3, end=4),
        call("read_file", path="a.py", start=6),
        call("read_file", path="a.py", start=9),
    )
    assert shown.text == "3\tdef first():\n4\t    return 1\n"
    assert rest.text == "6\tdef second():\n7\t    return 2\n"
    assert beyond == ToolResult(text="error: no lines 9 to None: a.py has 7", error=ToolErrorKind.INVALID_ARGUMENTS)


def test_a_file_is_made_and_several_edits_are_all_made_or_none() -> None:
    made, edited, shown, refused, same = texts(
        call("edit_file", path="new/file.py", old="", new="x = 1\ny = 2\n"),
        call("edit_file", path="new/file.py", edits=[{"old": "1", "new": "3"}, {"old": "y", "new": "z", "line": 2}]),
        call("read_file", path="new/file.py"),
        call("edit_file", path="new/file.py", edits=[{"old": "3", "new": "4"}, {"old": "q", "new": "z"}]),
        call("read_file", path="new/file.py"),
    )
    assert (made, edited) == ("ok", "ok")
    assert shown == same == "1\tx = 3\n2\tz = 2\n"
    assert refused == "error: edit 2: old does not occur in the file"


@pytest.mark.parametrize(
    "wrong", [{}, {"old": "a"}, {"edits": []}, {"old": "a", "new": "b", "edits": [{"old": "a", "new": "b"}]}]
)
def test_an_edit_that_says_too_little_or_too_much_is_refused(wrong: dict[str, object]) -> None:
    (result,) = answers(call("edit_file", path="a.py", **wrong))
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS


def test_a_patch_changes_makes_moves_and_deletes_files() -> None:
    patch = """*** Begin Patch
*** Update File: a.py
@@ def second():
-    return 2
+    return 20
*** Add File: made.py
+one = 1
*** Update File: src/deep/b.py
*** Move to: src/b.py
@@
-VALUE = 1  # TODO
+VALUE = 2
*** Delete File: src/c.txt
*** End Patch"""
    done, listing, a, b = texts(
        call("apply_patch", patch=patch), call("glob", pattern="**/*"), call("read_file", path="a.py", start=7),
        call("read_file", path="src/b.py"),
    )  # fmt: skip
    assert done.splitlines() == ["M a.py", "A made.py", "D src/deep/b.py", "A src/b.py", "D src/c.txt"]
    assert listing.split() == ["a.py", "made.py", "src/b.py"]
    assert (a, b) == ("7\t    return 20\n", "1\tVALUE = 2\n")


def test_a_patch_that_does_not_fit_changes_nothing() -> None:
    patch = "--- a/a.py\n+++ b/a.py\n@@ -4 +4 @@\n-    return 1\n+    return 5\n"
    patch += "--- a/src/c.txt\n+++ b/src/c.txt\n@@ -1 +1 @@\n-x\n+y\n"
    refused, same = answers(call("apply_patch", patch=patch), call("grep", pattern="return 5"))
    assert refused.error is ToolErrorKind.UNEXPECTED_ENVIRONMENT
    assert refused.text.startswith("error: src/c.txt: hunk 1 does not fit")
    assert same.text == "no match"


def test_folders_and_patterns_and_matches_are_shown() -> None:
    top, deep, missing, globbed, found, folded, only, none = texts(
        call("list_dir"), call("list_dir", path="src"), call("list_dir", path="nowhere"), call("glob", pattern="*.py"),
        call("grep", pattern="return [12]"), call("grep", pattern="todo", ignore_case=True),
        call("grep", pattern="todo", ignore_case=True, glob="*.py"), call("grep", pattern="zebra"),
    )  # fmt: skip
    assert (top.split(), deep.split()) == (["a.py", "src/"], ["c.txt", "deep/"])
    assert missing == "error: no folder nowhere"
    assert globbed.split() == ["a.py", "src/deep/b.py"]
    assert found == "a.py:4:    return 1\na.py:7:    return 2\n"
    assert sorted(folded.splitlines()) == ["src/c.txt:1:todo: nothing", "src/deep/b.py:1:VALUE = 1  # TODO"]
    assert only == "src/deep/b.py:1:VALUE = 1  # TODO\n"
    assert none == "no match"


def test_a_pattern_that_is_none_is_an_error_for_the_model() -> None:
    (result,) = answers(call("grep", pattern="(unclosed"))
    assert result.error is ToolErrorKind.INVALID_ARGUMENTS
    assert "regex" in result.text


def test_a_shell_keeps_its_folder_variables_functions_and_exports() -> None:
    found = texts(
        call("shell", command="cd src && X='a  b' && export Y=2 && greet() { echo hi $1; } && arr=(1 2 3)"),
        call("shell", command='pwd; echo "$X" $Y ${arr[2]}; greet you; env | grep ^Y='),
        call("shell", command="false"),
        call("shell", command="echo err >&2; exit 3"),
        call("shell", command="pwd"),
    )
    assert found == [
        "",
        "/workspace/src\na  b 2 3\nhi you\nY=2\n",
        "(exit code 1)",
        "err\n(exit code 3)",
        "/workspace/src\n",
    ]


def test_a_shell_keeps_values_of_several_lines_but_no_read_only_ones_and_no_stray_output() -> None:
    found = texts(
        call("shell", command="A=$'one\\n#declared\\ntwo' && readonly B=1 && alias up='cd ..' && mkdir -p 'new dir'"),
        call("shell", command="{ echo pwd >&3; } 2>/dev/null; cd 'new dir'"),
        call("shell", command='echo "$A" "[$B]"; alias; basename "$PWD"; cat'),
        call("shell", command="trap 'echo bye' EXIT; C=3"),
        call("shell", command='echo "[$C]"; basename "$PWD"'),
    )
    assert found == [
        "",
        "",
        "one\n#declared\ntwo []\nalias up='cd ..'\nnew dir\n",
        "bye\n",
        "[]\nnew dir\n",
    ]


def test_a_shell_keeps_options_both_ways_and_what_is_written_with_them() -> None:
    found = texts(
        call("shell", command="shopt -s extglob expand_aliases; shopt -u sourcepath; alias one='echo 1'"),
        call("shell", command="pick() { case $1 in @(a|b)) echo yes;; *) echo no;; esac; }; shopt -u expand_aliases"),
        call("shell", command="shopt extglob sourcepath expand_aliases; pick a; pick c; A=1; shopt -s expand_aliases"),
        call("shell", command="one; shopt -p | grep -c .; OPTIND=3; RANDOM=7"),
        call("shell", command="shopt -q sourcepath || echo $OPTIND $A"),
    )
    assert found[2].split() == ["extglob", "on", "sourcepath", "off", "expand_aliases", "off", "yes", "no"]
    assert found[3].split()[0] == "1"
    assert found[4] == "3 1\n"


def test_a_command_that_takes_too_long_is_killed_and_the_shell_goes_on_as_it_was() -> None:
    late, after = answers(
        call("shell", command="cd src; echo begun; sleep 30", timeout_s=0.5), call("shell", command="pwd")
    )
    assert late == ToolResult(text="error: killed after 0.5 s; it wrote:\nbegun\n", error=ToolErrorKind.TIMEOUT)
    assert after.text == "/workspace\n"


def test_a_long_answer_of_the_shell_loses_its_middle() -> None:
    (result,) = answers(call("shell", command="seq 1 5000"))
    assert result.text.startswith("1\n2\n3\n")
    assert result.text.endswith("4999\n5000\n")
    assert "characters cut)" in result.text


def test_a_background_job_is_shown_while_it_runs_lives_on_and_is_killed() -> None:
    async def run() -> list[str]:
        sandbox = await real_pool().acquire(FILES)
        box = Toolbox(tuple(TOOLS), Desk(task=clamp_task(), sandbox=sandbox), output_chars=2000)

        async def say(name: str, **arguments: object) -> str:
            return (await box.answer(call(name, **arguments))).text

        found = [await say("shell", command="export N=7")]
        found.append(await say("shell", command="echo $N; sleep 0.3; echo later; sleep 60", background=True))
        found.append(await say("shell", command="echo quick; exit 4", background=True))
        await say("run_tests")  # ends all that it started, and nothing else
        await asyncio.sleep(0.8)
        found += [await say("shell_output", job=1), await say("shell_output", job=2)]
        found += [await say("shell_kill", job=1), await say("shell_output", job=1), await say("shell_output", job=9)]
        await sandbox.close()
        return found

    assert in_loop(run()) == [
        "", "job 1 is running", "job 2 is running", "7\nlater\n(running)", "quick\n(ended with exit code 4)",
        "ok", "7\nlater\n(ended with exit code killed)", "error: no job 9: 2 were started",
    ]  # fmt: skip


def test_lints_come_from_the_projects_own_linter_or_from_the_syntax() -> None:
    broken = {"bad.py": "def f(:\n", "good.py": "x = 1\n"}
    (syntax,) = texts(call("read_lints"), files=broken)
    assert "bad.py:1" in syntax
    assert "good.py" not in syntax
    (own,) = texts(call("read_lints", paths=["good.py"]), files=broken, lint_command="wc -c")
    assert own == "6 good.py\n"
    (gone,) = answers(call("read_lints"), files=broken, lint_command="no-such-linter")
    assert gone == ToolResult(
        text="error: no-such-linter is not installed in the sandbox", error=ToolErrorKind.UNEXPECTED_ENVIRONMENT
    )


def test_the_list_of_things_to_do_is_shown_as_it_was_written() -> None:
    todos = [{"text": "read", "status": "done"}, {"text": "edit", "status": "in_progress"}, {"text": "test"}]
    shown, wrong = answers(
        call("todo_write", todos=todos), call("todo_write", todos=[{"text": "a", "status": "maybe"}])
    )
    assert shown.text == "[x] read\n[>] edit\n[ ] test\n"
    assert wrong.error is ToolErrorKind.INVALID_ARGUMENTS


def test_a_question_reaches_the_user_who_may_refuse_and_nobody_is_an_answer_too() -> None:
    async def ask(question: str, options: Sequence[str]) -> str:
        if question == "stop?":
            raise UserAbortedError("no, do it otherwise")
        return f"{question}: {options[1]}"

    answered, refused = answers(
        call("ask_user", question="which", options=["a", "b"]), call("ask_user", question="stop?"), ask=ask
    )
    assert answered == ToolResult(text="which: b")
    assert refused == ToolResult(text="error: no, do it otherwise", error=ToolErrorKind.USER_ABORTED)
    (alone,) = answers(call("ask_user", question="which"))
    assert alone.error is ToolErrorKind.UNEXPECTED_ENVIRONMENT


def test_a_search_asks_its_backend_whose_failure_is_the_providers() -> None:
    async def search(query: str) -> Sequence[Found]:
        if query == "down":
            raise ProviderError("the search answered 503")
        return [Found(title="T", url="https://x.example", text=query)]

    found, down, off = (*answers(call("web_search", query="q"), call("web_search", query="down"), search=search),
                        *answers(call("web_search", query="q")))  # fmt: skip
    assert found.text == "T\nhttps://x.example\nq\n"
    assert (down.error, off.error) == (ToolErrorKind.PROVIDER_ERROR, ToolErrorKind.PROVIDER_ERROR)


def test_calls_that_only_read_run_side_by_side_and_a_failing_one_loses_none() -> None:
    class Wait(Tool):
        """Waits on the host."""

        name = "wait"
        only_reads = True

        async def run(self, seconds: float, fails: bool = False) -> str:
            await asyncio.sleep(seconds)
            if fails:
                raise ZeroDivisionError
            return f"{seconds:g}"

    async def run() -> tuple[list[list[str]], list[str], float]:
        sandbox = await real_pool().acquire(FILES)
        box = Toolbox(("read_file", "edit_file", "wait"), Desk(task=clamp_task(), sandbox=sandbox), output_chars=2000)
        calls = [call("wait", seconds=0.3), call("wait", seconds=0.1, fails=True), call("wait", seconds=0.2)]
        turn = [
            *calls,
            call("edit_file", path="a.py", old="1", new="5"),
            call("read_file", path="a.py", start=4, end=4),
        ]
        groups = [[one.name for one in group] for group in box.together(turn)]
        started = time.monotonic()
        results = [result.text for group in box.together(turn) for result in await box.answer_all(group)]
        elapsed = time.monotonic() - started
        await sandbox.close()
        return groups, results, elapsed

    try:
        groups, results, elapsed = in_loop(run())
    finally:
        del Tool.registry["wait"]
    assert groups == [["wait", "wait", "wait"], ["edit_file"], ["read_file"]]
    assert results == ["0.3", "error: the tool broke", "0.2", "ok", "4\t    return 5\n"]
    assert elapsed < 0.55
