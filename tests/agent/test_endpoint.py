"""EndpointPolicy against a scripted server over real HTTP: what comes back, what is tried again, what it costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence

import pytest

from agent.chat_server import Entry, Server, calls, chat_server, chunk, says, status
from agent.scenes import FIX, clamp_task, in_loop, real_pool
from etude.agent.endpoint import Endpoint, EndpointPolicy, Price
from etude.agent.loop import run_episode
from etude.agent.recipe import AgentRecipe
from etude.agent.tool import schema
from etude.agent.tools import TOOLS
from etude.errors import EngineError
from etude.frames import encode
from etude.protocols import Message, Reply
from etude.types import Outcome, StopReason, ToolCall, ToolErrorKind, ToolResult

HELLO = (Message(role="system", text="be brief"), Message(role="user", text="hi"))


def replies(
    script: Sequence[Entry], conversation: Sequence[Message] = HELLO, turns: int = 1, **fields: object
) -> tuple[list[Reply], Server, EndpointPolicy]:
    async def run() -> tuple[list[Reply], Server, EndpointPolicy]:
        async with chat_server(script) as server:
            endpoint = Endpoint(url=server.url, model="m", **{"first_wait_s": 0.01, **fields})  # type: ignore[arg-type]
            policy = EndpointPolicy(endpoint, [schema(TOOLS["read_file"])])
            try:
                return [await policy.reply(conversation) for _ in range(turns)], server, policy
            finally:
                await policy.close()

    return asyncio.run(run())


def test_text_streams_in_and_is_counted() -> None:
    (reply,), server, policy = replies([says("hel", "lo")], key="secret", temperature=0.3, max_tokens=50)
    assert (reply.text, reply.calls, reply.stop, reply.span) == ("hello", (), StopReason.END, None)
    assert (reply.effort.message_tokens, reply.effort.call_tokens, reply.effort.turns) == (10, 0, 1)
    request = server.requests[0]
    assert request["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (request["model"], request["temperature"], request["max_tokens"], request["stream"]) == ("m", 0.3, 50, True)
    assert request["tools"][0]["function"]["name"] == "read_file"
    assert server.keys == ["Bearer secret"]
    assert (policy.usage.input_tokens, policy.usage.cached_tokens, policy.usage.output_tokens) == (100, 40, 10)
    assert policy.contexts() == ()


def test_half_characters_never_reach_an_episode() -> None:
    """JSON may hold them, and a pair may come in two events."""
    script = [
        says("a\ud83d", "\ude00b", "\ud800", usage={}),
        calls(("grep", '{"pattern": "\\ud800"}'), ("gr\ud800", {})),
    ]
    (text, called), *_ = replies(script, turns=2)
    assert text.text == "a\U0001f600b\ufffd"
    assert [call.error is None for call in called.calls] == [False, True]
    encode((text.text, called.calls))


def test_calls_come_in_pieces_and_broken_ones_are_data() -> None:
    script = [calls(("read_file", {"path": "a.py"}), ("edit_file", '{"path": "a", "old'), ("grep", "[1]"), text="look")]
    (reply,), _, _ = replies(script)
    assert reply.text == "look"
    assert reply.calls == (
        ToolCall(name="read_file", arguments={"path": "a.py"}),
        ToolCall(name="edit_file", arguments={}, error="the arguments are not valid JSON"),
        ToolCall(name="grep", arguments={}, error="the arguments are not an object"),
    )
    assert reply.effort.call_tokens == 10


def test_the_conversation_goes_back_with_calls_and_results_joined_by_id() -> None:
    conversation = (
        *HELLO,
        Message(role="assistant", text="", calls=(FIX,)),
        Message(role="tool", results=(ToolResult(text="ok"),)),
        Message(role="assistant", text="done?"),
        Message(role="tool", results=(ToolResult(text="error: not yet"),)),
    )
    _, server, _ = replies([says("x")], conversation)
    _, _, asked, answered, said, barred = server.requests[0]["messages"]
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert (answered["role"], answered["content"], said["content"]) == ("tool", "ok", "done?")
    assert barred == {"role": "user", "content": "error: not yet"}


@pytest.mark.parametrize(
    "trouble",
    [status(429, {"retry-after": "0"}), status(503), says("half", "cut", cuts=1), Entry([chunk(content="no end")]),
     Entry(["{not json"]), Entry([{"error": {"message": "overloaded"}}]), status(429, {"retry-after": "Wed, 1 Jan"})],
)  # fmt: skip
def test_what_a_server_gets_over_is_asked_again(trouble: Entry) -> None:
    (reply,), server, policy = replies([trouble, says("fine")])
    assert reply.text == "fine"
    assert (len(server.requests), policy.usage.retries, policy.usage.requests) == (2, 1, 1)


@pytest.mark.parametrize(("code", "hint"), [(400, "log"), (401, "key"), (404, "log")])
def test_what_a_server_refuses_is_an_error_with_its_words(code: int, hint: str) -> None:
    with pytest.raises(EngineError, match="refused the request") as caught:
        replies([status(code, body="no such model")])
    assert caught.value.cause == f"{code}: no such model"
    assert hint in (caught.value.hint or "")


def test_a_server_that_stays_down_is_an_error_that_says_so() -> None:
    with pytest.raises(EngineError, match="gave no answer in 3 tries") as caught:
        replies([status(500, body="broken")], tries=3)
    assert caught.value.cause == "500: broken"
    dead = Endpoint(url="http://127.0.0.1:9/v1", model="m", tries=2, first_wait_s=0.01)

    async def ask() -> None:
        policy = EndpointPolicy(dead, [])
        try:
            await policy.reply(HELLO)
        finally:
            await policy.close()

    with pytest.raises(EngineError, match="gave no answer"):
        asyncio.run(ask())


def test_a_budget_ends_the_episode_and_costs_follow_the_prices() -> None:
    price = Price(input=10.0, cached=1.0, output=100.0)  # 60 * 10 + 40 * 1 + 10 * 100 = 1,640 millionths a reply
    found, server, policy = replies([says("a")], turns=3, price=price, budget=0.003)
    assert [reply.effort.turns for reply in found] == [1, 1, 0]
    assert found[2].stop is StopReason.CONTEXT
    assert policy.usage.cost == pytest.approx(2 * 0.00164)
    assert len(server.requests) == 2


def test_thinking_is_counted_apart() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 30, "completion_tokens_details": {"reasoning_tokens": 20}}
    (reply,), _, _ = replies([says("x", usage=usage)])
    assert (reply.effort.thinking_tokens, reply.effort.message_tokens) == (20, 10)


def test_an_endpoint_plays_a_whole_episode_in_a_real_sandbox() -> None:
    script = [
        calls(("read_file", {"path": "solution.py"})),
        calls(("edit_file", dict(FIX.arguments))),
        calls(("run_tests", {}), ("shell", {"command": "ls"})),
        calls(("finish", {"message": "repaired"})),
    ]

    async def play() -> None:
        async with chat_server(script) as server:
            recipe = AgentRecipe(tools=("read_file", "edit_file", "run_tests", "shell", "finish"), max_turns=8)
            policy = EndpointPolicy(Endpoint(url=server.url, model="m"), [schema(TOOLS[one]) for one in recipe.tools])
            sandbox = await real_pool().acquire(clamp_task().workspace)
            episode = await run_episode(clamp_task(), sandbox, policy, recipe, episode_id="e")
            await sandbox.close()
            await policy.close()
            assert episode.outcome is Outcome.FINISHED
            assert "min(x, high)" in episode.patch
            assert [result.passed for result in episode.turns[2].results] == [True, None]
            assert episode.turns[2].results[1].text == "solution.py\n"
            assert episode.contexts == ()

    in_loop(play())


def test_a_server_that_fails_is_a_fault_and_an_unknown_tool_is_data() -> None:
    async def play(script: Sequence[Entry]) -> tuple[Outcome, list[ToolErrorKind | None]]:
        async with chat_server(script) as server:
            policy = EndpointPolicy(Endpoint(url=server.url, model="m", tries=1), [])
            sandbox = await real_pool().acquire(clamp_task().workspace)
            episode = await run_episode(clamp_task(), sandbox, policy, AgentRecipe(), episode_id="e")
            await sandbox.close()
            await policy.close()
            return episode.outcome, [result.error for turn in episode.turns for result in turn.results]

    assert in_loop(play([status(500)])) == (Outcome.FAULT, [])
    assert in_loop(play([calls(("fly", {})), says("bye")])) == (Outcome.STOPPED, [ToolErrorKind.INVALID_ARGUMENTS])


def test_no_torch_is_loaded() -> None:
    code = "import sys, etude.agent.endpoint; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
