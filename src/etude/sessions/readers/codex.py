"""Codex CLI: ~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl, in its three generations.

    2025-09 on   {"timestamp", "type": session_meta | turn_context | response_item | event_msg | compacted, "payload"}
    before       a first line with id, timestamp and git, then bare items, among them {"record_type": "state"}
    at first     one JSON object {"session", "items"} in rollout-*.json

A reply is what the model says between two inputs: messages and calls one after the other. Reasoning is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from etude.errors import SessionError
from etude.protocols import Message, Owner, RepositoryState, ServedTurn
from etude.sessions.readers.json_lines import (
    Record,
    arguments_of,
    at,
    number_at,
    objects,
    records,
    text_at,
    time_at,
    whole,
)
from etude.sessions.readers.turns import Conversation, Window, result_of
from etude.types import Opened, StopReason, ToolResult

SOURCE = "codex"
_ITEMS = {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
          "local_shell_call", "local_shell_call_output", "web_search_call"}  # fmt: skip


def is_log(path: Path, head: bytes) -> bool:
    """Whether a file looks like one of these logs."""
    if path.suffix == ".jsonl":
        first = head.split(b"\n", 1)[0]
        return b'"session_meta"' in first or (
            path.name.startswith("rollout-") and b'"id"' in first and b'"timestamp"' in first
        )
    return path.suffix == ".json" and path.name.startswith("rollout-") and b'"session"' in head


def read(path: Path, owner: Owner, skipped: Counter[str]) -> Iterator[ServedTurn]:
    """The turns of one file."""
    reader = _Reader(path, owner, skipped)
    for record in _records(path, skipped):
        yield from reader.take(record)
    yield from reader.finish()


def _records(path: Path, skipped: Counter[str]) -> Iterable[Record]:
    if path.suffix != ".json":
        return records(path, skipped)
    value = whole(path)
    if not isinstance(value, dict) or not isinstance(value.get("items"), list):
        raise SessionError(f"{path} is no log of Codex", cause="it has no items")
    session = value.get("session")
    return [session if isinstance(session, dict) else {}, *objects(value["items"])]


class _Reader:
    def __init__(self, path: Path, owner: Owner, skipped: Counter[str]) -> None:
        self.path, self.skipped = path, skipped
        self.talk = Conversation(path.stem, owner, SOURCE, at=path.stat().st_mtime)
        self.window: Window = self.talk.open(Opened.TASK)
        self.prompts: list[int] = []
        """Replies before each of the user's prompts, in the window at hand."""
        self.has_meta = False

    def take(self, record: Record) -> Iterator[ServedTurn]:
        kind, payload = text_at(record, "type"), at(record, "payload")
        moment = time_at(record, "timestamp")
        if isinstance(payload, dict):
            if kind == "response_item":
                yield from self._item(payload, moment)
            elif kind == "session_meta":
                self._meta(payload)
            elif kind == "turn_context":
                self.talk.model = text_at(payload, "model") or self.talk.model
            elif kind == "compacted":
                yield from self._compacted(payload)
            elif kind == "event_msg":
                yield from self._event(payload)
            else:
                self.skipped[f"record {kind[:40]}"] += 1
        elif kind in _ITEMS:
            yield from self._item(record, moment)
        elif not kind and not self.has_meta and text_at(record, "id"):
            self._meta(record)
        else:
            self.skipped[f"record {(kind or text_at(record, 'record_type') or 'without a kind')[:40]}"] += 1

    def finish(self) -> Iterator[ServedTurn]:
        turn = self.talk.finish(self.window)
        if turn is not None:
            yield turn

    def _meta(self, meta: Record) -> None:
        if self.has_meta:  # a resumed or forked session repeats its parent's
            self.skipped["record session_meta of a parent"] += 1
            return
        self.has_meta = True
        self.talk.session_id = text_at(meta, "id") or self.talk.session_id
        moment = time_at(meta, "timestamp")
        self.talk.at = self.talk.at if moment is None else moment
        folder = text_at(meta, "cwd").replace("\\", "/").rstrip("/")
        url = text_at(meta, "git", "repository_url").removesuffix(".git").rstrip("/")
        root = folder.rpartition("/")[2] or url.replace(":", "/").rpartition("/")[2]
        if root:
            commit, branch = text_at(meta, "git", "commit_hash"), text_at(meta, "git", "branch")
            self.talk.repository = RepositoryState(root=root, commit=commit, branch=branch)

    def _item(self, item: Record, moment: float | None) -> Iterator[ServedTurn]:
        kind, talk = text_at(item, "type"), self.talk
        if kind == "message" and text_at(item, "role") != "assistant":
            yield from self.finish()
            role = text_at(item, "role") or "user"
            if role == "user":
                self.prompts.append(len(self.window.steps))
            talk.user(self.window, _text(item.get("content"), self.skipped), "system" if role == "developer" else role)
        elif kind == "message":
            talk.reply(self.window, "", moment).texts.append(_text(item.get("content"), self.skipped))
        elif kind in ("function_call", "custom_tool_call", "local_shell_call", "web_search_call"):
            arguments, error = _arguments(item)
            name = text_at(item, "name") or kind.removesuffix("_call")
            call_id = text_at(item, "call_id") or text_at(item, "id")
            if self.window.results and self.window.reply is not None:  # it answers what was called before
                yield from self.finish()
            talk.call(talk.reply(self.window, "", moment), call_id, name, arguments, error)
        elif kind.endswith("_call_output"):
            if not talk.answer(self.window, text_at(item, "call_id"), _result(item.get("output"), self.skipped)):
                self.skipped["result without a call"] += 1
            elif self._is_answered():
                yield from self.finish()
        else:
            self.skipped[f"item {kind[:40]}"] += 1

    def _is_answered(self) -> bool:
        reply = self.window.reply
        return reply is not None and all(call_id in self.window.results for call_id in reply.call_ids)

    def _compacted(self, payload: Record) -> Iterator[ServedTurn]:
        yield from self.finish()
        kept = [
            Message(role=text_at(item, "role") or "user", text=text)
            for item in objects(payload.get("replacement_history"))
            if text_at(item, "type") == "message" and (text := _text(item.get("content"), self.skipped))
        ]
        summary = text_at(payload, "message")
        self.window = self.talk.open(Opened.SUMMARY, kept or ([Message(role="user", text=summary)] if summary else []))
        self.prompts = []

    def _event(self, payload: Record) -> Iterator[ServedTurn]:
        kind = text_at(payload, "type")
        reply = self.window.reply
        if kind == "turn_aborted" and reply is not None:
            reply.stop = StopReason.CANCELLED
            yield from self.finish()
        elif kind == "thread_rolled_back" and self.prompts:
            yield from self.finish()
            count = max(1, int(number_at(payload, "num_turns") or 1))
            steps = self.prompts[-count] if count <= len(self.prompts) else 0
            old = self.window
            self.window = self.talk.open(Opened.FORK, self.talk.history(old, steps))
            self.prompts = []
        elif kind == "token_count" and reply is not None:
            tokens = number_at(payload, "info", "last_token_usage", "output_tokens")
            reply.output_tokens = int(tokens or reply.output_tokens)
        else:
            self.skipped[f"event {kind[:40]}"] += 1


def _text(content: Any, skipped: Counter[str]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in objects(content):
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            skipped[f"part {text_at(part, 'type')[:40]}"] += 1
    return "\n".join(texts)


def _arguments(item: Record) -> tuple[Record, str | None]:
    if "arguments" in item:
        return arguments_of(item["arguments"])
    if isinstance(item.get("input"), str):  # of a custom tool: free text, as a patch
        return {"input": item["input"]}, None
    return arguments_of(item.get("action"))


def _result(output: Any, skipped: Counter[str]) -> ToolResult:
    """Plain text; or text with what became of it: {"output", "metadata"}, {"content", "success"}; or parts."""
    is_error = False
    if isinstance(output, str) and output.startswith('{"output"'):
        inner, error = arguments_of(output)
        output = inner if error is None else output
    if isinstance(output, dict):
        is_error = output.get("success") is False or number_at(output, "metadata", "exit_code") not in (0.0, None)
        output = output.get("output", output.get("content"))
    return result_of(_text(output, skipped), is_error=is_error)
