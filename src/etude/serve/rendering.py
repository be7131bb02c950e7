"""Conversations to ids for the server: a renderer for each list of tools, long texts in a thread, forced calls.

tool_choice: where a call must be made, the reply begins with the ids that every such call begins with in this format,
found by writing two calls that share nothing else. What it does not do: constrain what follows them.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from etude.data.render import Renderer
from etude.errors import ModelError
from etude.protocols import Message
from etude.serve.conversation import Ask
from etude.serve.refusal import Refusal, refusal_of
from etude.types import ToolCall, ToolResult

T = TypeVar("T")
_KEPT = 256
"""Renderers, one for each list of tools."""
_LONG_CHARS = 20_000
"""A longer text is encoded in a thread: it would keep all other requests waiting."""


class Chat(Protocol):
    """data.formats.ChatFormat, or a scripted one in tests."""

    max_context: int

    def renderer(self, tools: Sequence[Mapping[str, Any]]) -> Renderer: ...


class Rendering:
    """One server's."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._renderers: OrderedDict[bytes, Renderer] = OrderedDict()
        self.max_context = chat.max_context

    async def renderer(self, tools: Sequence[Mapping[str, Any]]) -> Renderer:
        """Errors: Refusal if the format cannot speak of these tools."""
        key = msgspec.json.encode(tools)
        found = self._renderers.get(key)
        if found is None:
            try:
                found = self._chat.renderer(tools)
            except ModelError as error:
                raise refusal_of(error) from error
            self._renderers[key] = found
            if len(self._renderers) > _KEPT:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return found

    async def open(self, renderer: Renderer, messages: Sequence[Message]) -> np.ndarray:
        """Errors: Refusal if the format cannot write them."""
        return await _written(messages, functools.partial(renderer.open, messages))

    async def follow(
        self, renderer: Renderer, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]
    ) -> np.ndarray | None:
        """Errors: Refusal if the format cannot write them."""
        return await _written(new, functools.partial(renderer.follow, window, start, reply, new))

    def forced(self, renderer: Renderer, ask: Ask) -> list[int]:
        """The ids that the reply must begin with. Errors: Refusal if this format cannot begin a reply with a call."""
        if ask.choice in ("auto", "none"):
            return []
        names = [ask.choice[1:]] if ask.choice.startswith("=") else [str(tool["name"]) for tool in ask.tools]
        spelled = [_call_ids(renderer, ask.tools, names[place], text) for place, text in ((0, "a"), (-1, "0"))]
        same = next((n for n, (a, b) in enumerate(zip(*spelled, strict=False)) if a != b), 0)
        if not same:
            raise Refusal(400, "this model's format cannot begin a reply with a call", param="tool_choice")
        return spelled[0][:same]


def _call_ids(renderer: Renderer, tools: Sequence[Mapping[str, Any]], name: str, text: str) -> list[int]:
    """A reply that is a call of `name`, whose arguments begin in another way than those with another `text`."""
    question = [Message(role="user", text="?")]
    answer = Message(role="tool", results=(ToolResult(text="?"),))
    prompt = renderer.open(question).tolist()
    parameters = next((tool.get("parameters") or {} for tool in tools if tool["name"] == name), {})
    for arguments in ({text: text}, dict.fromkeys(parameters.get("properties") or {}, text)):
        call = ToolCall(name=name, arguments=arguments)
        try:
            whole = renderer.open([*question, Message(role="assistant", calls=(call,)), answer]).tolist()
        except KeyError:  # a format that knows its tools writes their own arguments alone
            continue
        if whole[: len(prompt)] == prompt:
            return [int(token) for token in whole[len(prompt) :]]
    return []


async def _written(messages: Sequence[Message], write: Callable[[], T]) -> T:
    size = sum(len(message.text) + sum(len(result.text) for result in message.results) for message in messages)
    try:
        return await asyncio.to_thread(write) if size > _LONG_CHARS else write()
    except ModelError as error:
        raise refusal_of(error) from error
    except KeyError as error:
        words = str(error.args[0]) if error.args else "a call"
        raise Refusal(400, f"this model's format cannot write the history: {words}", param="messages") from error
