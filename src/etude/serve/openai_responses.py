"""OpenAI's responses, as coding agents use them: the client sends the whole history as items, and keeps it itself.

    items: message, function_call, function_call_output (custom_tool_call and its output: one text argument)
    events: response.created, output_item.added, output_text.delta ..., output_item.done, response.completed

Reasoning items are passed over; `previous_response_id` is refused: nothing is kept for the client. What it does not do:
tools that a server runs. Those are left out, and named in the answer's header.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from etude.protocols import Message
from etude.serve.conversation import Ask, in_order
from etude.serve.openai_chat import (
    call_id,
    call_of,
    check_count,
    check_model,
    ending_in_a_question,
    known_choice,
    left_out,
    text_of,
    tool_of,
)
from etude.serve.openai_wire import Count, Part, Share, Temperature, encode
from etude.serve.refusal import Refusal, body_of
from etude.serve.turn import Delta, Parts, Turn
from etude.types import StopReason, ToolCall


class Item(Struct, frozen=True):
    """One item of the history; what its `type` does not use is empty."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""
    output: str | list[Part] | None = None


class ResponseTool(Struct, frozen=True):
    """function and custom are the client's own."""

    type: str
    name: Annotated[str, Meta(max_length=256)] = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponseChoice(Struct, frozen=True):
    """The tool that must be called."""

    type: str
    name: str = ""


class TextOptions(Struct, frozen=True):
    """format: text is the only one."""

    format: dict[str, Any] | None = None


class ResponsesRequest(Struct, frozen=True):
    """POST /v1/responses."""

    model: Annotated[str, Meta(max_length=256)]
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseChoice | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class Responses:
    """exchange.Api of POST /v1/responses."""

    name = "openai"
    endpoint = "responses"
    body = ResponsesRequest

    def ask(self, body: ResponsesRequest, parts: Parts) -> Ask:
        check_model(body.model, parts)
        check_count("input", 1 if isinstance(body.input, str) else len(body.input), parts.recipe.max_messages)
        check_count("tools", len(body.tools or ()), parts.recipe.max_tools)
        if body.previous_response_id:
            raise Refusal(400, "nothing is kept for clients: send the whole history", param="previous_response_id")
        if body.text is not None and (body.text.format or {}).get("type", "text") != "text":
            raise Refusal(400, "text.format must be text", param="text.format")
        tools, custom, hosted = tools_of(body.tools or ())
        options = {"top_p": body.top_p not in (None, 1),
                   "parallel_tool_calls": body.parallel_tool_calls is False and bool(tools),
                   **{f"tool {name}": True for name in hosted}}  # fmt: skip
        choice = body.tool_choice
        found = f"={choice.name}" if isinstance(choice, ResponseChoice) else choice or "auto"
        return Ask(
            api=self.name, model=body.model, messages=messages_of(body), tools=tools,
            choice=known_choice(found, tools), max_tokens=body.max_output_tokens,
            temperature=1.0 if body.temperature is None else body.temperature, ignored=left_out(options, parts),
            session=str((body.metadata or {}).get("session_id") or body.prompt_cache_key or body.user or ""),
            custom=frozenset(custom),
        )  # fmt: skip

    def is_stream(self, body: ResponsesRequest) -> bool:
        return bool(body.stream)

    async def events(self, turn: Turn, body: ResponsesRequest) -> AsyncIterator[bytes]:
        count = 0

        def event(kind: str, **rest: Any) -> bytes:
            nonlocal count
            count += 1
            data = {"type": kind, "sequence_number": count - 1, **rest}
            return b"event: " + kind.encode() + b"\ndata: " + encode(data) + b"\n\n"

        begun = _response(turn, body, "in_progress", [])
        yield event("response.created", response=begun) + event("response.in_progress", response=begun)
        ready = b""
        place = {"item_id": _message_id(turn), "output_index": 0, "content_index": 0}
        is_open = False
        async for delta in turn.deltas(live=True):
            if delta.text and not is_open:
                item = {**_text_item(turn, "", "in_progress"), "content": []}
                ready += event("response.output_item.added", output_index=0, item=item)
                ready += event("response.content_part.added", part=_text_part(""), **place)
                is_open = True
            if delta.text:
                ready += event("response.output_text.delta", delta=delta.text, logprobs=[], **place)
            if ready and not turn.is_over:
                yield ready
                ready = b""
        if is_open:
            ready += event("response.output_text.done", text=turn.text, logprobs=[], **place)
            ready += event("response.content_part.done", part=_text_part(turn.text), **place)
        items = _items(turn)
        for index, item in enumerate(items):
            if item["type"] != "message":
                field = "arguments" if item["type"] == "function_call" else "input"
                at = {"item_id": item["id"], "output_index": index}
                started = {**item, field: "", "status": "in_progress"}
                ready += event("response.output_item.added", output_index=index, item=started)
                kind = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
                ready += event(f"response.{kind}.delta", delta=item[field], **at)
                ready += event(f"response.{kind}.done", **{field: item[field]}, **at)
            ready += event("response.output_item.done", output_index=index, item=item)
        status = "incomplete" if _is_cut(turn) else "completed"
        yield ready + event(f"response.{status}", response=_response(turn, body, status, items))

    def whole(self, turn: Turn, body: ResponsesRequest, delta: Delta) -> bytes:
        return encode(_response(turn, body, "incomplete" if _is_cut(turn) else "completed", _items(turn)))

    def failed(self, refusal: Refusal) -> bytes:
        error = body_of(refusal, self.name)["error"]
        failed = {"id": "", "object": "response", "status": "failed", "output": [],
                  "error": {"code": error["code"] or error["type"], "message": error["message"]}}  # fmt: skip
        data = {"type": "response.failed", "response": failed}
        return b"event: response.failed\ndata: " + encode(data) + b"\n\n"


