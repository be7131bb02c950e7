"""Tools of MCP servers (the Model Context Protocol, through its official package), beside the agent's own.

    recipe: agent.mcp.NAME = { command = ["uvx", "server"] }
    Servers.describe: each server once, in a sandbox of its own -> names and schemas, for the chat format
    Servers.tools(sandbox): per episode; a server starts with the first call, inside the episode's sandbox

A server runs inside the sandbox, with the workspace and without a network, unless the recipe trusts it: then it is a
process of this machine, with all rights of the person who runs Etude. Its tools are called mcp__SERVER__TOOL.

Results are text for the model. The package's check of structured results against the server's own schema is left out:
a pattern that comes out of a sandbox could keep this process busy for as long as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from etude.agent.recipe import McpServer
from etude.agent.tool import Desk, MakeTool, ProviderError, Tool, ToolError
from etude.errors import RecipeError, SandboxError
from etude.protocols import Sandbox, SandboxPool
from etude.types import ToolErrorKind, ToolResult

if TYPE_CHECKING:
    from etude.agent.mcp_sandbox import SandboxServer

MAX_TOOLS, MAX_SCHEMA_BYTES = 128, 64 << 10
"""Of one server; more would fill the window of any model."""
_START_S = 20.0


class Described(msgspec.Struct, frozen=True):
    """A tool as its server describes it."""

    server: str
    tool: str
    text: str
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        return f"mcp__{self.server}__{self.tool}"

    def schema(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.text, "parameters": self.parameters}


class Servers:
    """The servers of a recipe, described. `tools` gives one episode's own."""

    def __init__(self, servers: Mapping[str, McpServer], described: Sequence[Described]) -> None:
        self._servers, self._described = servers, tuple(described)

    @classmethod
    async def describe(cls, servers: Mapping[str, McpServer], pool: SandboxPool) -> Servers:
        """Start each server once and ask for its tools. Errors: RecipeError naming the server, SandboxError."""
        if servers and importlib.util.find_spec("mcp") is None:
            raise RecipeError("agent.mcp needs the package mcp", hint="pip install 'etude-rl[mcp]'")
        described: list[Described] = []
        for name, server in servers.items():
            sandbox = None if server.trusted else await pool.acquire({})
            connection = _Connection(name, server, sandbox)
            try:
                described += await connection.list_tools()
            except ToolError as error:
                raise RecipeError(
                    f"agent.mcp.{name}: the server does not answer", cause=str(error),
                    hint=f"it runs as {server.command!r}" + ("" if server.trusted else ", inside the sandbox"),
                ) from error  # fmt: skip
            finally:
                await connection.close()
                if sandbox is not None:
                    await sandbox.close()
        return cls(servers, described)

    def schemas(self) -> list[dict[str, Any]]:
        return [one.schema() for one in self._described]

    @contextlib.asynccontextmanager
    async def tools(self, sandbox: Sandbox) -> AsyncIterator[Mapping[str, MakeTool]]:
        """The tools of an episode in `sandbox`; its connections end with the block."""
        connections = {name: _Connection(name, server, sandbox) for name, server in self._servers.items()}
        try:
            yield {one.name: functools.partial(McpTool, one, connections[one.server]) for one in self._described}
        finally:
            for connection in connections.values():
                await connection.close()


class McpTool(Tool):
    """A server's tool. Its arguments are the server's to check."""

    cuts_middle = True

    def __init__(self, described: Described, connection: _Connection, desk: Desk) -> None:
        super().__init__(desk)
        self._described, self._connection = described, connection

    def checked(self, arguments: Mapping[str, object], *, strict: bool) -> dict[str, object]:
        return {"arguments": dict(arguments)}

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._connection.call(self._described.tool, arguments, self.desk.timeout_s)


