"""EndpointPolicy: any OpenAI-compatible URL answers the episode. No torch, no ids: such an episode has no contexts.

    conversation --messages, tools--> POST {url}/chat/completions --stream--> text, calls, usage --> Reply

What a server answers with 408, 409, 425, 429 or 5xx, or not at all, is asked again with growing waits, as long as its
Retry-After says, up to `tries`. Anything else is an EngineError with the server's own words. Tokens and costs are
counted, and end the episode where a budget is set. What it does not do: cache, or judge what was said.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from etude.data.calls import made
from etude.errors import EngineError
from etude.protocols import Message, Reply
from etude.types import Context, Effort, StopReason, ToolCall

_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_STOPS = {"stop": StopReason.END, "tool_calls": StopReason.END, "function_call": StopReason.END,
          "length": StopReason.LENGTH, "content_filter": StopReason.END}  # fmt: skip
MAX_ARGUMENT_CHARS = 1 << 20
"""Of one call; what is longer is cut off, and so a broken call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Dollars for a million tokens."""

    input: float = 0.0
    cached: float | None = None
    """Of input that the server had computed before; None: as other input."""
    output: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where, what, and how patiently."""

    url: str
    """Up to and with /v1."""
    model: str
    key: str = ""
    temperature: float | None = None
    """None: the server's own."""
    max_tokens: int | None = None
    """Of one reply."""
    tries: int = 6
    first_wait_s: float = 0.5
    timeout_s: float = 300.0
    """Without a byte from the server."""
    price: Price = field(default_factory=Price)
    budget: float | None = None
    """Dollars for one episode, or for all that share a usage."""


