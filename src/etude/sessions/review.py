"""A recorded session as a person looks at it: what was said, what was called, what was taken out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from etude.protocols import Message, ServedTurn
from etude.sessions.found import StoredTurn
from etude.types import ToolCall

MAX_CHARS = 1200
"""Of one text that are shown."""


def turn_lines(stored: StoredTurn) -> Iterator[tuple[str, str]]:
    """(kind, text) of what to show of a turn, in order. Kinds: head, user, tool, call, reply, redacted."""
    turn = stored.turn
    yield "head", f"turn {turn.number}  {turn.turn_id}  {turn.model}"
    for message in turn.messages:
        yield from _message(message)
    if turn.reply.text:
        yield "reply", _cut(turn.reply.text)
    yield from (("call", _call(call)) for call in turn.reply.calls)
    if stored.redacted:
        yield "redacted", found_text(stored.redacted)


def turn_row(stored: StoredTurn) -> dict[str, object]:
    """For scripts."""
    turn = stored.turn
    return {"session": turn.session_id, "tenant": turn.owner.tenant, "user": turn.owner.user, "turn": turn.turn_id,
            "number": turn.number, "source": turn.source, "model": turn.model, "started_at": turn.started_at,
            "consent": str(turn.owner.consent), "prompt": _prompt(turn), "reply": _cut(turn.reply.text),
            "calls": [call.name for call in turn.reply.calls], "has_tokens": turn.tokens is not None,
            "redacted": dict(stored.redacted)}  # fmt: skip


def found_text(found: Mapping[str, int]) -> str:
    """What was taken out, by mark; `tokens` counts turns whose exact ids had to go too."""
    return ", ".join(f"{number} {mark}" for mark, number in sorted(found.items()))


def _message(message: Message) -> Iterator[tuple[str, str]]:
    if message.text:
        yield "user" if message.role != "assistant" else "reply", f"{message.role}: {_cut(message.text)}"
    yield from (("call", _call(call)) for call in message.calls)
    yield from (("tool", _cut(result.text)) for result in message.results if result.text)


def _call(call: ToolCall) -> str:
    return _cut(f"{call.name} " + ", ".join(f"{name}={value!r}" for name, value in call.arguments.items()))


def _prompt(turn: ServedTurn) -> str:
    return _cut(next((message.text for message in turn.messages if message.role == "user"), ""))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text) - MAX_CHARS} characters more)"
