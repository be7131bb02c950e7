"""Anthropic's messages: request -> Ask, turn -> answer or events, and the counting of tokens.

    message_start, then per text or call: content_block_start, content_block_delta ..., content_block_stop,
    then message_delta (why it stopped, counts) and message_stop, once the turn is kept

What it does not do: images, documents, tools that a server runs: refused by name. Thinking blocks of the history are
passed over: what this model thought lies in the window as it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from etude.data.calls import made
from etude.protocols import Message
from etude.serve.anthropic_wire import Block, CountRequest, InputMessage, MessagesRequest, TextBlock, ToolChoice
from etude.serve.conversation import Ask, in_order
from etude.serve.openai_chat import check_count, check_model, ending_in_a_question, known_choice, left_out, tool_of
from etude.serve.openai_wire import encode
from etude.serve.refusal import Refusal, body_of
from etude.serve.turn import Delta, Parts, Turn
from etude.types import StopReason, ToolCall

_SILENT = ("thinking", "redacted_thinking")


class Messages:
    """exchange.Api of POST /v1/messages."""

    name = "anthropic"
    endpoint = "messages"
    body = MessagesRequest

    def ask(self, body: MessagesRequest, parts: Parts) -> Ask:
        options = {"top_p": body.top_p not in (None, 1), "top_k": bool(body.top_k),
                   "disable_parallel_tool_use": _is_single(body.tool_choice)}  # fmt: skip
        messages, tools, choice = conversation_of(body, parts)
        return Ask(
            api=self.name, model=body.model, messages=messages, tools=tools, choice=choice, max_tokens=body.max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            stop=tuple(text for text in body.stop_sequences or () if text), ignored=left_out(options, parts),
            session=_session_of(body.metadata or {}),
        )  # fmt: skip

    def is_stream(self, body: MessagesRequest) -> bool:
        return bool(body.stream)

    async def events(self, turn: Turn, body: MessagesRequest) -> AsyncIterator[bytes]:
        message = {**_message(turn, body), "content": [], "stop_reason": None, "stop_sequence": None,
                   "usage": {"input_tokens": turn.usage.prompt, "cache_creation_input_tokens": 0,
                             "cache_read_input_tokens": 0, "output_tokens": 1}}  # fmt: skip
        yield _event("message_start", message=message)
        ready = b""
        index, is_open = 0, False
        async for delta in turn.deltas(live=True):
            if delta.text and not is_open:
                ready += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                is_open = True
            if delta.text:
                ready += _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
            if ready and not turn.is_over:
                yield ready
                ready = b""
        if is_open:
            ready += _event("content_block_stop", index=0)
            index = 1
        for number, call in enumerate(turn.calls):
            block = {"type": "tool_use", "id": _use_id(turn, number), "name": call.name, "input": {}}
            spelled = json.dumps(dict(call.arguments), ensure_ascii=False)
            ready += _event("content_block_start", index=index, content_block=block)
            ready += _event(
                "content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": spelled}
            )
            ready += _event("content_block_stop", index=index)
            index += 1
        reason, sequence = _stop(turn)
        ready += _event(
            "message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=_usage(turn)
        )  # fmt: skip
        yield ready + _event("message_stop")

    def whole(self, turn: Turn, body: MessagesRequest, delta: Delta) -> bytes:
        content: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
        for number, call in enumerate(turn.calls):
            content.append({"type": "tool_use", "id": _use_id(turn, number), "name": call.name,
                            "input": dict(call.arguments)})  # fmt: skip
        reason, sequence = _stop(turn)
        return encode({**_message(turn, body), "content": content, "stop_reason": reason, "stop_sequence": sequence,
                       "usage": _usage(turn)})  # fmt: skip

    def failed(self, refusal: Refusal) -> bytes:
        return b"event: error\ndata: " + encode(body_of(refusal, self.name)) + b"\n\n"


def conversation_of(body: CountRequest, parts: Parts) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...], str]:
    """Messages, tools and choice in our words. Errors: Refusal."""
    check_model(body.model, parts)
    check_count("messages", len(body.messages), parts.recipe.max_messages)
    check_count("tools", len(body.tools or ()), parts.recipe.max_tools)
    for tool in body.tools or ():
        if tool.type not in (None, "custom"):
            raise Refusal(400, f"tools of type {tool.type[:40]!r} are run by no one here", param="tools")
    tools = tuple(tool_of(tool.name, tool.description, tool.input_schema) for tool in body.tools or ())
    return _messages_of(body), tools, _choice(body.tool_choice, tools)


def _choice(choice: ToolChoice | None, tools: Sequence[Mapping[str, Any]]) -> str:
    if choice is None:
        return "auto"
    found = {"any": "required", "tool": f"={choice.name}"}.get(choice.type, choice.type)
    return known_choice(found, tools)


def _is_single(choice: ToolChoice | None) -> bool:
    return choice is not None and bool(choice.disable_parallel_tool_use)


def _session_of(metadata: Mapping[str, Any]) -> str:
    """metadata.session_id, else user_id, in which Claude Code names its session: as JSON, or at the end of the text."""
    user = str(metadata.get("user_id") or "")
    if user.startswith("{"):
        try:
            found = msgspec.json.decode(user.encode(errors="replace"), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            found = {}
        user = str(found.get("session_id") or user)
    return str(metadata.get("session_id") or user.rpartition("_session_")[2])


def _messages_of(body: CountRequest) -> tuple[Message, ...]:
    found: list[Message] = []
    if system := _text(body.system, "system"):
        found.append(Message(role="system", text=system))
    names: list[str] = []
    for number, message in enumerate(body.messages):
        if message.role == "assistant":
            names = _add_reply(found, message, number)
        else:
            _add_question(found, message, number, names)
    return ending_in_a_question(found)


def _add_reply(found: list[Message], message: InputMessage, number: int) -> list[str]:
    """The ids of its calls."""
    if isinstance(message.content, str):
        found.append(Message(role="assistant", text=message.content))
        return []
    texts, names, calls = [], [], []
    for block in message.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            names.append(block.id)
            call = made(block.name, {} if block.input is None else block.input)
            calls.append(call if call.error is None else ToolCall(name=block.name, arguments={}))
        elif block.type not in _SILENT:
            raise _unreadable(block, number)
    found.append(Message(role="assistant", text="".join(texts), calls=tuple(calls)))
    return names


def _add_question(found: list[Message], message: InputMessage, number: int, names: Sequence[str]) -> None:
    """Results first, as the API wants them, then what the user says."""
    if isinstance(message.content, str):
        found.append(Message(role=message.role, text=message.content))
        return
    answers: list[tuple[str, str]] = []
    texts: list[str] = []
    for block in message.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_result":
            answers.append((block.tool_use_id, _text(block.content, f"messages[{number}].content")))
        else:
            raise _unreadable(block, number)
    if answers:
        found.append(Message(role="tool", results=in_order(names, answers)))
    if texts or not answers:
        found.append(Message(role=message.role, text="\n".join(texts)))


def _unreadable(block: Block, number: int) -> Refusal:
    return Refusal(400, f"messages[{number}]: blocks of type {block.type[:40]!r} cannot be read", param="messages")


def _text(content: str | Sequence[TextBlock] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for block in content:
        if block.type != "text":
            raise Refusal(400, f"{where}: blocks of type {block.type[:40]!r} cannot be read", param=where)
    return "\n".join(block.text for block in content)


# Answers


def _event(kind: str, **rest: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **rest}) + b"\n\n"


def _message(turn: Turn, body: MessagesRequest) -> dict[str, Any]:
    return {"id": f"msg_{turn.turn_id}", "type": "message", "role": "assistant", "model": body.model}


def _use_id(turn: Turn, number: int) -> str:
    return f"toolu_{turn.turn_id[:20]}{number}"


def _usage(turn: Turn) -> dict[str, Any]:
    """Tokens read from KV are counted apart."""
    usage = turn.usage
    return {"input_tokens": usage.prompt - usage.reused, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.reused, "output_tokens": usage.sampled}  # fmt: skip


def _stop(turn: Turn) -> tuple[str, str | None]:
    if turn.stop in (StopReason.LENGTH, StopReason.CONTEXT):
        return "max_tokens", None
    if turn.stopped_by:
        return "stop_sequence", turn.stopped_by
    return ("tool_use" if turn.calls else "end_turn"), None
