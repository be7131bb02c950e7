"""The agent's endpoints.

    POST   /v1/agent/sessions                files or a task, tools     -> {"id", "tools"}
    POST   /v1/agent/sessions/ID/messages    text                       -> events: text, call, result, diff, ..., end
    POST   /v1/agent/sessions/ID/answers     text, to a question event
    GET    /v1/agent/sessions/ID             changed files, patch, outcome
    DELETE /v1/agent/sessions/ID             the same, and the sandbox is gone

What it does not do: the loop (agent_session.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from etude.agent.recipe import AgentRecipe
from etude.errors import EtudeError, RecipeError
from etude.serve.agent_session import AgentSession, AgentSessions
from etude.serve.document import described
from etude.serve.exchange import EVENTS, Outlet, while_connected
from etude.serve.gate import Gate, Visit, body_of
from etude.serve.refusal import Refusal, refusal_of
from etude.serve.refusal import body_of as refusal_body
from etude.serve.routes import simple
from etude.serve.turn import Parts
from etude.types import IOChecks, Limits, Task

_PATH = "/v1/agent/sessions"


class AgentOpenRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What the agent works on: `files` (path -> text), or a task with its workspace."""

    files: dict[str, str] = {}
    task: Task | None = None
    tools: list[str] | None = None
    """Names of the harness' tools; those of the server's recipe, if left out."""
    system: Annotated[str, Meta(max_length=65_536)] | None = None
    max_turns: Annotated[int, Meta(ge=1, le=10_000)] | None = None


class AgentSayRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """text: empty to begin a task."""

    text: str = ""


class AgentAnswerRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a question."""

    text: str


def add_agent(app: FastAPI, parts: Parts, gate: Gate, sessions: AgentSessions) -> None:
    """The endpoints over `sessions`."""

    async def open_session(request: Request, caller: Any) -> Any:
        body = await body_of(request, AgentOpenRequest, parts.recipe)
        recipe = _recipe(sessions.recipe, body)
        task = body.task or Task.make(
            prompt="", workspace=body.files, verifier=IOChecks(path="", checks=()), category="served", source={},
            limits=Limits(max_turns=recipe.max_turns, wall_s=recipe.wall_s),
        )  # fmt: skip
        session = await sessions.open(caller.owner, task, recipe, has_task=body.task is not None)
        return {"id": session.session_id, "tools": [tool["name"] for tool in session.tools]}

    async def state(request: Request, caller: Any) -> Any:
        return await sessions.find(caller.owner, request.path_params["id"]).state()

    async def answer(request: Request, caller: Any) -> Any:
        body = await body_of(request, AgentAnswerRequest, parts.recipe)
        sessions.find(caller.owner, request.path_params["id"]).answer(body.text)
        return {"status": "ok"}

    async def close(request: Request, caller: Any) -> Any:
        session = sessions.find(caller.owner, request.path_params["id"])
        if session.is_busy:
            raise Refusal(409, "the agent is at work: give up its answer first", code="busy")
        try:
            return await session.state()
        finally:
            await sessions.end(session)

    async def say(request: Request) -> Response:
        return AgentExchange(parts, gate, sessions, request)

    one = f"{_PATH}/{{id}}"
    app.post(_PATH, **described("agent_open", AgentOpenRequest))(simple(parts, gate, "agent_open", open_session))
    app.get(one, **described("agent_state", path="id"))(simple(parts, gate, "agent_state", state))
    app.delete(one, **described("agent_close", path="id"))(simple(parts, gate, "agent_close", close))
    app.post(f"{one}/messages", **described("agent_say", AgentSayRequest, path="id"))(say)
    app.post(f"{one}/answers", **described("agent_answer", AgentAnswerRequest, path="id"))(
        simple(parts, gate, "agent_answer", answer)
    )


def _recipe(recipe: AgentRecipe, body: AgentOpenRequest) -> AgentRecipe:
    """With the tools of the session: a task's own come first. Errors: Refusal for a tool that there is not."""
    changes: dict[str, Any] = {}
    if body.task is not None and body.task.tools:
        changes["tools"] = body.task.tools
    elif body.tools is not None:
        changes["tools"] = tuple(body.tools)
    if body.system is not None:
        changes["system"] = body.system
    if body.max_turns is not None:
        changes["max_turns"] = min(body.max_turns, recipe.max_turns)
    try:
        return replace(recipe, **changes)
    except RecipeError as error:
        raise Refusal(400, error.message, param="tools") from error


class AgentExchange(Response):
    """Something that is said to the agent, and what it does, as events."""

    def __init__(self, parts: Parts, gate: Gate, sessions: AgentSessions, request: Request) -> None:
        self._parts, self._gate, self._sessions, self._request = parts, gate, sessions, request
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = Outlet(send, self._parts.recipe.send_timeout_s)
        visit: Visit | None = None
        try:
            visit = self._gate.admit(self._request)
            body = await body_of(self._request, AgentSayRequest, self._parts.recipe)
            session = self._sessions.find(visit.caller.owner, self._request.path_params["id"])
            before = session.tokens
            await while_connected(receive, self._speak(outlet, session, body.text))
            visit.tokens = session.tokens - before
            self._sessions.used(session)
        except Refusal as refusal:
            await _refuse(outlet, refusal)
        except EtudeError as error:
            await _refuse(outlet, refusal_of(error))
        except TimeoutError:
            pass  # the client does not take what it is sent: its turns are kept all the same
        finally:
            if visit is not None:
                self._gate.leave(visit)
            self._parts.measures.requests.labels("agent_say", str(outlet.status or 499)).inc()

    async def _speak(self, outlet: Outlet, session: AgentSession, text: str) -> None:
        async with contextlib.aclosing(_events_of(session, text)) as events:  # type: ignore[type-var]
            async for event in events:
                if not outlet.status:
                    await outlet.head(200, EVENTS, {"x-etude-agent-session": session.session_id}, None)
                await outlet.part(_event(event), more=True)
        await outlet.part(b"", more=False)


async def _events_of(session: AgentSession, text: str) -> AsyncIterator[dict[str, Any]]:
    """Errors: Refusal."""
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    working = asyncio.create_task(session.say(text, queue.put))
    working.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            yield event
        await working
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _refuse(outlet: Outlet, refusal: Refusal) -> None:
    if not outlet.status:
        return await outlet.refuse(refusal, "openai")
    with contextlib.suppress(TimeoutError):
        await outlet.part(_event({"type": "error", **refusal_body(refusal, "openai")}), more=False)


def _event(value: dict[str, Any]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
