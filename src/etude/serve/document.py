"""The OpenAPI document: every endpoint with the shape of its body, and the statuses that it may answer with.

The shapes are the structs that requests are decoded into, so that the document says what is checked. What it does not
do: describe answers of model endpoints in full: they are OpenAI's and Anthropic's own.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_WORDS = {
    "chat_completions": "OpenAI chat completions, streamed or whole",
    "responses": "OpenAI responses, streamed or whole",
    "messages": "Anthropic messages, streamed or whole",
    "count_tokens": "How many tokens a conversation has",
    "models": "The models that are served",
    "model": "One of them",
    "feedback": "What happened to a turn's work later",
    "healthz": "Whether the process is there",
    "readyz": "Whether it can answer",
    "metrics": "Counters in Prometheus' form",
    "agent_open": "Begin a session with the agent, in a sandbox",
    "agent_state": "Where such a session stands",
    "agent_say": "Say something to the agent; what it does comes as events",
    "agent_answer": "Answer a question that the agent asked",
    "agent_close": "End a session with the agent",
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}}}}}  # fmt: skip
_REFUSALS = (400, 401, 403, 404, 405, 408, 409, 413, 429, 500, 503, 529)
_HEADERS = ("x-etude-session", "x-etude-min-step", "x-etude-exact-version", "x-etude-repository")
_STREAMS = ("chat_completions", "responses", "messages", "agent_say")


def described(name: str, body: type[Any] | None = None, *, path: str = "") -> dict[str, Any]:
    """Arguments of a route's decorator. path: the name of its path's parameter."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if name in _STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if name == "metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    refusal = {"description": "Refused", "content": {"application/json": {"schema": _ERROR}}}
    responses: dict[int | str, Any] = {200: {"description": "Answered", "content": content}}
    responses |= {status: refusal for status in _REFUSALS}
    extra: dict[str, Any] = {"parameters": [_parameter(path, "path")] if path else []}
    if name in _STREAMS[:3]:
        extra["parameters"] += [_parameter(header, "header") for header in _HEADERS]
    if body is not None:
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        _BODIES[body.__name__] = body
    return {"name": name, "operation_id": name, "summary": _WORDS[name], "responses": responses,
            "openapi_extra": extra, "response_model": None}  # fmt: skip


def _parameter(name: str, place: str) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": "string", "maxLength": 256}
    if place == "path":
        kind |= {"minLength": 1, "pattern": "^[A-Za-z0-9_.-]+$"}
    elif name == "x-etude-min-step":
        kind = {"type": "string", "pattern": "^[0-9]{1,15}$"}
    return {"name": name, "in": place, "required": place == "path", "schema": kind}


_BODIES: dict[str, type[Any]] = {}


def document_of(app: FastAPI) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, shapes = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
        found.setdefault("components", {})["schemas"] = shapes
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        found["security"] = [{"bearer": []}, {"header": []}, {}]
        app.openapi_schema = found
    return app.openapi_schema
