"""Claude Code: ~/.claude/projects/FOLDER/SESSION.jsonl, and agent-*.jsonl for subagents.

A record a line: `user` and `assistant` records hold a message of the Anthropic API, `system` ones notices. One reply is
written as several records, a block each, which share the message's id. Records form a tree by `parentUuid`: typing
again after going back makes a branch, which is a context of its own here. After a `compact_boundary` the conversation
goes on from a summary. Thinking is not kept: a turn has no place for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.protocols import Owner, RepositoryState, ServedTurn
from etude.sessions.readers.json_lines import Record, arguments_of, at, number_at, objects, records, text_at, time_at
from etude.sessions.readers.turns import Conversation, Window, result_of
from etude.types import Opened, StopReason

SOURCE = "claude-code"
_STOPS = {"max_tokens": StopReason.LENGTH, "model_context_window_exceeded": StopReason.CONTEXT}


def is_log(path: Path, head: bytes) -> bool:
    """Whether a file looks like one of these logs."""
    return path.suffix == ".jsonl" and b'"sessionId"' in head and (b'"parentUuid"' in head or b'"leafUuid"' in head)


def read(path: Path, owner: Owner, skipped: Counter[str]) -> Iterator[ServedTurn]:
    """The turns of one file; a subagent's file is a session of its own, named after its parent."""
    reader = _Reader(path, owner, skipped)
    for record in records(path, skipped):
        yield from reader.take(record)
    yield from reader.end()


class _Reader:
    def __init__(self, path: Path, owner: Owner, skipped: Counter[str]) -> None:
        self.path, self.owner, self.skipped = path, owner, skipped
        self.talk: Conversation | None = None
        self.places: dict[str, tuple[Window, int]] = {}
        """Record -> its window, and how many replies that had then."""
        self.messages: dict[str, Window] = {}
        """A reply's id -> the window that it is in."""
        self.current: Window | None = None
        self.is_compacted = False

    def take(self, record: Record) -> Iterator[ServedTurn]:
        kind = text_at(record, "type")
        if kind == "system" and text_at(record, "subtype") == "compact_boundary":
            self.is_compacted = True
            return
        if kind not in ("user", "assistant") or not isinstance(at(record, "message"), dict):
            self.skipped[f"record {kind[:40] or 'without a kind'}"] += 1
            return
        if at(record, "isApiErrorMessage") is True:
            self.skipped["record of an API error"] += 1
            return
        talk = self._conversation(record)
        if kind == "assistant":
            yield from self._assistant(talk, record)
        else:
            yield from self._user(talk, record)

    def end(self) -> Iterator[ServedTurn]:
        for window in self.talk.windows if self.talk else ():
            yield from self._finish(window)

    def _conversation(self, record: Record) -> Conversation:
        if self.talk is None:
            session_id = text_at(record, "sessionId") or self.path.stem
            if self.path.stem.startswith("agent-"):
                session_id = f"{session_id}/{self.path.stem}"
            at_s = time_at(record, "timestamp")
            self.talk = Conversation(session_id, self.owner, SOURCE, at=self._modified() if at_s is None else at_s)
            folder, branch = text_at(record, "cwd"), text_at(record, "gitBranch")
            if folder:
                root = folder.replace("\\", "/").rstrip("/").rpartition("/")[2]
                self.talk.repository = RepositoryState(root=root, commit="", branch=branch)
        return self.talk

    def _modified(self) -> float:
        return self.path.stat().st_mtime

    def _finish(self, window: Window) -> Iterator[ServedTurn]:
        turn = self.talk.finish(window) if self.talk else None
        if turn is not None:
            yield turn

    def _window(self, talk: Conversation, record: Record, *, may_fork: bool) -> Window:
        """The window that the record belongs to: its parent's, or a new one."""
        parent = text_at(record, "parentUuid")
        is_subagent = at(record, "isSidechain") is True
        place = self.places.get(parent)
        if place is not None:
            window, steps = place
            if may_fork and len(window.steps) + (window.reply is not None) > steps:
                return talk.open(Opened.FORK, talk.history(window, steps))
            return window
        if self.is_compacted and not is_subagent:
            self.is_compacted = False
            return talk.open(Opened.SUMMARY)
        if is_subagent and not parent:
            return talk.open(Opened.SUBAGENT)
        if self.current is None:
            return talk.open(Opened.SUBAGENT if is_subagent else Opened.TASK)
        if parent:
            self.skipped["parent is missing"] += 1
            return self.current
        return talk.open(Opened.TASK)

    def _place(self, record: Record, window: Window) -> None:
        self.current = window
        if uuid := text_at(record, "uuid"):
            self.places[uuid] = (window, len(window.steps) + (window.reply is not None))

    def _user(self, talk: Conversation, record: Record) -> Iterator[ServedTurn]:
        content = at(record, "message", "content")
        texts, results = _blocks(content, self.skipped)
        window = self._window(talk, record, may_fork=bool(texts) and not results)
        if texts and window.reply is not None:
            yield from self._finish(window)
        for call_id, text, is_error in results:
            if not talk.answer(window, call_id, result_of(text, is_error=is_error)):
                self.skipped["result without a call"] += 1
        for text in texts:
            talk.user(window, text)
        self._place(record, window)

    def _assistant(self, talk: Conversation, record: Record) -> Iterator[ServedTurn]:
        message: Record = record["message"]
        message_id = text_at(message, "id") or text_at(record, "uuid")
        window = self.messages.get(message_id)
        if window is None or window.reply is None or window.reply.native_id != message_id:
            window = self._window(talk, record, may_fork=False)
            yield from self._finish(window)
        self.messages[message_id] = window
        reply = talk.reply(window, message_id, time_at(record, "timestamp"))
        reply.model = text_at(message, "model")
        reply.stop = _STOPS.get(text_at(message, "stop_reason"), reply.stop)
        reply.output_tokens = int(number_at(message, "usage", "output_tokens") or reply.output_tokens)
        content = at(message, "content")
        if isinstance(content, str):
            reply.texts.append(content)
        for block in objects(content):
            kind = text_at(block, "type")
            if kind == "text":
                reply.texts.append(text_at(block, "text"))
            elif kind == "tool_use":
                arguments, error = arguments_of(at(block, "input"))
                talk.call(reply, text_at(block, "id"), text_at(block, "name"), arguments, error)
            else:
                self.skipped[f"block {kind[:40]}"] += 1
        self._place(record, window)


def _blocks(content: Any, skipped: Counter[str]) -> tuple[list[str], list[tuple[str, str, bool]]]:
    """Texts of a user's message, and results in it: call, text, whether it failed."""
    if isinstance(content, str):
        return [content], []
    texts, results = [], []
    for block in objects(content):
        kind = text_at(block, "type")
        if kind == "text":
            texts.append(text_at(block, "text"))
        elif kind == "tool_result":
            inner = at(block, "content")
            text = inner if isinstance(inner, str) else "\n".join(text_at(part, "text") for part in objects(inner))
            results.append((text_at(block, "tool_use_id"), text, at(block, "is_error") is True))
        else:
            skipped[f"block {kind[:40]}"] += 1
    return [text for text in texts if text], results
