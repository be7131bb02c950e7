"""The model of benchmarks/harness.py: a script behind an OpenAI-compatible address, in a process of its own.

    python benchmarks/harness_server.py LATENCY_S TASKS     prints its address, then serves until it is killed

Which answer comes next follows from the request alone: the task from its mark, the place in the script from the number
of replies so far, the tools from what the harness offers. Every answer is sent LATENCY_S after the request's first
byte, later only if the machine is busy. GET /v1/log hands out, and forgets, when each request came and when its answer
was sent: what a harness does not answer for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import time
from typing import Any

from harness_tasks import TURNS, Repository, replies, repositories

_MARK = re.compile(r"\[(task-\d\d)\]")
_USAGE = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050}
_AFTER_TESTS = {4: "FAILED", 7: "OK"}
"""Reply -> what the answer to the call before it must say: the tests failed before the edit and passed after it."""


class Script:
    """What is answered, and the log."""

    def __init__(self, tasks: list[Repository]) -> None:
        self._tasks = {task.mark: task for task in tasks}
        self._replies: dict[tuple[str, frozenset[str]], list[dict[str, Any]]] = {}
        self.log: list[dict[str, Any]] = []

    def answer(self, request: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
        """Mark, number and message of the reply."""
        messages = request["messages"]
        opening = next(str(message["content"]) for message in messages if message["role"] == "user")
        match = _MARK.search(opening)
        assert match is not None, opening
        number = sum(message["role"] == "assistant" for message in messages)
        tools = frozenset(tool["function"]["name"] for tool in request["tools"])
        key = (match[1], tools)
        if key not in self._replies:
            self._replies[key] = replies(self._tasks[match[1]], tools)
        wanted = _AFTER_TESTS.get(number, "")
        assert wanted in str(messages[-1]["content"]), f"{key[0]}: no {wanted} in {messages[-1]['content']}"
        return match[1], number, self._replies[key][min(number, TURNS - 1)]


def body_of(message: dict[str, Any], *, streams: bool) -> bytes:
    """A whole HTTP response."""
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    head = {"id": "c", "created": 1, "model": "script"}
    if not streams:
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return _http("application/json", json.dumps(
            {**head, "object": "chat.completion", "choices": [choice], "usage": _USAGE}).encode())  # fmt: skip
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", []))]
    deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": message["content"]}, None)]
    deltas += [({"tool_calls": [call]}, None) for call in calls]
    deltas.append(({}, finish))
    events: list[Any] = [
        {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
        for delta, end in deltas
    ]
    events.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": _USAGE})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return _http("text/event-stream", text.encode())


def _http(kind: str, body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def _serve(script: Script, latency_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while first := await reader.read(1):
            came = time.monotonic()
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if head.startswith("get"):
                script.log, log = [], script.log
                writer.write(_http("application/json", json.dumps(log).encode()))
                continue
            request = json.loads(body)
            try:
                mark, number, message = script.answer(request)
            except (AssertionError, KeyError, StopIteration) as error:
                writer.write(_http("text/plain", f"{type(error).__name__}: {error}".encode(), "400 Bad Request"))
                continue
            answer = body_of(message, streams=bool(request.get("stream")))
            await asyncio.sleep(came + latency_s - time.monotonic())
            writer.write(answer)
            await writer.drain()
            script.log.append({"task": mark, "number": number, "came": came, "sent": time.monotonic()})
    writer.close()


async def main() -> None:
    script = Script(repositories(int(sys.argv[2])))
    latency_s = float(sys.argv[1])
    server = await asyncio.start_server(lambda *ends: _serve(script, latency_s, *ends), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
