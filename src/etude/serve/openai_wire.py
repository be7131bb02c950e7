"""What OpenAI's chat completions take: the request's shape, checked as it is decoded.

Fields that are not named here are passed over, as clients send many. What it does not do: judge whether the engine can
do what they ask (openai_chat.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1, le=1 << 30)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class Part(Struct, frozen=True):
    """A piece of content; only text can be read."""

    type: str
    text: str = ""


class FunctionCall(Struct, frozen=True):
    """As the model wrote it."""

    name: str = ""
    arguments: str = ""


class Call(Struct, frozen=True):
    """A call in the history."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    """One message of the history."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class Function(Struct, frozen=True):
    """What can be called."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct, frozen=True):
    """A tool."""

    function: Function
    type: Literal["function"] = "function"


class ChosenFunction(Struct, frozen=True):
    """By name."""

    name: Name


class Choice(Struct, frozen=True):
    """The tool that must be called."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class StreamOptions(Struct, frozen=True):
    """include_usage: a last event with the counts."""

    include_usage: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """text is the only one."""

    type: str = "text"


class ChatRequest(Struct, frozen=True):
    """POST /v1/chat/completions."""

    model: Annotated[str, Meta(max_length=256)]
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | Choice | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None


def encode(value: Any) -> bytes:
    """JSON."""
    return msgspec.json.encode(value)


def event(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