@dataclass(slots=True)
class Usage:
    """What an endpoint counted, over all replies."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0
    retries: int = 0
    cost: float = 0.0


@dataclass(slots=True)
class _Answer:
    """A reply while it streams in."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """By number: id, name, arguments."""
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


class EndpointPolicy:
    """One episode's policy over an endpoint. Errors of `reply`: EngineError."""

    def __init__(
        self,
        endpoint: Endpoint,
        tools: Sequence[Mapping[str, Any]],
        *,
        client: httpx2.AsyncClient | None = None,
        on_text: Callable[[str], None] | None = None,
        usage: Usage | None = None,
    ) -> None:
        """tools: JSON schemas (agent/tool.py). on_text: hears text as it comes. usage: what was used before, to be
        counted on, where several policies share a budget."""
        self._endpoint, self._on_text = endpoint, on_text
        self._tools = [{"type": "function", "function": dict(tool)} for tool in tools]
        self._owns_client = client is None
        self._client = client or httpx2.AsyncClient(timeout=endpoint.timeout_s)
        self.usage = Usage() if usage is None else usage

    async def reply(self, conversation: Sequence[Message]) -> Reply:
        """The next turn; one of zero turns where the budget is spent."""
        budget = self._endpoint.budget
        if budget is not None and self.usage.cost >= budget:
            return Reply(text="", calls=(), stop=StopReason.CONTEXT, effort=Effort(), span=None)
        answer = await self._ask(_messages(conversation))
        calls = tuple(_call(_whole(name), arguments) for _, name, arguments in answer.calls.values())
        tokens = self._count(answer.usage)
        text = _whole("".join(answer.text))
        # Servers do not say which tokens are which: all of a reply with calls are the calls', but what it thought.
        thinking = int((answer.usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
        said = max(0, tokens - thinking)
        return Reply(
            text=text,
            calls=calls,
            stop=_STOPS.get(answer.finish or "", StopReason.END),
            effort=Effort(
                thinking_tokens=thinking, call_tokens=said if calls else 0, message_tokens=0 if calls else said,
                calls=len(calls), turns=1,
            ),
            span=None,
        )  # fmt: skip

    def contexts(self) -> tuple[Context, ...]:
        return ()

    async def close(self) -> None:
        if self._owns_client:
            await self._client.aclose()

    def _count(self, usage: Mapping[str, Any]) -> int:
        """Adds what the server counted; the reply's tokens."""
        given, got = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        price = self._endpoint.price
        self.usage.requests += 1
        self.usage.input_tokens += given
        self.usage.cached_tokens += cached
        self.usage.output_tokens += got
        cached_price = price.input if price.cached is None else price.cached
        self.usage.cost += ((given - cached) * price.input + cached * cached_price + got * price.output) / 1e6
        return got

    async def _ask(self, messages: list[dict[str, Any]]) -> _Answer:
        """Until the server gives a whole answer. Errors: EngineError."""
        endpoint = self._endpoint
        body: dict[str, Any] = {"model": endpoint.model, "messages": messages, "stream": True,
                                "stream_options": {"include_usage": True}}  # fmt: skip
        if self._tools:
            body["tools"] = self._tools
        body |= {name: value for name, value in (("temperature", endpoint.temperature),
                 ("max_tokens", endpoint.max_tokens)) if value is not None}  # fmt: skip
        wait_s, trouble = endpoint.first_wait_s, ""
        for number in range(endpoint.tries):
            if number:
                self.usage.retries += 1
                await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))
                wait_s = min(2 * wait_s, 60.0)
            try:
                answer = _Answer()
                async for event in self._events(body):
                    _add(answer, event, self._on_text)
                if answer.finish is not None:
                    return answer
                trouble = "the answer ended without a reason to stop"
            except _TryAgain as again:
                trouble, wait_s = str(again), max(wait_s, again.after_s)
            except httpx2.HTTPError as error:
                trouble = f"{type(error).__name__}: {error}"
        raise EngineError(
            f"{endpoint.url} gave no answer in {endpoint.tries} tries", cause=trouble, hint="is the server up?"
        )

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of one stream. Errors: _TryAgain, EngineError, httpx2.HTTPError."""
        endpoint = self._endpoint
        headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
        async with self._client.stream(
            "POST", f"{endpoint.url.rstrip('/')}/chat/completions", json=body, headers=headers
        ) as response:
            if response.status_code != 200:
                words = (await response.aread()).decode(errors="replace").strip()[:500]
                if response.status_code in _AGAIN:
                    raise _TryAgain(f"{response.status_code}: {words}", _seconds(response.headers.get("retry-after")))
                hint = "is the key right?" if response.status_code in (401, 403) else "see the server's log"
                raise EngineError(
                    f"{endpoint.url} refused the request", cause=f"{response.status_code}: {words}", hint=hint
                )
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data in ("", "[DONE]"):
                    continue
                try:
                    event = json.loads(data)
                except ValueError as error:
                    raise _TryAgain(f"an event that is no JSON: {data[:100]}", 0.0) from error
                if isinstance(event, dict) and event.get("error"):
                    raise _TryAgain(str(event["error"])[:300], 0.0)
                if isinstance(event, dict):
                    yield event


class _TryAgain(Exception):
    def __init__(self, words: str, after_s: float) -> None:
        super().__init__(words)
        self.after_s = after_s


def _seconds(text: str | None) -> float:
    """Of a Retry-After header; dates, which few send, count as none."""
    try:
        return min(max(0.0, float(text or 0)), 600.0)
    except ValueError:
        return 0.0


def _add(answer: _Answer, event: Mapping[str, Any], on_text: Callable[[str], None] | None) -> None:
    """One event of the stream; what it lacks or has wrongly is passed over."""
    if isinstance(event.get("usage"), dict):
        answer.usage = event["usage"]
    for choice in event.get("choices") or ():
        if choice.get("index", 0):
            continue
        delta = choice.get("delta") or {}
        if text := delta.get("content"):
            answer.text.append(text)
            if on_text is not None:
                on_text(_whole(text))
        for part in delta.get("tool_calls") or ():
            number = part.get("index", len(answer.calls))
            call = answer.calls.setdefault(number, ["", "", ""])
            function = part.get("function") or {}
            call[0] = part.get("id") or call[0]
            call[1] += function.get("name") or ""
            call[2] = (call[2] + (function.get("arguments") or ""))[:MAX_ARGUMENT_CHARS]
        answer.finish = choice.get("finish_reason") or answer.finish


def _call(name: str, arguments: str) -> ToolCall:
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return ToolCall(name=name, arguments={}, error="the arguments are not valid JSON")
    return made(name, found)


def _whole(text: str) -> str:
    """Without half characters: JSON may hold them, and a pair may come in two events."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _messages(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """In the shape of the API. Calls get ids by their place, so that a conversation reads the same at every turn."""
    found: list[dict[str, Any]] = []
    pending: list[str] = []
    for message in conversation:
        if message.role == "assistant":
            pending = [f"call_{len(found)}_{place}" for place in range(len(message.calls))]
            entry: dict[str, Any] = {"role": "assistant", "content": message.text}
            if message.calls:
                entry["tool_calls"] = [
                    {"id": name, "type": "function",
                     "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))}}
                    for name, call in zip(pending, message.calls, strict=True)
                ]  # fmt: skip
            found.append(entry)
        elif message.role == "tool":
            for place, result in enumerate(message.results):
                if place < len(pending):
                    found.append({"role": "tool", "tool_call_id": pending[place], "content": result.text})
                else:  # an answer to a reply that made no call
                    found.append({"role": "user", "content": result.text})
        else:
            found.append({"role": message.role, "content": message.text})
    return found
