"""A chat format for tests: one id a character, `=` ends a reply, calls are lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from etude.data.render import Parsed
from etude.protocols import Message
from etude.types import ToolCall

END = ord("=")


def ids(text: str) -> list[int]:
    return [ord(char) for char in text]


class TextRenderer:
    stop_ids: tuple[int, ...] = (END,)

    def open(self, messages: Sequence[Message]) -> np.ndarray:
        return np.array(ids("".join(f"[{message.role}]{message.text}" for message in messages) + "[assistant]"))

    def follow(self, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]) -> np.ndarray:
        texts = [f"[tool]{result.text}" for message in new for result in message.results]
        return np.array(ids("".join(texts) + "[assistant]"))

    def parse(self, tokens: Sequence[int] | np.ndarray) -> Parsed:
        text, *lines = "".join(chr(token) for token in tokens).removesuffix("=").split("\n")
        calls = []
        for line in lines:
            try:
                name, arguments = json.loads(line)
                calls.append(ToolCall(name=name, arguments=arguments))
            except ValueError:
                calls.append(ToolCall(name="", arguments={}, error="not JSON"))
        size = len(tokens)
        return Parsed(
            text=text,
            calls=tuple(calls),
            thinking_tokens=len(text) if calls else 0,
            call_tokens=size - len(text) if calls else 0,
            message_tokens=0 if calls else size,
        )


def spoken(text: str, *calls: ToolCall) -> list[int]:
    """A reply as this format spells it."""
    lines = [json.dumps([call.name, dict(call.arguments)]) for call in calls]
    return ids("\n".join([text, *lines]) + "=")