class _Connection:
    """A server and its client, which lives in a task of its own: the package's scopes must end where they began."""

    def __init__(self, name: str, server: McpServer, sandbox: Sandbox | None) -> None:
        self._name, self._server, self._sandbox = name, server, sandbox
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._session: asyncio.Future[Any] | None = None
        self._inside: SandboxServer | None = None

    async def list_tools(self) -> list[Described]:
        """Errors: ToolError, SandboxError."""
        import mcp_types

        found: list[Described] = []
        cursor = None
        while len(found) <= MAX_TOOLS:
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            page = await self._ask(mcp_types.ListToolsRequest(params=params), mcp_types.ListToolsResult, _START_S)
            for tool in page.tools:
                if not self._server.tools or tool.name in self._server.tools:
                    found.append(Described(self._name, tool.name, tool.description or "", tool.input_schema))
            cursor = page.next_cursor
            if not cursor:
                break
        size = len(json.dumps([one.schema() for one in found]))
        if len(found) > MAX_TOOLS or size > MAX_SCHEMA_BYTES:
            raise ToolError(
                ToolErrorKind.UNEXPECTED_ENVIRONMENT,
                f"it has {len(found)} tools, described in {size} bytes; choose some: agent.mcp.{self._name}.tools",
            )
        missing = set(self._server.tools) - {one.tool for one in found}
        if missing:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"it has no tool {min(missing)!r}")
        return found

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """Errors: ToolError, SandboxError, TimeoutError."""
        import mcp_types

        params = mcp_types.CallToolRequestParams(name=tool, arguments=arguments)
        result = await self._ask(mcp_types.CallToolRequest(params=params), mcp_types.CallToolResult, timeout_s)
        text = "\n".join(_text_of(part) for part in result.content)
        if not result.is_error:
            return ToolResult(text=text)
        kind = ToolErrorKind.PROVIDER_ERROR if self._server.trusted else ToolErrorKind.UNEXPECTED_ENVIRONMENT
        return ToolResult(text=f"error: {text}", error=kind)

    async def _ask(self, request: Any, kind: Any, timeout_s: float) -> Any:
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS
        from pydantic import ValidationError

        async with asyncio.timeout(timeout_s):
            try:
                session = await self._open()
                return await session.send_request(request, kind)
            except MCPError as error:
                if error.code == INVALID_PARAMS:
                    raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, error.message) from None
                if error.code == CONNECTION_CLOSED:
                    await self.close()  # the next call starts the server again
                raise self._broken(error.message) from None
            except ValidationError:
                raise self._broken("it answered with something else than a result") from None

    def _broken(self, why: str) -> ToolError:
        why = (self._inside.failure if self._inside is not None else "") or why
        text = f"the server {self._name} failed: {why}"
        return ProviderError(text) if self._server.trusted else ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, text)

    async def _open(self) -> Any:
        """The client's session; a server that has ended is started again. Errors: ToolError, SandboxError."""
        if self._task is not None and self._task.done():
            await self.close()
        if self._task is None or self._session is None:
            self._session = asyncio.get_running_loop().create_future()
            self._end.clear()
            self._task = asyncio.create_task(self._live(self._session))
        return await asyncio.shield(self._session)

    async def _live(self, opened: asyncio.Future[Any]) -> None:
        """Open the client, keep it until the end, close it."""
        from mcp import Client

        try:
            async with Client(await self._transport(), cache=None) as client:
                opened.set_result(client.session)
                await self._end.wait()
        except asyncio.CancelledError:
            raise
        except BaseExceptionGroup as group:
            self._refuse(opened, group.exceptions[0])
        except Exception as error:  # whatever the package raises is about the server: the one who asked hears of it
            self._refuse(opened, error)

    def _refuse(self, opened: asyncio.Future[Any], error: BaseException) -> None:
        if opened.done():
            return
        opened.set_exception(
            error if isinstance(error, SandboxError) else self._broken(str(error) or type(error).__name__)
        )

    async def _transport(self) -> Any:
        if self._server.trusted:
            from mcp import StdioServerParameters

            command, *rest = self._server.command
            return StdioServerParameters(command=command, args=rest, env=dict(self._server.env))
        from etude.agent.mcp_sandbox import SandboxServer

        assert self._sandbox is not None
        self._inside = SandboxServer(self._sandbox, self._name, self._server.command, self._server.env)
        await self._inside.start()
        return self._inside.transport()

    async def close(self) -> None:
        """End the client, and a trusted server with it; one in a sandbox ends with the sandbox."""
        if self._task is None:
            return
        self._end.set()
        task, self._task = self._task, None
        done, _ = await asyncio.wait({task}, timeout=_START_S)
        if not done:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _text_of(part: Any) -> str:
    """A part of a result, as text: what is no text is named."""
    if part.type == "text":
        return str(part.text)
    if part.type == "resource" and hasattr(part.resource, "text"):
        return str(part.resource.text)
    return f"({part.type}, not shown)"
