"""OpenCode: `opencode export` files, and its storage folder of sessions, messages and parts.

    export    {"info": session, "messages": [{"info": message, "parts": [part, ...]}, ...]}
    storage   session/PROJECT/SES.json, message/SES/MSG.json, part/MSG/PRT.json
              (before: session/info/SES.json, session/message/SES/MSG.json, session/part/SES/MSG/PRT.json)

A message of the assistant may hold several steps, each a reply with its calls; their results are in the same parts.
After a summary the conversation goes on from it. Reasoning is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.errors import SessionError
from etude.protocols import Message, Owner, RepositoryState, ServedTurn
from etude.sessions.readers.json_lines import Record, arguments_of, at, number_at, objects, text_at, time_at, whole
from etude.sessions.readers.turns import Conversation, Window, result_of
from etude.types import Opened, StopReason, ToolErrorKind, ToolResult

SOURCE = "opencode"
_STOPS = {"length": StopReason.LENGTH}


def is_log(path: Path, head: bytes) -> bool:
    """Whether a file is an export or a session of the storage; messages and parts belong to their session."""
    if path.suffix != ".json":
        return False
    if path.name.startswith("ses"):
        return "session" in path.parts and not {"message", "part"} & set(path.parts) and b'"time"' in head
    return b'"info"' in head and b'"messages"' in head and (b'"sessionID"' in head or b'"projectID"' in head)


def read(path: Path, owner: Owner, skipped: Counter[str]) -> Iterator[ServedTurn]:
    """The turns of one session."""
    value = whole(path)
    if not isinstance(value, dict):
        raise SessionError(f"{path} is no session of OpenCode", cause="it is no object")
    if isinstance(value.get("messages"), list):
        info = value["info"] if isinstance(value.get("info"), dict) else {}
        messages = objects(value["messages"])
    else:
        info, messages = value, list(_stored(path, text_at(value, "id") or path.stem, skipped))
    start = time_at(info, "time", "created")
    talk = Conversation(text_at(info, "id") or path.stem, owner, SOURCE, at=start or path.stat().st_mtime)
    root = text_at(info, "directory").replace("\\", "/").rstrip("/").rpartition("/")[2]
    if root:
        talk.repository = RepositoryState(root=root, commit="")
    reader = _Reader(talk, Opened.SUBAGENT if text_at(info, "parentID") else Opened.TASK, skipped)
    for message in messages:
        yield from reader.take(message)


def _stored(path: Path, session_id: str, skipped: Counter[str]) -> Iterator[Record]:
    """Messages of a storage folder, with their parts."""
    if "/" in session_id or session_id in ("", ".", ".."):
        skipped["session with a strange name"] += 1
        return
    storage = path.parents[2]
    old = path.parent.name == "info"
    folder = path.parents[1] / "message" / session_id if old else storage / "message" / session_id
    for file in sorted(folder.glob("*.json")):
        info = _object(file, skipped)
        if info is None:
            continue
        name = text_at(info, "id") or file.stem
        if "/" in name or name in (".", ".."):
            skipped["message with a strange name"] += 1
            continue
        parts = path.parents[1] / "part" / session_id / name if old else storage / "part" / name
        found = [part for part in (_object(one, skipped) for one in sorted(parts.glob("*.json"))) if part is not None]
        yield {"info": info, "parts": found or info.get("parts")}


def _object(path: Path, skipped: Counter[str]) -> Record | None:
    try:
        value = whole(path)
    except SessionError:
        skipped["broken JSON"] += 1
        return None
    if isinstance(value, dict):
        return value
    skipped["not an object"] += 1
    return None


class _Reader:
    def __init__(self, talk: Conversation, opened: Opened, skipped: Counter[str]) -> None:
        self.talk, self.skipped = talk, skipped
        self.window: Window = talk.open(opened)

    def take(self, message: Record) -> Iterator[ServedTurn]:
        info, parts = message.get("info", message), objects(message.get("parts"))
        role = text_at(info, "role")
        if role == "user":
            self._user(parts)
        elif role == "assistant":
            yield from self._assistant(info, parts)
        else:
            self.skipped[f"message of {role[:40] or 'nobody'}"] += 1

    def _user(self, parts: list[Record]) -> None:
        for part in parts:
            kind = text_at(part, "type")
            if kind == "text" and part.get("ignored") is not True:
                self.talk.user(self.window, text_at(part, "text"))
            elif kind == "file":
                self.talk.user(self.window, f"[file {text_at(part, 'filename')}]")
            else:
                self.skipped[f"part {kind[:40]}"] += 1

    def _assistant(self, info: Record, parts: list[Record]) -> Iterator[ServedTurn]:
        talk = self.talk
        talk.model = text_at(info, "modelID") or talk.model
        name = text_at(info, "id")
        is_summary = info.get("summary") is True
        steps = 0
        for part in parts:
            kind = text_at(part, "type")
            if kind == "step-start":
                yield from self._finish()
                steps += 1
            elif kind in ("text", "tool"):
                moment = time_at(info, "time", "created") if steps < 2 else _time(part)
                reply = talk.reply(self.window, f"{name}/{steps}", moment)
                if kind == "text":
                    reply.texts.append(text_at(part, "text"))
                else:
                    self._tool(part)
                end = time_at(part, "state", "time", "end") or time_at(part, "time", "end")
                reply.ended_at = max(reply.ended_at, end or 0.0)
            elif kind == "step-finish":
                self._note(part)
            else:
                self.skipped[f"part {kind[:40]}"] += 1
        if self.window.reply is not None:
            if text_at(info, "error", "name") == "MessageAbortedError":
                self.window.reply.stop = StopReason.CANCELLED
            self.window.reply.stop = _STOPS.get(text_at(info, "finish"), self.window.reply.stop)
        yield from self._finish()
        if is_summary and self.window.steps:
            text = self.window.steps[-1][1].text
            self.window = talk.open(Opened.SUMMARY, [Message(role="assistant", text=text)])

    def _tool(self, part: Record) -> None:
        state = at(part, "state")
        arguments, error = arguments_of(at(state, "input"))
        reply, call_id = self.window.reply, text_at(part, "callID") or text_at(part, "id")
        assert reply is not None
        self.talk.call(reply, call_id, text_at(part, "tool"), arguments, error)
        status = text_at(state, "status")
        if status == "completed":
            self.talk.answer(self.window, call_id, result_of(text_at(state, "output"), is_error=False))
        elif status == "error":
            self.talk.answer(self.window, call_id, result_of(text_at(state, "error"), is_error=True))
        else:
            lost = ToolResult(text="", error=ToolErrorKind.USER_ABORTED)
            self.talk.answer(self.window, call_id, lost)

    def _note(self, part: Record) -> None:
        if self.window.reply is not None:
            self.window.reply.output_tokens = int(number_at(part, "tokens", "output") or 0)
            self.window.reply.stop = _STOPS.get(text_at(part, "reason"), self.window.reply.stop)

    def _finish(self) -> Iterator[ServedTurn]:
        turn = self.talk.finish(self.window)
        if turn is not None:
            yield turn


def _time(part: Any) -> float | None:
    return time_at(part, "time", "start") or time_at(part, "state", "time", "start")
