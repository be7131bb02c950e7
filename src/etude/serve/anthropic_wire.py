"""What Anthropic's messages take: the request's shape, checked as it is decoded.

Fields that are not named here are passed over. What it does not do: judge what they ask (anthropic_messages.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from etude.serve.openai_wire import Count, Share


class TextBlock(Struct, frozen=True):
    """A piece of text, inside a result or the system's words."""

    type: str
    text: str = ""


class Block(Struct, frozen=True):
    """A piece of a message: text, tool_use, tool_result; thinking is passed over."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class InputMessage(Struct, frozen=True):
    """One message of the history. Some clients put the system's words among them."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolParam(Struct, frozen=True):
    """A tool of the client. Tools that the server would run (a `type` of their own) are refused."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoice(Struct, frozen=True):
    """auto, any, none, or tool with its name."""

    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class CountRequest(Struct, frozen=True):
    """POST /v1/messages/count_tokens."""

    model: Annotated[str, Meta(max_length=256)]
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    temperature: Share | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
