"""A stdio MCP server inside a sandbox, as the `mcp` package's client wants it: a transport of two streams.

    Client --stream--> pump --run_python, one exchange--> relay --pipe--> server          (inside_relay.py)

The pump hands over what the client says and waits for answers only while some are outstanding, each time for a little
while, so that a call that is given up frees the sandbox soon. What comes back is text of nobody trusted: a line that is
no message is dropped, and sizes are bounded by the sandbox's own limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter

from etude.errors import SandboxError
from etude.protocols import Sandbox

_RELAY = (Path(__file__).parent / "inside_relay.py").read_text(encoding="utf-8")
_FOLDER = "/tmp/.mcp"
_WAIT_S = 0.5
"""So long an exchange waits for the server before it gives the sandbox back."""
_START_S = 10.0
_MAX_MESSAGE = 4 << 20
"""Bytes."""
_EXCHANGE = """
import json, socket, sys, time
address, question, wait_s = json.loads(sys.stdin.readline())
until = time.monotonic() + wait_s
while True:
    try:
        relay = socket.socket(socket.AF_UNIX)
        relay.connect(address)
        break
    except OSError:
        if time.monotonic() > until:
            raise SystemExit("the server's relay is not there")
        time.sleep(0.005)
with relay:
    relay.sendall(json.dumps(question).encode() + b"\\n")
    with open(3, "wb") as out:
        while part := relay.recv(1 << 16):
            out.write(part)
"""


class ServerGoneError(Exception):
    """The server has ended, or never began; its last words are the text."""


class SandboxServer:
    """One server in one sandbox. `failure` says why it is gone."""

    def __init__(self, sandbox: Sandbox, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._sandbox, self._command, self._env = sandbox, list(command), dict(env)
        self._address = f"{_FOLDER}/{name}"
        self._rest = b""
        """The beginning of a line."""
        self.failure = ""

    async def start(self) -> None:
        """Errors: SandboxError, ServerGoneError."""
        found = await self._sandbox.run_python(
            f"import os, sys; os.makedirs({_FOLDER!r}, exist_ok=True); sys.stdout.write(sys.executable)",
            timeout_s=_START_S,
        )
        inner = [found.stdout.decode(), "-c", _RELAY, self._address, json.dumps(self._command), json.dumps(self._env)]
        command = ["sh", "-c", 'rm -f "$1"; shift; setsid "$@" > /dev/null 2>&1 < /dev/null &', "sh", self._address]
        await self._sandbox.exec([*command, *inner], timeout_s=_START_S, leaves=True)

    @contextlib.asynccontextmanager
    async def transport(self) -> AsyncIterator[Any]:
        """The client's (read, write) streams. Errors are the client's: its read stream closes."""
        to_client, client_reads = anyio.create_memory_object_stream[Any](64)
        client_writes, from_client = anyio.create_memory_object_stream[Any](64)
        pump = asyncio.create_task(self._pump(from_client, to_client))
        try:
            yield client_reads, client_writes
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
            for stream in (to_client, client_reads, client_writes, from_client):
                stream.close()

    async def _pump(self, from_client: Any, to_client: Any) -> None:
        from mcp.shared.message import SessionMessage

        outstanding: set[Any] = set()
        asked = False
        """Whether the server waits for an answer of ours."""
        try:
            while True:
                sent = [] if outstanding and not asked else [(await from_client.receive()).message]
                with contextlib.suppress(anyio.WouldBlock):
                    while True:
                        sent.append(from_client.receive_nowait().message)
                outstanding |= {message.id for message in sent if isinstance(message, JSONRPCRequest)}
                outstanding -= {given_up for message in sent if (given_up := _given_up(message)) is not None}
                asked = False
                for message in await self._exchange(sent, waits=bool(outstanding)):
                    asked = asked or isinstance(message, JSONRPCRequest)
                    if isinstance(message, JSONRPCResponse | JSONRPCError):
                        outstanding.discard(message.id)
                    await to_client.send(SessionMessage(message))
        except (SandboxError, ServerGoneError) as error:
            self.failure = str(error) or "the server ended"
            await to_client.aclose()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the client has gone

    async def _exchange(self, sent: Sequence[Any], *, waits: bool) -> list[Any]:
        """What the server said meanwhile. Errors: SandboxError, ServerGoneError."""
        lines = [message.model_dump_json(by_alias=True, exclude_unset=True) for message in sent]
        found: list[Any] = []
        while True:
            alive, more, why = await self._ask_relay(lines, _WAIT_S if waits else 0.0)
            *whole, self._rest = self._rest.split(b"\n")
            found += [message for line in whole if (message := _message(line)) is not None]
            if not alive and not more and not found:
                raise ServerGoneError(why or "it ended")
            if len(self._rest) > _MAX_MESSAGE:
                raise ServerGoneError("it sent a message that is too long")
            if not more or found:
                return found
            lines, waits = [], False

    async def _ask_relay(self, lines: Sequence[str], wait_s: float) -> tuple[bool, bool, str]:
        """One question; what the server wrote goes to `_rest`. -> (it is alive, there is more, its last words)."""
        question = [self._address, {"send": lines, "wait_s": wait_s}, _START_S]
        data = json.dumps(question).encode() + b"\n"
        done = await self._sandbox.run_python(_EXCHANGE, stdin=data, timeout_s=_START_S + wait_s)
        head, _, piece = done.result.partition(b"\n")
        try:
            answer = json.loads(head)
            found = bool(answer["alive"]), bool(answer["more"]), str(answer["why"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ServerGoneError(done.stderr.decode(errors="replace").strip()[-400:] or "no answer") from None
        if done.truncated:
            raise ServerGoneError("it wrote more than sandbox.output_kb allows")
        self._rest += piece
        return found


def _given_up(message: Any) -> Any:
    """The id of the request that the client no longer waits for, if the message says so."""
    is_cancel = isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled"
    return (message.params or {}).get("requestId") if is_cancel else None


def _message(line: bytes) -> Any:
    """None for what is no message."""
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        return None
