"""A request in Etude's own words, whichever API it came by, and the digests that name a conversation by its meaning.

    OpenAI chat, OpenAI responses, Anthropic messages, agent  -->  Ask  -->  Turn (turn.py)

Two spellings of one conversation have one digest: JSON's order and spaces, `null` for empty, parts for text, 1.0 for 1.
The digest after each reply is a link of a chain that begins with whose conversation it is and with the tools in it: a
conversation of another key has no digest in common. What it does not do: look at ids (memory.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from etude.protocols import Message, Owner
from etude.types import ToolCall, ToolResult, Version

_encoder = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants said next."""

    api: str
    """openai, anthropic or agent."""
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """name, description, parameters (JSON schema)."""
    choice: str = "auto"
    """auto, none, required, or `=NAME` of the tool to call."""
    max_tokens: int | None = None
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    session: str = ""
    """The client's name for the session; empty: found by history."""
    ignored: tuple[str, ...] = ()
    """Options that were left out."""
    custom: frozenset[str] = frozenset()
    """Tools whose one argument, `input`, goes out as plain text (responses)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Which versions may answer, and what else the headers say."""

    min_step: int | None = None
    exact: Version | None = None
    session: str = ""
    repository: str = ""


def scope_of(owner: Owner) -> bytes:
    """Whose: the first link of every chain."""
    return _digest(b"", [owner.tenant, owner.user])


def chain(scope: bytes, tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[bytes]:
    """[len(messages)] digests: entry i names the conversation up to and including message i."""
    link = _digest(scope, plain(list(tools)))
    found = []
    for message in messages:
        link = link_of(link, message)
        found.append(link)
    return found


def link_of(before: bytes, message: Message) -> bytes:
    """The next link. Spaces around a reply do not count: many clients trim them."""
    text = message.text.strip() if message.role == "assistant" else message.text
    calls = [[call.name, plain(call.arguments)] for call in message.calls]
    return _digest(before, [message.role, text, calls, [result.text for result in message.results]])


def last_reply(messages: Sequence[Message]) -> int | None:
    """Place of the last reply."""
    return next((n for n in reversed(range(len(messages))) if messages[n].role == "assistant"), None)


def plain(value: Any) -> Any:
    """JSON by its meaning: whole numbers are integers."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value


def in_order(calls: Sequence[str], answers: Sequence[tuple[str, str]]) -> tuple[ToolResult, ...]:
    """Results of the calls with these ids, from (id, text) in any order.

    A call that nobody answered has an empty result where a later one has one; answers to no call come last.
    """
    given = dict(answers)
    known = [given.pop(name, None) for name in calls]
    while known and known[-1] is None:
        known.pop()
    return tuple(ToolResult(text=text or "") for text in (*known, *given.values()))


def said(text: str, calls: Sequence[ToolCall]) -> Message:
    """A reply as the client will send it back."""
    return Message(role="assistant", text=text, calls=tuple(calls))


def _digest(before: bytes, value: Any) -> bytes:
    state = hashlib.blake2b(before, digest_size=16)
    state.update(_encoder.encode(value))
    return state.digest()
