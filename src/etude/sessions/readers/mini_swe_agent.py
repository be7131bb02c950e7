"""mini-swe-agent: trajectories, `*.traj.json`.

at first   a list of messages: role, content
v1         {"info", "messages", "trajectory_format": "mini-swe-agent-1"}: a command is a fenced block in the content
v2         "mini-swe-agent-1.1": calls in `tool_calls`, results with role tool; or whole answers of the Responses
           API among the messages, with results as function_call_output; last a message of role exit
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import SessionError
from etude.protocols import Owner, ServedTurn
from etude.sessions.readers.json_lines import Record, arguments_of, at, number_at, objects, text_at, time_at, whole
from etude.sessions.readers.turns import Conversation, OpenReply, Window, result_of
from etude.types import Opened, StopReason, digest_of

SOURCE = "mini-swe-agent"
_BLOCK = re.compile(r"```(?:bash|mswea_bash_command)\s*\n(.*?)\n```", re.DOTALL)
_STOPS = {"length": StopReason.LENGTH}


def is_log(path: Path, head: bytes) -> bool:
    """Whether a file looks like one of these logs."""
    return path.name.endswith(".traj.json") or (path.suffix == ".json" and b'"mini-swe-agent-1' in head)


def read(path: Path, owner: Owner, skipped: Counter[str]) -> Iterator[ServedTurn]:
    """The turns of one file."""
    value = whole(path)
    info = value if isinstance(value, dict) else {}
    messages = objects(info.get("messages") if info else value)
    if not messages:
        raise SessionError(f"{path} is no trajectory", cause="it has no messages")
    opening = digest_of(*(str(message.get("content")) for message in messages[:3]))
    session_id = f"{path.name.removesuffix('.json').removesuffix('.traj')}-{opening[:12]}"
    talk = Conversation(session_id, owner, SOURCE, at=path.stat().st_mtime)
    talk.model = text_at(info, "info", "config", "model", "model_name")
    reader = _Reader(talk, skipped)
    for message in messages:
        yield from reader.take(message)
    yield from reader.finish()


class _Reader:
    def __init__(self, talk: Conversation, skipped: Counter[str]) -> None:
        self.talk, self.skipped = talk, skipped
        self.window: Window = talk.open(Opened.TASK)
        self.count = 0

    def finish(self) -> Iterator[ServedTurn]:
        turn = self.talk.finish(self.window)
        if turn is not None:
            yield turn

    def take(self, message: Record) -> Iterator[ServedTurn]:
        role = text_at(message, "role")
        if role == "assistant" or text_at(message, "object") == "response":
            yield from self.finish()
            self._assistant(message)
        elif role == "tool" or text_at(message, "type") == "function_call_output":
            call_id = text_at(message, "tool_call_id") or text_at(message, "call_id")
            output = message.get("content") if role == "tool" else message.get("output")
            failed = bool(text_at(message, "extra", "exception_info"))
            if not self.talk.answer(self.window, call_id, result_of(_text(output), is_error=failed)):
                self.skipped["result without a call"] += 1
        elif role in ("user", "system", "developer"):
            yield from self._user(role, _text(message.get("content")))
        else:
            self.skipped[f"message of {role[:40] or 'nobody'}"] += 1

    def _user(self, role: str, text: str) -> Iterator[ServedTurn]:
        """In the first formats the answer to a command is the user's next message."""
        reply = self.window.reply
        if role == "user" and reply is not None and reply.call_ids[:1] and reply.call_ids[0].startswith("block-"):
            self.talk.answer(self.window, reply.call_ids[0], result_of(text, is_error=False))
            yield from self.finish()
            return
        yield from self.finish()
        self.talk.user(self.window, text, "system" if role == "developer" else role)

    def _assistant(self, message: Record) -> None:
        moment = time_at(message, "extra", "timestamp") or time_at(message, "created_at")
        reply = self.talk.reply(self.window, str(self.count), moment)
        self.count += 1
        response = message if text_at(message, "object") == "response" else at(message, "extra", "response")
        reply.model = text_at(response, "model") or self.talk.model
        usage = at(response, "usage")
        reply.output_tokens = int(number_at(usage, "completion_tokens") or number_at(usage, "output_tokens") or 0)
        choices = objects(at(response, "choices"))
        reply.stop = _STOPS.get(text_at(choices[0], "finish_reason"), reply.stop) if choices else reply.stop
        if text_at(message, "object") == "response":
            self._response(reply, message)
            return
        text = _text(message.get("content"))
        reply.texts.append(text)
        calls = objects(message.get("tool_calls"))
        for call in calls:
            arguments, error = arguments_of(at(call, "function", "arguments"))
            self.talk.call(reply, text_at(call, "id"), text_at(call, "function", "name"), arguments, error)
        if not calls:
            for number, command in enumerate(_BLOCK.findall(text)[:1]):
                self.talk.call(reply, f"block-{self.count}-{number}", "bash", {"command": command.strip()}, None)

    def _response(self, reply: OpenReply, message: Record) -> None:
        for item in objects(message.get("output")):
            kind = text_at(item, "type")
            if kind == "message":
                reply.texts.append(_text(item.get("content")))
            elif kind == "function_call":
                arguments, error = arguments_of(item.get("arguments"))
                self.talk.call(reply, text_at(item, "call_id"), text_at(item, "name"), arguments, error)
            else:
                self.skipped[f"item {kind[:40]}"] += 1


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(text_at(part, "text") for part in objects(content))
