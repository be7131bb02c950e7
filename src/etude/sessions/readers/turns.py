"""A conversation under construction: what was said and answered, in order, becomes served turns.

user(text), call results --> pending messages --+
say(text), call(...) --> the open reply --------+--> finish() --> ServedTurn
open_context(...) begins another window with all of its messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.protocols import Message, Owner, Reply, RepositoryState, ServedTurn
from etude.types import Effort, Opened, StopReason, ToolCall, ToolErrorKind, ToolResult, digest_of

_LOST = ToolResult(text="", error=ToolErrorKind.USER_ABORTED)
"""Stands for the answer to a call that has none in the log."""


@dataclass(slots=True)
class OpenReply:
    """What the model is saying."""

    native_id: str
    started_at: float
    ended_at: float
    model: str = ""
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    stop: StopReason = StopReason.END
    output_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.calls and not any(text.strip() for text in self.texts)


@dataclass(slots=True)
class Window:
    """One context: its steps so far, and what is said but not answered."""

    number: int
    opened: Opened | None
    """Set until the first reply."""
    pending: list[Message] = field(default_factory=list)
    steps: list[tuple[list[Message], Message]] = field(default_factory=list)
    reply: OpenReply | None = None
    last_ids: list[str] = field(default_factory=list)
    """Of the calls of the last finished reply."""
    results: dict[str, ToolResult] = field(default_factory=dict)
    """Answers to the calls of the open or last reply, by id."""


class Conversation:
    """Of one session. Windows are numbered in the order in which they are opened."""

    def __init__(self, session_id: str, owner: Owner, source: str, *, at: float) -> None:
        """at: when it began, for turns without a time of their own."""
        self.session_id, self.owner, self.source, self.at = session_id, owner, source, at
        self.model = ""
        self.repository: RepositoryState | None = None
        self.windows: list[Window] = []
        self._numbers = 0

    def open(self, opened: Opened, messages: Sequence[Message] = ()) -> Window:
        """Another window, which begins with these messages."""
        window = Window(len(self.windows), opened, list(messages))
        self.windows.append(window)
        return window

    def history(self, window: Window, steps: int) -> list[Message]:
        """All that was said in a window up to so many replies."""
        found: list[Message] = []
        for messages, reply in window.steps[:steps]:
            found += [*messages, reply]
        return found

    def user(self, window: Window, text: str, role: str = "user") -> None:
        """Something that the next request says."""
        if text:
            self._settle(window)
            window.pending.append(Message(role=role, text=text))

    def answer(self, window: Window, call_id: str, result: ToolResult) -> bool:
        """The answer to a call of the open or the last reply; False: nobody made that call."""
        known = window.reply.call_ids if window.reply is not None else []
        if call_id not in known and call_id not in window.last_ids:
            return False
        window.results[call_id] = result
        return True

    def reply(self, window: Window, native_id: str, at: float | None) -> OpenReply:
        """The open reply of that id, or a new one; then what was said before it is its request."""
        if window.reply is None:
            self._settle(window)
            start = self.at if at is None else at
            window.reply = OpenReply(native_id, start, start, self.model)
        if at is not None:
            window.reply.ended_at = max(window.reply.ended_at, at)
        return window.reply

    def call(self, reply: OpenReply, call_id: str, name: str, arguments: Mapping[str, Any], error: str | None) -> None:
        reply.calls.append(ToolCall(name=name, arguments=dict(arguments), error=error))
        reply.call_ids.append(call_id)

    def finish(self, window: Window) -> ServedTurn | None:
        """The open reply as a turn; None if there is none or nothing is in it."""
        reply = window.reply
        if reply is None:
            return None
        window.reply = None
        if reply.is_empty:
            return None
        text = "\n\n".join(text for text in reply.texts if text.strip())
        messages, window.pending = window.pending, []
        window.steps.append((messages, Message(role="assistant", text=text, calls=tuple(reply.calls))))
        window.last_ids = reply.call_ids
        opened, window.opened = window.opened, None
        number, self._numbers = self._numbers, self._numbers + 1
        owner = self.owner
        turn_id = digest_of(self.source, owner.tenant, owner.user, self.session_id, str(window.number),
                            str(len(window.steps)), reply.native_id)  # fmt: skip
        effort = Effort(message_tokens=reply.output_tokens, calls=len(reply.calls), turns=1)
        return ServedTurn(
            turn_id=turn_id, session_id=self.session_id, number=number, owner=owner, source=self.source,
            model=reply.model or self.model, started_at=reply.started_at, first_token_s=None,
            wall_s=reply.ended_at - reply.started_at, messages=tuple(messages),
            reply=Reply(text=text, calls=tuple(reply.calls), stop=reply.stop, effort=effort, span=None),
            context=window.number, opened=opened, repository=self.repository,
        )  # fmt: skip

    def _settle(self, window: Window) -> None:
        """Answers to the last reply's calls stand before whatever comes next, in the order of the calls."""
        if window.last_ids:
            results = tuple(window.results.get(call_id, _LOST) for call_id in window.last_ids)
            window.pending.append(Message(role="tool", results=results))
            window.last_ids, window.results = [], {}


def result_of(text: str, *, is_error: bool) -> ToolResult:
    """A tool's answer as the model read it."""
    return ToolResult(text=text, error=ToolErrorKind.UNEXPECTED_ENVIRONMENT if is_error else None)
