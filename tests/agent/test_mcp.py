"""MCP servers: inside the sandbox and trusted, from a plain script and from the official package; what goes wrong."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.scenes import clamp_task, in_loop, price, real_pool
from etude.agent.mcp import Servers
from etude.agent.policy import ScriptedPolicy, say
from etude.agent.recipe import AgentRecipe, McpServer
from etude.agent.runner import Runner
from etude.agent.tool import Desk
from etude.agent.toolbox import Toolbox
from etude.config import convert
from etude.errors import RecipeError
from etude.protocols import Sandbox
from etude.rewards.verify import collect
from etude.types import Scored, Task, ToolCall, ToolErrorKind, ToolResult

SCRIPT = Path(__file__).parent / "mcp_server.py"
INSIDE = McpServer(command=("python3", "-c", SCRIPT.read_text()), env={"GREETING": "hello"})
TRUSTED = McpServer(command=(sys.executable, str(SCRIPT), "sdk"), trusted=True)


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=f"mcp__{name}", arguments=arguments)


def play(servers: Mapping[str, McpServer], *calls: ToolCall, timeout_s: float = 10.0) -> list[ToolResult]:
    """Answers to calls in one episode's sandbox."""

    async def run() -> list[ToolResult]:
        known = await Servers.describe(servers, real_pool())
        sandbox = await real_pool().acquire({"note.txt": "from the workspace"})
        try:
            async with known.tools(sandbox) as extra:
                desk = Desk(task=clamp_task(), sandbox=sandbox, timeout_s=timeout_s)
                box = Toolbox(("read_file", "shell"), desk, output_chars=100_000, extra=extra)
                return [await box.answer(one) for one in calls]
        finally:
            await sandbox.close()

    return in_loop(run())


def test_a_server_in_the_sandbox_sees_the_workspace_and_lives_from_call_to_call() -> None:
    calls = call("plain__add", a=2, b=3), call("plain__read_note"), call("plain__who"), call("plain__who")
    added, note, first, second = play({"plain": INSIDE}, *calls)
    assert (added.text, added.error) == ("5", None)
    assert note.text == "from the workspace"
    assert first.text == second.text
    assert json.loads(first.text)["env"] == "hello"


def test_other_tools_and_the_server_do_not_disturb_each_other() -> None:
    answers = play(
        {"plain": INSIDE},
        call("plain__who"),
        ToolCall(name="shell", arguments={"command": "echo changed > note.txt"}),
        call("plain__read_note"),
        ToolCall(name="read_file", arguments={"path": "note.txt"}),
        call("plain__who"),
    )
    assert answers[2].text == "changed\n"
    assert answers[0].text == answers[4].text


def test_a_server_may_ask_and_talk_while_it_is_asked() -> None:
    pinged, chatted = play({"plain": INSIDE}, call("plain__ping_back"), call("plain__chatter", count=2000))
    assert pinged.text == "from-server {}"
    assert chatted.text == "said it"


def test_what_a_server_does_wrong_is_an_error_of_its_kind_and_the_next_call_works() -> None:
    answers = play(
        {"plain": INSIDE},
        call("plain__fail"),
        call("plain__add", a=1),
        call("plain__crash"),
        call("plain__add", a=1, b=1),
        call("plain__image"),
        call("plain__nothing"),
    )
    kinds = [answer.error for answer in answers]
    wrong, environment = ToolErrorKind.INVALID_ARGUMENTS, ToolErrorKind.UNEXPECTED_ENVIRONMENT
    assert kinds == [environment, wrong, environment, None, None, wrong]
    assert answers[0].text == "error: it cannot be done"
    assert "missing" in answers[1].text
    assert "it burns" in answers[2].text
    assert answers[3].text == "2"
    assert "image" in answers[4].text


def test_a_call_that_takes_too_long_is_given_up_and_the_sandbox_goes_on() -> None:
    began = time.monotonic()
    echo = ToolCall(name="shell", arguments={"command": "echo alive"})
    slow, after, *more = play({"plain": INSIDE}, call("plain__slow", seconds=30), *[echo] * 12, timeout_s=1.5)
    assert slow.error is ToolErrorKind.TIMEOUT
    assert after.text == "alive\n"
    assert {answer.text for answer in more} == {"alive\n"}
    assert time.monotonic() - began < 15


def test_a_trusted_server_of_the_official_package_runs_here_and_ends_with_the_episode() -> None:
    answers = play({"official": TRUSTED}, call("official__multiply", a=6, b=7), call("official__multiply", a="six"))
    assert answers[0].text == "42"
    assert answers[1].error is not None
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and str(SCRIPT) in _command(pid)]
    assert left == []


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_server_in_the_sandbox_reaches_neither_network_nor_host() -> None:
    spy = McpServer(command=("python3", "-c", SCRIPT.read_text().replace(
        '"pid": os.getpid()', f'"home": os.path.exists({str(Path(__file__))!r}), "net": os.listdir("/sys/class/net")'
        ' if os.path.exists("/sys/class/net") else [], "pid": os.getpid()')))  # fmt: skip
    (seen,) = play({"spy": spy}, call("spy__who"))
    found = json.loads(seen.text)
    assert found["home"] is False
    assert set(found["net"]) <= {"lo"}
    assert found["pid"] < 1000


