"""The application: which path is answered by what, and how errors that nobody foresaw are told.

    /v1/chat/completions  /v1/responses  /v1/models            OpenAI
    /v1/messages  /v1/messages/count_tokens                    Anthropic
    /v1/agent/sessions ...                                     the agent (agent_routes.py)
    /feedback  /healthz  /readyz  /metrics                     editors and operators

What it does not do: listen (server.py).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from etude import __version__
from etude.errors import EtudeError
from etude.serve.agent_routes import add_agent
from etude.serve.agent_session import AgentSessions
from etude.serve.anthropic_messages import Messages, conversation_of
from etude.serve.anthropic_wire import CountRequest
from etude.serve.document import described, document_of
from etude.serve.exchange import Api, Exchange
from etude.serve.feedback import FeedbackRequest, note
from etude.serve.gate import Gate, body_of
from etude.serve.openai_chat import ChatCompletions
from etude.serve.openai_responses import Responses
from etude.serve.recipe import ANY
from etude.serve.refusal import Refusal, refusal_of, status_of
from etude.serve.refusal import body_of as refusal_body
from etude.serve.routes import api_of, json_response, simple
from etude.serve.turn import Parts


def make_app(parts: Parts, gate: Gate, agents: AgentSessions | None = None) -> FastAPI:
    """The server's endpoints over `parts`, for whom `gate` lets in. agents: None leaves out the agent's."""
    app = FastAPI(title="Etude", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    for path, api in (("chat/completions", ChatCompletions()), ("responses", Responses()), ("messages", Messages())):
        _add_exchange(app, parts, gate, f"/v1/{path}", api)
    _add_others(app, parts, gate)
    if agents is not None:
        add_agent(app, parts, gate, agents)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(EtudeError, _failed)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(Exception, _broken)
    app.openapi = lambda: document_of(app)  # type: ignore[method-assign]
    return app


def _add_exchange(app: FastAPI, parts: Parts, gate: Gate, path: str, api: Api) -> None:
    async def handle(request: Request) -> Response:
        return Exchange(parts, gate, api, request)

    # Starlette's route answers: a tenth of a millisecond sooner than FastAPI's, which stands in the document.
    app.router.add_route(path, handle, methods=["POST"], include_in_schema=False)
    app.post(path, **described(api.endpoint, api.body))(handle)


def _add_others(app: FastAPI, parts: Parts, gate: Gate) -> None:
    async def models(request: Request, caller: Any) -> Any:
        rows = [_model(name, parts) for name in _names(parts)]
        ends = {"has_more": False, "first_id": rows[0]["id"], "last_id": rows[-1]["id"]}
        return {"object": "list", "data": rows, **ends}

    async def model(request: Request, caller: Any) -> Any:
        name = request.path_params["name"]
        if name not in _names(parts) and ANY not in parts.recipe.names:
            raise Refusal(404, "this model is not served", code="model_not_found", param="model")
        return _model(name, parts)

    async def count(request: Request, caller: Any) -> Any:
        body = await body_of(request, CountRequest, parts.recipe)
        messages, tools, choice = conversation_of(body, parts)
        renderer = await parts.rendering.renderer(() if choice == "none" else tools)
        return {"input_tokens": len(await parts.rendering.open(renderer, messages))}

    async def feedback(request: Request, caller: Any) -> Any:
        body = await body_of(request, FeedbackRequest, parts.recipe)
        return await note(parts.recorder, caller.owner, body)

    app.get("/v1/models", **described("models"))(simple(parts, gate, "models", models))
    app.get("/v1/models/{name:path}", **described("model", path="name"))(simple(parts, gate, "models", model))
    counted = simple(parts, gate, "count_tokens", count)
    app.post("/v1/messages/count_tokens", **described("count_tokens", CountRequest))(counted)
    noted = simple(parts, gate, "feedback", feedback)
    app.post("/feedback", **described("feedback", FeedbackRequest))(noted)
    _add_probes(app, parts, gate)


def _add_probes(app: FastAPI, parts: Parts, gate: Gate) -> None:
    async def healthz(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(request: Request) -> Response:
        """Ready: not draining, and the engine serves a version."""
        if gate.is_draining:
            raise Refusal(503, "the server is about to end", code="draining", retry_after_s=5)
        version = (await parts.engine.stats()).version
        if version is None:
            raise Refusal(503, "no version is served yet", code="no_version", retry_after_s=1)
        return json_response({"status": "ok", "version": version.name, "step": version.step})

    async def metrics(request: Request) -> Response:
        try:
            stats = await parts.engine.stats()
        except EtudeError:
            stats = None
        gate.caller_of(request.headers)
        return Response(parts.measures.text(stats), media_type="text/plain; version=0.0.4")

    app.get("/healthz", **described("healthz"))(healthz)
    app.get("/readyz", **described("readyz"))(readyz)
    app.get("/metrics", **described("metrics"))(metrics)


def _names(parts: Parts) -> list[str]:
    return [name for name in parts.recipe.names if name != ANY] or [parts.name]


def _model(name: str, parts: Parts) -> dict[str, Any]:
    """In the shapes of both APIs at once."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "etude", "type": "model", "display_name": name,
            "created_at": "1970-01-01T00:00:00Z", "context_window": parts.rendering.max_context}  # fmt: skip


# Errors outside an Exchange


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    api = api_of(request)
    return json_response(refusal_body(error, api), status_of(error, api), error.headers())


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, EtudeError)
    return await _refused(request, refusal_of(error))


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is nothing at this path", 405: "this path does not take that method"}
    refusal = Refusal(error.status_code, words.get(error.status_code, "the request cannot be read"))
    api = api_of(request)
    headers = {**(error.headers or {}), **refusal.headers()}
    return json_response(refusal_body(refusal, api), status_of(refusal, api), headers)


async def _broken(request: Request, error: Exception) -> Response:
    """Anything that nobody foresaw: said in the API's shape, with nothing of our insides; the log has it all."""
    return await _refused(request, Refusal(500, "the server failed: this is a bug", code="internal"))
