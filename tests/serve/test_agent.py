"""The agent endpoint: a scripted model repairs a file in a real sandbox; events, turns and windows come out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx2
import msgspec

from agent.scenes import BROKEN, FIXED, clamp_task, in_loop, real_pool
from agent.test_mcp import INSIDE
from etude.agent.mcp import Servers
from etude.agent.recipe import AgentRecipe, McpServer
from etude.serve.parts import make_server
from etude.serve.recipe import ServeRecipe
from etude.types import Task
from serve.speaking import MemoryRecorder, QwenChat, Speaker, calls, check_exact, keys_of, says, windows_of
from serve.test_server import ANN, BOB, Quota, bearer

TOOLS = ("read_file", "edit_file", "shell", "ask_user", "finish", "run_tests")
EDIT = calls("edit_file", "I repair it.", path="solution.py", old="max(x, high)", new="min(x, high)", line=2)


def work(
    script: Any,
    body: Callable[[httpx2.AsyncClient, Speaker, MemoryRecorder], Awaitable[None]],
    mcp: Mapping[str, McpServer] | None = None,
) -> None:
    async def run() -> None:
        engine, recorder = Speaker(script), MemoryRecorder()
        keys = keys_of(ann=(ANN, Quota()), bob=(BOB, Quota()))
        server = make_server(
            engine, QwenChat(), ServeRecipe(port=0, agent_sessions=2, consent="train"), name="qwen", recorder=recorder,
            keys=keys, pool=real_pool(), agent=AgentRecipe(tools=TOOLS, system="Repair."),
            servers=await Servers.describe(mcp or {}, real_pool()),
        )  # fmt: skip
        await server.start()
        async with httpx2.AsyncClient(base_url=server.url, timeout=60, headers=bearer("ann")) as client:
            await body(client, engine, recorder)
        await server.close()

    in_loop(run())


async def opened(client: httpx2.AsyncClient, **body: Any) -> str:
    got = await client.post("/v1/agent/sessions", json=body or {"files": {"solution.py": BROKEN}})
    assert got.status_code == 200, got.text
    return f"/v1/agent/sessions/{got.json()['id']}"


async def said(client: httpx2.AsyncClient, session: str, text: str) -> list[dict[str, Any]]:
    got = await client.post(f"{session}/messages", json={"text": text})
    assert got.status_code == 200, got.text
    return [json.loads(line[6:]) for line in got.text.splitlines() if line.startswith("data: ")]


def test_the_tools_of_an_mcp_server_are_offered_and_called_in_the_sandbox_of_the_session() -> None:
    async def body(client: httpx2.AsyncClient, engine: Speaker, recorder: MemoryRecorder) -> None:
        session = await opened(client, files={"note.txt": "from the workspace"})
        results = [event for event in await said(client, session, "Read it.") if event["type"] == "result"]
        assert [(result["text"], result["error"]) for result in results] == [("from the workspace", None)]
        assert (await client.delete(session)).status_code == 200

    work([calls("mcp__plain__read_note"), says("Done.")], body, mcp={"plain": INSIDE})


def test_the_agent_works_in_a_sandbox_and_its_turns_are_one_window() -> None:
    script = [calls("read_file", path="solution.py"), EDIT, says("Done."), calls("shell", command="cat solution.py"),
              says("It is as it should be.")]  # fmt: skip

    async def body(client: httpx2.AsyncClient, engine: Speaker, recorder: MemoryRecorder) -> None:
        session = await opened(client)
        events = await said(client, session, "Repair clamp.")
        kinds = [event["type"] for event in events if event["type"] != "text"]
        assert kinds == ["call", "result", "call", "result", "diff", "end"]
        assert "".join(event["text"] for event in events if event["type"] == "text") == "I repair it.Done."
        assert events[-1]["outcome"] == "stopped"
        (diff,) = (event["text"] for event in events if event["type"] == "diff")
        assert "+    return max(low, min(x, high))" in diff
        more = await said(client, session, "Show it.")
        assert any("min(x, high)" in event["text"] for event in more if event["type"] == "result")
        state = (await client.get(session)).json()
        assert state["files"] == {"solution.py": FIXED}
        check_exact(recorder.turns, engine, engine.answers)
        assert len(windows_of(recorder.turns)) == 1
        assert {turn.source for turn in recorder.turns} == {"agent"}
        assert recorder.turns[3].messages[-1].text == "Show it."
        assert (await client.get(session, headers=bearer("bob"))).status_code == 404
        assert (await client.delete(session)).json()["patch"] == state["patch"]
        assert (await client.get(session)).status_code == 404

    work(script, body)


def test_a_task_is_played_and_a_question_is_answered() -> None:
    script = [calls("ask_user", question="Sure?", options=["yes", "no"]), EDIT, calls("run_tests"),
              calls("finish", message="Repaired.")]  # fmt: skip

    async def body(client: httpx2.AsyncClient, engine: Speaker, recorder: MemoryRecorder) -> None:
        task: Task = clamp_task()
        session = await opened(client, task=json.loads(msgspec.json.encode(task)))
        playing = asyncio.create_task(said(client, session, ""))
        while (await client.post(f"{session}/answers", json={"text": "yes"})).status_code == 409:
            await asyncio.sleep(0.05)
        events = await playing
        assert events[-1]["outcome"] == "finished"
        assert [event["options"] for event in events if event["type"] == "question"] == [["yes", "no"]]
        assert [event["passed"] for event in events if event["type"] == "result"][2] is True
        assert [message.role for message in recorder.turns[0].messages] == ["system", "user"]

    work(script, body)


def test_what_is_wrong_is_refused_and_places_are_bounded() -> None:
    async def body(client: httpx2.AsyncClient, engine: Speaker, recorder: MemoryRecorder) -> None:
        for wrong in ({"tools": ["nothing"]}, {"files": {"../x": "y"}}, {"files": {"a": 1}}, {"other": 1}):
            got = await client.post("/v1/agent/sessions", json=wrong)
            assert got.status_code == 400, got.text
        task = json.loads(msgspec.json.encode(clamp_task()))
        got = await client.post("/v1/agent/sessions", json={"task": {**task, "tools": ["shel"]}})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "task.tools")
        got = await client.post("/v1/agent/sessions", json={"task": {**task, "tools": ["shell", "finish"]}})
        assert got.json()["tools"] == ["shell", "finish"]
        await client.delete(f"/v1/agent/sessions/{got.json()['id']}")
        first = await opened(client)
        await opened(client)
        full = await client.post("/v1/agent/sessions", json={})
        assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
        assert (await client.post(f"{first}/messages", json={"text": ""})).status_code == 400
        assert (await client.post("/v1/agent/sessions/x/messages", json={"text": "x"})).status_code == 404
        await client.delete(first)
        await opened(client)

    work([says("ok")], body)


def test_a_task_with_an_unknown_tool_is_refused_and_its_own_tools_are_those_that_the_model_sees() -> None:
    async def body(client: httpx2.AsyncClient, engine: Speaker, recorder: MemoryRecorder) -> None:
        for tools, status in (("nothing",), 400), (("read_file", "finish"), 200):
            task = msgspec.structs.replace(clamp_task(), tools=tools)
            got = await client.post("/v1/agent/sessions", json={"task": json.loads(msgspec.json.encode(task))})
            assert got.status_code == status, got.text
        assert got.json()["tools"] == ["read_file", "finish"]

    work([says("ok")], body)


def test_a_broken_call_is_answered_by_the_harness() -> None:
    from serve.speaking import spelled

    script = [spelled('<tool_call>\n{"name": "read_file", "arguments": {]}\n</tool_call>'), says("I see.")]

    async def body(client: httpx2.AsyncClient, engine: Speaker, recorder: MemoryRecorder) -> None:
        session = await opened(client)
        events = await said(client, session, "Go.")
        assert [event["error"] for event in events if event["type"] == "result"] == ["invalid_arguments"]
        assert len(windows_of(recorder.turns)) == 1

    work(script, body)
