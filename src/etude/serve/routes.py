"""A small endpoint: let in, work, JSON out. The model endpoints have their own (exchange.py).

What it does not do: turn a Refusal into an answer (app.py's handlers do).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from etude.serve.gate import Gate
from etude.serve.refusal import Refusal, status_of
from etude.serve.turn import Parts

Handler = Callable[[Request], Awaitable[Any]]


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON that no cache keeps."""
    kept = {"cache-control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(value), status_code=status, headers=kept, media_type="application/json")


def simple(parts: Parts, gate: Gate, name: str, work: Callable[[Request, Any], Awaitable[Any]]) -> Handler:
    """An endpoint that answers with JSON: `work` is given the request and who asks. Errors of it: Refusal."""

    async def handle(request: Request) -> Response:
        visit = gate.admit(request)
        status = 500
        try:
            found = await work(request, visit.caller)
            status = 200
            return json_response(found)
        except Refusal as refusal:
            status = status_of(refusal, api_of(request))
            raise
        finally:
            gate.leave(visit)
            parts.measures.requests.labels(name, str(status)).inc()

    return handle


def api_of(request: Request) -> str:
    """In whose shape errors are told."""
    is_anthropic = request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers
    return "anthropic" if is_anthropic else "openai"
