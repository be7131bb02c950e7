"""A session with the agent: the harness owns the context, and the loop is that of training (agent/loop.py).

    say --> Play.run: reply (a Turn like any client's, recorded) -> calls, in the sandbox -> results -> reply ... -> end
            `--> events: text, call, result, diff, question, end

Changes stay in the sandbox; their diff is told. A client that goes away stops the reply; whole turns stay. What it does
not do: HTTP (agent_routes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from etude.agent.loop import Play, Services, changed_files
from etude.agent.mcp import Servers
from etude.agent.prompts import opening, request
from etude.agent.recipe import AgentRecipe
from etude.agent.search import search_of
from etude.agent.tool import MakeTool
from etude.agent.tools import schemas
from etude.code.diff import diff_of
from etude.errors import SandboxError, TaskError
from etude.protocols import Message, Owner, Reply, Sandbox, SandboxPool
from etude.serve.conversation import Ask, Pins
from etude.serve.refusal import Refusal
from etude.serve.turn import Parts, Turn
from etude.types import Context, Effort, Outcome, StopReason, Task, ToolResult

Emit = Callable[[dict[str, Any]], Awaitable[None]]


class ServedPolicy:
    """protocols.Policy over the server's own turns: matched, recorded and counted as a client's are."""

    def __init__(
        self, parts: Parts, owner: Owner, pins: Pins, recipe: AgentRecipe, tools: Sequence[dict[str, Any]], emit: Emit
    ) -> None:
        """tools: JSON schemas."""
        self._parts, self._owner, self._pins, self._recipe, self._emit = parts, owner, pins, recipe, emit
        self._tools = tuple(tools)
        self.tokens = 0

    async def reply(self, conversation: Sequence[Message]) -> Reply:
        """Errors: Refusal."""
        ask = Ask(
            api="agent", model=self._parts.name, messages=tuple(conversation), tools=self._tools,
            max_tokens=self._recipe.reply_tokens,
        )  # fmt: skip
        turn = Turn(self._parts, ask, self._owner, self._pins)
        try:
            await turn.start()
            async with contextlib.aclosing(turn.deltas(live=True)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if delta.text:
                        await self._emit({"type": "text", "text": delta.text})
            for number, call in enumerate(turn.calls):
                await self._emit({"type": "call", "turn": turn.turn_id, "number": number, "name": call.name,
                                  "arguments": dict(call.arguments)})  # fmt: skip
            return Reply(text=turn.text, calls=turn.calls, stop=turn.stop, effort=turn.effort, span=None)
        except Refusal as refusal:
            if refusal.code != "context_length_exceeded":
                raise
            return Reply(text="", calls=(), stop=StopReason.CONTEXT, effort=Effort(), span=None)
        finally:
            await asyncio.shield(turn.close())
            self.tokens += turn.usage.prompt + turn.usage.sampled

    def contexts(self) -> tuple[Context, ...]:
        """None: the turns are kept by the recorder."""
        return ()

    async def close(self) -> None:
        """Windows stay, for the next request."""


class AgentSession:
    """One conversation about one sandbox."""

    def __init__(
        self, parts: Parts, owner: Owner, task: Task, sandbox: Sandbox, recipe: AgentRecipe, *, has_task: bool,
        tools: Sequence[dict[str, Any]], extra: Mapping[str, MakeTool],
    ) -> None:  # fmt: skip
        """tools: JSON schemas of all that the agent has; extra: those that are no tools of the recipe."""
        self.tools = tools
        self.stack = contextlib.AsyncExitStack()
        """What ends with the session: its sandbox, its MCP servers."""
        self._parts, self.owner, self._task, self._sandbox = parts, owner, task, sandbox
        self._recipe, self._has_task = recipe, has_task
        self.session_id = uuid.uuid4().hex
        self.messages: list[Message] = []
        self.outcome: Outcome | None = None
        self.is_busy = False
        self.tokens = 0
        self._emit: Emit = _nowhere
        self._shown: Mapping[str, str | None] = {}
        self._answer: asyncio.Future[str] | None = None
        services = Services(ask=self._ask, search=search_of(recipe), extra=extra, watch=self._watch)
        self._play = Play(task, sandbox, recipe, time.monotonic, services)

    async def say(self, text: str, emit: Emit) -> None:
        """Until the agent answers without a call, or a limit ends it; events go to `emit`. Errors: Refusal."""
        if self.is_busy:
            raise Refusal(409, "the agent is at work: wait for the end of its answer", code="busy")
        self.is_busy, self._emit = True, emit
        try:
            self._open(text)
            self._play.begin_again()
            pins = Pins(session=f"agent-{self.session_id}")
            policy = ServedPolicy(self._parts, self.owner, pins, self._recipe, self.tools, emit)
            try:
                self.outcome = await self._play.run(policy, self.messages)
            except SandboxError as error:
                self.outcome = Outcome.SANDBOX_DIED
                await emit({"type": "error", "message": error.message})
            finally:
                self.tokens += policy.tokens
            effort = {name: getattr(self.effort, name) for name in Effort.__struct_fields__}
            await emit({"type": "end", "outcome": self.outcome.value, "turns": len(self._play.turns), "effort": effort})
        finally:
            self.is_busy, self._emit = False, _nowhere

    @property
    def effort(self) -> Effort:
        """Of all turns so far."""
        return sum((turn.effort for turn in self._play.turns), Effort())

    async def changes(self) -> dict[str, str | None]:
        """Files that differ from those that the session began with. Errors: SandboxError."""
        return await changed_files(self._task, self._sandbox)

    async def state(self) -> dict[str, Any]:
        """Where it stands. Errors: Refusal if the sandbox is gone."""
        try:
            changes = await self.changes()
        except SandboxError as error:
            raise Refusal(404, "the sandbox of this session is gone", code="sandbox_died") from error
        return {"id": self.session_id, "is_busy": self.is_busy, "turns": len(self._play.turns),
                "outcome": self.outcome.value if self.outcome else None, "files": changes,
                "patch": diff_of(self._task.workspace, changes)}  # fmt: skip

    def answer(self, text: str) -> None:
        """To the question that the agent asked. Errors: Refusal if there is none."""
        if self._answer is None or self._answer.done():
            raise Refusal(409, "the agent has asked nothing", code="no_question")
        self._answer.set_result(text)

    async def close(self) -> None:
        """End its MCP servers, then its sandbox."""
        with contextlib.suppress(SandboxError):
            await self.stack.aclose()

    def _open(self, text: str) -> None:
        if self.messages:
            if not text:
                raise Refusal(400, "text is empty", param="text")
            self.messages.append(Message(role="user", text=text))
        elif self._has_task:
            self.messages += opening(self._task, self._recipe.system)
            if text:
                self.messages.append(Message(role="user", text=text))
        else:
            if not text:
                raise Refusal(400, "text is empty", param="text")
            if self._recipe.system:
                self.messages.append(Message(role="system", text=self._recipe.system))
            self.messages.append(Message(role="user", text=request(text, self._task.workspace)))

    async def _watch(self, reply: Reply, results: Sequence[ToolResult]) -> None:
        for number, result in enumerate(results):
            await self._emit({"type": "result", "number": number, "text": result.text, "passed": result.passed,
                              "error": None if result.error is None else result.error.value})  # fmt: skip
        if not reply.calls:
            return
        changes = await self.changes()
        if changes != self._shown:
            self._shown = changes
            await self._emit({"type": "diff", "text": diff_of(self._task.workspace, changes)})

    async def _ask(self, question: str, options: Sequence[str]) -> str:
        self._answer = asyncio.get_running_loop().create_future()
        await self._emit({"type": "question", "text": question, "options": list(options)})
        return await self._answer


async def _nowhere(event: dict[str, Any]) -> None:
    """Nobody listens."""


class AgentSessions:
    """All that are open: each owner's own, bounded in number, closed when unused for long."""

    def __init__(self, parts: Parts, pool: SandboxPool, recipe: AgentRecipe, servers: Servers) -> None:
        self._parts, self._pool, self.recipe, self._servers = parts, pool, recipe, servers
        self._open: dict[str, AgentSession] = {}
        self._opening = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, owner: Owner, task: Task, recipe: AgentRecipe, *, has_task: bool) -> AgentSession:
        """Errors: Refusal."""
        try:
            recipe = recipe.for_task(task)
        except TaskError as error:
            raise Refusal(400, error.message, param="task.tools") from error
        if len(self._open) + self._opening >= self._parts.recipe.agent_sessions:
            raise Refusal(529, "as many agent sessions are open as there may be", code="overloaded", retry_after_s=10)
        self._opening += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                sandbox = await self._pool.acquire(task.workspace)
                stack.push_async_callback(sandbox.close)
                extra = await stack.enter_async_context(self._servers.tools(sandbox))
                session = AgentSession(
                    self._parts, owner, task, sandbox, recipe, has_task=has_task, extra=extra,
                    tools=[*schemas(recipe.tools), *self._servers.schemas()],
                )  # fmt: skip
                session.stack = stack.pop_all()
        except OSError as error:
            raise Refusal(400, f"the files cannot be laid out: {error.strerror}", param="files") from error
        finally:
            self._opening -= 1
        self._open[session.session_id] = session
        self.used(session)
        return session

    def find(self, owner: Owner, session_id: str) -> AgentSession:
        """Errors: Refusal if this owner has no such session."""
        session = self._open.get(session_id)
        if session is None or (session.owner.tenant, session.owner.user) != (owner.tenant, owner.user):
            raise Refusal(404, "there is no such session", code="session_not_found")
        self.used(session)
        return session

    def used(self, session: AgentSession) -> None:
        """Its time starts anew."""
        if (timer := self._timers.pop(session.session_id, None)) is not None:
            timer.cancel()
        if session.session_id in self._open:
            loop, idle_s = asyncio.get_running_loop(), self._parts.recipe.agent_idle_s
            self._timers[session.session_id] = loop.call_later(idle_s, self._expire, session)

    def _expire(self, session: AgentSession) -> None:
        if session.is_busy:
            return self.used(session)
        closing = asyncio.get_running_loop().create_task(self.end(session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return None

    async def end(self, session: AgentSession) -> None:
        """Close it, and its sandbox."""
        self._open.pop(session.session_id, None)
        if (timer := self._timers.pop(session.session_id, None)) is not None:
            timer.cancel()
        await session.close()

    async def close(self) -> None:
        for session in list(self._open.values()):
            await self.end(session)