# Requests


def tools_of(tools: Sequence[ResponseTool]) -> tuple[tuple[Mapping[str, Any], ...], list[str], list[str]]:
    """(tools as chat formats take them, names of those with one text argument, kinds that are left out)."""
    found: list[Mapping[str, Any]] = []
    custom, hosted = [], []
    for tool in tools:
        if tool.type == "function" and tool.name:
            found.append(tool_of(tool.name, tool.description, tool.parameters))
        elif tool.type == "custom" and tool.name:
            one = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            found.append(tool_of(tool.name, tool.description, one))
            custom.append(tool.name)
        else:
            hosted.append(tool.type if tool.type.isascii() and tool.type.replace("_", "").isalnum() else "?")
    return tuple(found), custom, hosted


def messages_of(body: ResponsesRequest) -> tuple[Message, ...]:
    """Errors: Refusal for an item that cannot be read."""
    found = [Message(role="system", text=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return ending_in_a_question([*found, Message(role="user", text=body.input)])
    names: list[str] = []
    answers: list[tuple[str, str]] = []
    is_reply = False
    for number, item in enumerate(body.input):
        where = f"input[{number}]"
        if item.type in ("function_call_output", "custom_tool_call_output"):
            answers.append((item.call_id, text_of(item.output, where)))
            continue
        if answers:
            found.append(Message(role="tool", results=in_order(names, answers)))
            names, answers, is_reply = [], [], False
        new = _reply_of(item, where)
        if new is not None:
            if item.call_id:
                names.append(item.call_id)
            if is_reply:  # texts and calls of one reply come as items of their own
                before = found.pop()
                new = Message(role="assistant", text=before.text + new.text, calls=(*before.calls, *new.calls))
            found.append(new)
            is_reply = True
        elif item.type == "message":
            role = "system" if item.role == "developer" else item.role or "user"
            found.append(Message(role=role, text=text_of(item.content, where)))
            is_reply = False
        elif item.type != "reasoning":
            raise Refusal(400, f"{where}: items of type {item.type[:40]!r} cannot be read", param="input")
    if answers:
        found.append(Message(role="tool", results=in_order(names, answers)))
    return ending_in_a_question(found)


def _reply_of(item: Item, where: str) -> Message | None:
    if item.type == "message" and item.role == "assistant":
        return Message(role="assistant", text=text_of(item.content, where))
    if item.type == "function_call":
        return Message(role="assistant", calls=(call_of(item.name, item.arguments),))
    if item.type == "custom_tool_call":
        return Message(role="assistant", calls=(ToolCall(name=item.name, arguments={"input": item.input}),))
    return None


# Answers


def _is_cut(turn: Turn) -> bool:
    return turn.stop in (StopReason.LENGTH, StopReason.CONTEXT)


def _message_id(turn: Turn) -> str:
    return f"msg_{turn.turn_id}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text_item(turn: Turn, text: str, status: str) -> dict[str, Any]:
    return {"id": _message_id(turn), "type": "message", "role": "assistant", "status": status,
            "content": [_text_part(text)]}  # fmt: skip


def _items(turn: Turn) -> list[dict[str, Any]]:
    items = [_text_item(turn, turn.text, "completed")] if turn.text else []
    for number, call in enumerate(turn.calls):
        name = call_id(turn, number)
        common = {"call_id": name, "name": call.name, "status": "completed"}
        if call.name in turn.ask.custom:
            text = call.arguments.get("input", "")
            spelled = text if isinstance(text, str) else json.dumps(text)
            items.append({"id": f"ctc_{name[5:]}", "type": "custom_tool_call", **common, "input": spelled})
        else:
            spelled = json.dumps(dict(call.arguments), ensure_ascii=False)
            items.append({"id": f"fc_{name[5:]}", "type": "function_call", **common, "arguments": spelled})
    return items


def _response(turn: Turn, body: ResponsesRequest, status: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    usage = turn.usage
    counts = {"input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.reused},
              "output_tokens": usage.sampled, "output_tokens_details": {"reasoning_tokens": usage.thinking},
              "total_tokens": usage.prompt + usage.sampled}  # fmt: skip
    return {"id": f"resp_{turn.turn_id}", "object": "response", "created_at": turn.created, "status": status,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None, "max_output_tokens": body.max_output_tokens, "model": body.model,
            "output": list(items), "parallel_tool_calls": True, "previous_response_id": None,
            "temperature": turn.ask.temperature, "tool_choice": "auto", "tools": [], "top_p": 1.0, "metadata": {},
            "usage": None if status == "in_progress" else counts}  # fmt: skip
