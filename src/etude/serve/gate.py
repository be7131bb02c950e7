"""What every request passes before it is read: keys, draining, how many at once; then its body, within limits.

    head --gate.admit--> Visit (who, quota taken) --body_of--> JSON of the API's shape --> ... --> gate.leave

Where nobody is asked for a key, a page of another site that the person's browser shows must not use the server: its
requests name a foreign origin or host, and are refused. What it does not do: answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request

from etude.protocols import Engine
from etude.serve.conversation import Pins
from etude.serve.keys import Caller, Keys, local_caller
from etude.serve.quota import Quotas
from etude.serve.recipe import ServeRecipe, is_loopback
from etude.serve.refusal import Refusal

T = TypeVar("T")
_HEADER_CHARS = 256


@dataclass(slots=True)
class Visit:
    """A request that was let in."""

    caller: Caller
    tokens: int = 0
    """That it took, for the quota."""


class Gate:
    """One server's."""

    def __init__(self, recipe: ServeRecipe, keys: Keys | None, quotas: Quotas | None = None) -> None:
        """keys: None asks nobody for one."""
        self._recipe, self._keys = recipe, keys
        self._local = local_caller(recipe.consent)
        self._quotas = quotas or Quotas()
        self.running = 0
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    def admit(self, request: Request) -> Visit:
        """Errors: Refusal."""
        caller = self.caller_of(request.headers)
        if self.is_draining:
            raise Refusal(503, "the server is about to end", code="draining", retry_after_s=5)
        if self.running >= self._recipe.max_requests:
            raise Refusal(529, "the server answers as many requests as it can", code="overloaded", retry_after_s=1)
        self._quotas.begin(caller)
        self.running += 1
        self.idle.clear()
        return Visit(caller)

    def leave(self, visit: Visit) -> None:
        """The request is over."""
        self._quotas.end(visit.caller, visit.tokens)
        self.running -= 1
        if not self.running:
            self.idle.set()

    def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Whose key the request has. Errors: Refusal."""
        if self._keys is None:
            _check_local(headers)
            return self._local
        kind, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not key:
            raise Refusal(401, "a key is needed: Authorization: Bearer KEY, or x-api-key", code="missing_api_key")
        caller = self._keys.find(key)
        if caller is None:
            raise Refusal(401, "this key is not known", code="invalid_api_key")
        return caller


def _check_local(headers: Mapping[str, str]) -> None:
    origin = headers.get("origin")
    if not _is_local(f"//{headers.get('host', '')}") or (origin is not None and not _is_local(origin)):
        raise Refusal(403, "without keys this server answers programs of this machine alone", code="foreign_origin")


def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # no URL at all
        return False


async def body_of(request: Request, kind: type[T], recipe: ServeRecipe) -> T:
    """The request's JSON. Errors: Refusal naming the limit, or the field that is wrong."""
    data = await _read(request, recipe)
    try:
        found = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise Refusal(400, f"{where.strip('`.') or 'body'}: {what}", param=where.strip("`.") or None) from error
    except (msgspec.DecodeError, RecursionError, UnicodeError, ValueError) as error:
        raise Refusal(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from error
    _check_depth(data, recipe.max_depth)
    return found


def _check_depth(data: bytes, limit: int) -> None:
    """Errors: Refusal for JSON that is nested too deeply. Brackets inside texts do not count."""
    if data.count(b"[") + data.count(b"{") <= limit:
        return
    todo: list[tuple[Any, int]] = [(msgspec.json.decode(data), 1)]
    while todo:
        value, depth = todo.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if depth > limit and isinstance(value, dict | list):
            raise Refusal(400, f"the body is nested more than {limit} levels deep", code="too_deep")
        todo += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]


async def _read(request: Request, recipe: ServeRecipe) -> bytes:
    limit = recipe.max_body_bytes
    too_large = Refusal(413, f"the body is larger than {limit} bytes", code="too_large")
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length") or 0) > limit:
            raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(recipe.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        words = f"the body did not come within {recipe.body_timeout_s:g} s"
        raise Refusal(408, words, code="too_slow") from None
    except ClientDisconnect:
        raise Refusal(400, "the body ended before its end", code="disconnected") from None
    return b"".join(parts)


async def pins_of(headers: Mapping[str, str], engine: Engine) -> Pins:
    """What the x-etude-* headers ask for. Errors: Refusal (400 for what cannot be read, 409 for another version)."""
    given = {
        name: headers.get(f"x-etude-{name}", "") for name in ("min-step", "exact-version", "session", "repository")
    }
    if any(len(value) > _HEADER_CHARS for value in given.values()):
        raise Refusal(400, f"an x-etude header is longer than {_HEADER_CHARS} characters", code="invalid_header")
    min_step, exact = None, None
    if text := given["min-step"]:
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise Refusal(400, "x-etude-min-step must be a number", code="invalid_header", param="x-etude-min-step")
        min_step = int(text)
    if name := given["exact-version"]:
        exact = (await engine.stats()).version
        if exact is None or exact.name != name:
            serving = "none" if exact is None else exact.name
            raise Refusal(409, f"version {name[:40]!r} is not served: {serving} is", code="version_not_served")
    return Pins(min_step=min_step, exact=exact, session=given["session"], repository=given["repository"])
