"""A scripted model server: speaks chat completions over HTTP as a real one does, and misbehaves when told to.

    async with chat_server([says("hello"), status(429), calls(("read_file", {"path": "a"}))]) as server: server.url

Each request takes the next entry of the script; after its end the last one repeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Entry:
    """One answer. `cuts`: the connection ends after so many events; `wait_s` before the first."""

    events: list[Any] = field(default_factory=list)
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    cuts: int | None = None
    wait_s: float = 0.0


USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }


def says(*parts: str, usage: Mapping[str, Any] = USAGE, finish: str = "stop", **more: Any) -> Entry:
    events = [*(chunk(content=part) for part in parts), chunk(finish), {"choices": [], "usage": usage}]
    return Entry(events, **more)


def calls(*wanted: tuple[str, Any], text: str = "", usage: Mapping[str, Any] = USAGE, **more: Any) -> Entry:
    """Tool calls (name, arguments); arguments that are text go out as they are, in pieces."""
    events = [chunk(content=text)] if text else []
    for number, (name, arguments) in enumerate(wanted):
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments)
        head = {"index": number, "id": f"id{number}", "type": "function", "function": {"name": name, "arguments": ""}}
        events.append(chunk(tool_calls=[head]))
        for start in range(0, len(spelled), 7):
            piece = {"index": number, "function": {"arguments": spelled[start : start + 7]}}
            events.append(chunk(tool_calls=[piece]))
    return Entry([*events, chunk("tool_calls"), {"choices": [], "usage": usage}], **more)


def status(code: int, headers: Mapping[str, str] | None = None, body: str = "busy") -> Entry:
    return Entry(status=code, headers=headers or {}, body=body)


@dataclass
class Server:
    """`url` and what was asked."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def chat_server(script: Sequence[Entry]) -> AsyncIterator[Server]:
    found = Server()
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
                fields = {name.lower(): value for name, value in fields.items()}
                found.keys.append(fields.get("authorization", ""))
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                found.requests.append(json.loads(body))
                await _answer(writer, script[min(len(found.requests), len(script)) - 1])
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield found
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _answer(writer: asyncio.StreamWriter, entry: Entry) -> None:
    await asyncio.sleep(entry.wait_s)
    heads = "".join(f"{name}: {value}\r\n" for name, value in entry.headers.items())
    if entry.status != 200:
        data = entry.body.encode()
        writer.write(f"HTTP/1.1 {entry.status} X\r\n{heads}content-length: {len(data)}\r\n\r\n".encode() + data)
        return await writer.drain()
    writer.write(
        f"HTTP/1.1 200 OK\r\n{heads}content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    )
    for number, event in enumerate([*entry.events, "[DONE]"]):
        if number == entry.cuts:
            writer.transport.abort()
            raise ConnectionResetError
        text = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    return await writer.drain()