def test_only_the_tools_that_were_chosen_are_offered() -> None:
    chosen = McpServer(command=INSIDE.command, tools=("add",))
    known = in_loop(Servers.describe({"plain": chosen}, real_pool()))
    (schema,) = known.schemas()
    assert schema["name"] == "mcp__plain__add"
    assert schema["parameters"]["properties"]["a"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (McpServer(command=("no-such-program",)), "no-such-program"),
        (McpServer(command=("python3", "-c", "import sys; sys.exit('no key')")), "no key"),
        (McpServer(command=("python3", "-c", "print('hi'); print('{' * 5000); input()")), "plain"),
        (McpServer(command=INSIDE.command, tools=("absent",)), "absent"),
        (McpServer(command=("no-such-program",), trusted=True), "no-such-program"),
    ],
)
def test_a_server_that_does_not_answer_is_named_before_any_episode(server: McpServer, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        in_loop(Servers.describe({"plain": server}, real_pool()))
    assert "agent.mcp.plain" in str(caught.value)
    assert words in f"{caught.value} {caught.value.cause}"


def test_an_episode_calls_a_server_and_many_at_once_have_one_each() -> None:
    async def run() -> list[object]:
        servers = await Servers.describe({"plain": INSIDE}, real_pool())
        script = [say("", call("plain__who")), say("", call("plain__add", a=1, b=2)), say("done")]

        def policy(*, task: Task, episode_id: str, seed: int, min_step: int | None) -> ScriptedPolicy:
            return ScriptedPolicy(script)

        runner = Runner(
            pool=real_pool(), make_policy=policy, recipe=AgentRecipe(), collect=collect, score=price, servers=servers
        )
        return list(await asyncio.gather(*(runner.run_one("key", clamp_task(), number) for number in range(4))))

    for result in in_loop(run()):
        assert isinstance(result, Scored)
        answers = [answer for turn in result.episode.turns for answer in turn.results]
        assert [answer.error for answer in answers] == [None, None]
        assert answers[1].text == "3"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"Bad Name": {"command": ["x"]}}, "not a name"),
        ({"empty": {"command": []}}, "is empty"),
        ({"typo": {"command": ["x"], "trust": True}}, "trust"),
    ],
)
def test_a_wrong_table_is_refused_with_its_name(table: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        convert({"mcp": table}, AgentRecipe, where="agent")


def test_a_hostile_relay_is_an_error_not_an_exception() -> None:
    """Code in the sandbox takes the relay's place and answers with rubbish."""

    async def run() -> list[ToolResult]:
        servers = await Servers.describe({"plain": INSIDE}, real_pool())
        sandbox = await real_pool().acquire({})
        try:
            async with servers.tools(sandbox) as extra:
                desk = Desk(task=clamp_task(), sandbox=sandbox, timeout_s=2.0)
                box = Toolbox(("shell",), desk, output_chars=1000, extra=extra)
                return [await _usurped(box, sandbox, rubbish) for rubbish in RUBBISH]
        finally:
            await sandbox.close()

    for answer in in_loop(run()):
        assert answer.error in (ToolErrorKind.UNEXPECTED_ENVIRONMENT, ToolErrorKind.TIMEOUT)


RUBBISH = (
    "rubbish",
    "[" * 20_000,
    '{"alive": true}',
    '{"alive": false, "more": false, "why": {}}\n7\nnull\n[]\n{}\n',
    '{"alive": false, "more": true, "why": "x"}\n{"jsonrpc": "2.0", "id": 99, "result": {}}\n',
)


async def _usurped(box: Toolbox, sandbox: Sandbox, rubbish: str) -> ToolResult:
    await box.answer(call("plain__who"))
    program = f"""
import os, socket
os.remove("/tmp/.mcp/plain")
relay = socket.socket(socket.AF_UNIX); relay.bind("/tmp/.mcp/plain"); relay.listen()
while True:
    caller, _ = relay.accept(); caller.recv(1 << 20); caller.sendall({rubbish!r}.encode() + b"\\n"); caller.close()
"""
    await sandbox.write_file("usurp.py", program.encode())
    await sandbox.exec(["sh", "-c", "setsid python3 usurp.py > /dev/null 2>&1 < /dev/null & sleep 0.3"], timeout_s=5,
                       leaves=True)  # fmt: skip
    return await box.answer(call("plain__who"))
