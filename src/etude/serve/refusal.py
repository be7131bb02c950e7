"""What a request is refused with, in the shape of the API that it came by.

    400 invalid      408 too slow       413 too large        500 a bug of ours
    401 no key       409 version        415 not JSON         503 draining, no engine, nothing can be kept
    403 not yours    404, 405           429 quota            529 overloaded (503 beside Anthropic's)

429 and 503 say when to come again. What it does not do: decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etude.errors import (
    EngineError,
    EtudeError,
    ModelError,
    OverloadedError,
    RequestError,
    SandboxError,
    StoreError,
    VersionError,
)

RETRY_S = 1.0
_OPENAI = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
           405: "invalid_request_error", 408: "timeout_error", 409: "version_error", 413: "invalid_request_error",
           415: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error",
           529: "server_error"}  # fmt: skip
_ANTHROPIC = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
              404: "not_found_error", 405: "invalid_request_error", 408: "timeout_error", 409: "version_error",
              413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error", 500: "api_error",
              503: "overloaded_error", 529: "overloaded_error"}  # fmt: skip


@dataclass(slots=True)
class Refusal(Exception):
    """Ends a request.

    >>> raise Refusal(400, "messages is empty", code="empty", param="messages")
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        Exception.__init__(self, self.message)

    def headers(self) -> dict[str, str]:
        """Of the answer, beside its type."""
        found = {} if self.retry_after_s is None else {"retry-after": str(max(1, round(self.retry_after_s + 0.49)))}
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return found


def body_of(refusal: Refusal, api: str) -> dict[str, Any]:
    """The answer's body. api: `anthropic`, else OpenAI's shape, which the other endpoints have too."""
    if api == "anthropic":
        kind = _ANTHROPIC.get(refusal.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": None}
    kind = _OPENAI.get(refusal.status, "server_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def status_of(refusal: Refusal, api: str) -> int:
    """529 is Anthropic's word alone."""
    return 503 if refusal.status == 529 and api != "anthropic" else refusal.status


def refusal_of(error: EtudeError) -> Refusal:
    """What a client hears of an error behind the server: what is wrong with its request, and nothing of our insides."""
    if isinstance(error, VersionError):
        return Refusal(409, _words(error), code="version_not_served")
    if isinstance(error, OverloadedError):
        return Refusal(529, "the engine has too much to do: try again", code="overloaded", retry_after_s=RETRY_S)
    if isinstance(error, RequestError | ModelError):
        is_long = "too long" in error.message or "does not fit" in error.message
        return Refusal(400, _words(error), code="context_length_exceeded" if is_long else "invalid_value")
    if isinstance(error, StoreError):
        return Refusal(503, "the answer cannot be kept, so it is not given", code="not_recorded", retry_after_s=5)
    if isinstance(error, EngineError):
        return Refusal(503, "the engine failed: try again", code="engine_failed", retry_after_s=RETRY_S)
    if isinstance(error, SandboxError):
        return Refusal(503, "no sandbox can be had: try again", code="sandbox_failed", retry_after_s=5)
    return Refusal(500, "the server failed", code=error.boundary)


def _words(error: EtudeError) -> str:
    return f"{error.message}: {error.cause}" if error.cause else error.message
