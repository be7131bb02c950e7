"""OpenAI's chat completions: request -> Ask, turn -> answer or events.

Calls go out whole once the reply has ended: until then a format may still take them back. What it does not do: choices
beyond one, images, sound, JSON modes: those are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from etude.data.calls import made
from etude.protocols import Message
from etude.serve.conversation import Ask, in_order
from etude.serve.openai_wire import ChatMessage, ChatRequest, Choice, Part, encode, event
from etude.serve.recipe import ANY
from etude.serve.refusal import Refusal, body_of
from etude.serve.turn import Delta, Parts, Turn
from etude.types import StopReason, ToolCall


class ChatCompletions:
    """exchange.Api of POST /v1/chat/completions."""

    name = "openai"
    endpoint = "chat_completions"
    body = ChatRequest

    def ask(self, body: ChatRequest, parts: Parts) -> Ask:
        check_model(body.model, parts)
        check_count("messages", len(body.messages), parts.recipe.max_messages)
        check_count("tools", len(body.tools or ()), parts.recipe.max_tools)
        if body.response_format is not None and body.response_format.type != "text":
            raise Refusal(
                400, f"response_format {body.response_format.type!r} is not supported", param="response_format"
            )
        if (body.n or 1) > 1:
            raise Refusal(400, "n must be 1: ask again for another choice", param="n")
        options = {"top_p": body.top_p not in (None, 1), "presence_penalty": bool(body.presence_penalty),
                   "frequency_penalty": bool(body.frequency_penalty), "logit_bias": bool(body.logit_bias),
                   "top_logprobs": bool(body.top_logprobs),
                   "parallel_tool_calls": body.parallel_tool_calls is False and bool(body.tools)}  # fmt: skip
        tools = tuple(tool_of(t.function.name, t.function.description, t.function.parameters) for t in body.tools or ())
        metadata = body.metadata or {}
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return Ask(
            api=self.name, model=body.model, messages=messages_of(body.messages), tools=tools,
            choice=choice_of(body.tool_choice, tools), max_tokens=body.max_completion_tokens or body.max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            seed=None if body.seed is None else body.seed % (1 << 63), stop=tuple(text for text in stop if text),
            logprobs=bool(body.logprobs), ignored=left_out(options, parts),
            session=str(metadata.get("session_id") or body.prompt_cache_key or body.user or ""),
        )  # fmt: skip

    def is_stream(self, body: ChatRequest) -> bool:
        return bool(body.stream)

    async def events(self, turn: Turn, body: ChatRequest) -> AsyncIterator[bytes]:
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        common = {"id": f"chatcmpl-{turn.turn_id}", "object": "chat.completion.chunk", "created": turn.created,
                  "model": body.model}  # fmt: skip
        usage = {"usage": None} if with_usage else {}

        def chunk(delta: Mapping[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return event({**common, "choices": [choice], **usage})

        yield chunk({"role": "assistant", "content": ""})
        head = b""
        async for delta in turn.deltas(live=True):
            logprobs = logprobs_of(turn, delta) if body.logprobs else None
            if delta.text or logprobs:
                head += chunk({"content": delta.text}, None, logprobs)
            if not turn.is_over and head:
                yield head
                head = b""
        for number, call in enumerate(turn.calls):
            head += chunk({"tool_calls": [{"index": number, **_call(turn, number, call)}]})
        head += chunk({}, finish_of(turn))
        if with_usage:
            head += event({**common, "choices": [], "usage": usage_of(turn)})
        yield head + b"data: [DONE]\n\n"

    def whole(self, turn: Turn, body: ChatRequest, delta: Delta) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text or None, "refusal": None}
        if turn.calls:
            message["tool_calls"] = [_call(turn, number, call) for number, call in enumerate(turn.calls)]
        elif not turn.text:
            message["content"] = ""
        choice = {"index": 0, "message": message, "finish_reason": finish_of(turn),
                  "logprobs": logprobs_of(turn, delta) if body.logprobs else None}  # fmt: skip
        return encode({"id": f"chatcmpl-{turn.turn_id}", "object": "chat.completion", "created": turn.created,
                       "model": body.model, "choices": [choice], "usage": usage_of(turn)})  # fmt: skip

    def failed(self, refusal: Refusal) -> bytes:
        return event(body_of(refusal, self.name))


# Requests


def check_model(name: str, parts: Parts) -> None:
    """Errors: Refusal if another model is asked for."""
    names = parts.recipe.names or (parts.name,)
    if name not in names and ANY not in names:
        words = f"the model {name[:80]!r} is not served: {', '.join(names)} is"
        raise Refusal(404, words, code="model_not_found", param="model")


def check_count(name: str, count: int, limit: int) -> None:
    """Errors: Refusal."""
    if count > limit:
        raise Refusal(400, f"{name} has {count} entries, the limit is {limit}", code="too_many", param=name)


def left_out(options: Mapping[str, bool], parts: Parts) -> tuple[str, ...]:
    """The options that are asked for and that the engine does not have. Errors: Refusal where that is not allowed."""
    asked = tuple(name for name, is_asked in options.items() if is_asked)
    if asked and parts.recipe.strict:
        words = f"{asked[0]} is not supported: replies are sampled from the whole distribution"
        raise Refusal(400, words, code="unsupported_parameter", param=asked[0])
    return asked


def tool_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """As chat formats take it."""
    return {"name": name, "description": description or "", "parameters": dict(parameters or {"type": "object"})}


def choice_of(choice: str | Choice | None, tools: Sequence[Mapping[str, Any]]) -> str:
    """Ask.choice. Errors: Refusal if there is nothing to choose from."""
    found = f"={choice.function.name}" if isinstance(choice, Choice) else choice or "auto"
    return known_choice(found, tools)


def known_choice(choice: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The same choice. Errors: Refusal if there is no such tool."""
    names = [tool["name"] for tool in tools]
    if choice in ("auto", "none"):
        return choice
    if not names or (choice.startswith("=") and choice[1:] not in names):
        raise Refusal(400, f"tool_choice: there is no tool {choice.lstrip('=')[:80]!r}", param="tool_choice")
    return choice


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """In our words: results of one reply are one message. Errors: Refusal for what cannot be read."""
    found: list[Message] = []
    names: list[str] = []
    answers: list[tuple[str, str]] = []

    def end_results() -> None:
        if answers:
            found.append(Message(role="tool", results=in_order(names, answers)))
            answers.clear()

    for number, message in enumerate(messages):
        text = text_of(message.content, f"messages[{number}].content")
        if message.role == "tool":
            answers.append((message.tool_call_id or "", text))
            continue
        end_results()
        if message.role == "assistant":
            names = [call.id for call in message.tool_calls or ()]
            calls = tuple(call_of(call.function.name, call.function.arguments) for call in message.tool_calls or ())
            found.append(Message(role="assistant", text=text, calls=calls))
        else:
            found.append(Message(role="system" if message.role == "developer" else message.role, text=text))
    end_results()
    return ending_in_a_question(found)


def ending_in_a_question(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The same messages. Errors: Refusal if there is nothing to reply to."""
    if not messages or messages[-1].role == "assistant":
        raise Refusal(400, "the last message must be a user's or a tool's", param="messages")
    if all(message.role == "system" for message in messages):
        raise Refusal(400, "there is no message of a user", param="messages")
    return tuple(messages)


def text_of(content: str | Sequence[Part] | None, where: str) -> str:
    """Errors: Refusal for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise Refusal(400, f"{where}: parts of type {part.type[:40]!r} cannot be read", param=where)
    return "".join(part.text for part in content)


def call_of(name: str, arguments: str) -> ToolCall:
    """A call of the history; arguments that are no JSON object stay the text that they are."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = arguments
    call = made(name, found)
    return call if call.error is None else ToolCall(name=name, arguments={"arguments": arguments})


# Answers


def finish_of(turn: Turn) -> str:
    """finish_reason."""
    if turn.stop in (StopReason.LENGTH, StopReason.CONTEXT):
        return "length"
    return "tool_calls" if turn.calls else "stop"


def call_id(turn: Turn, number: int) -> str:
    """Unique."""
    return f"call_{turn.turn_id[:20]}{number}"


def usage_of(turn: Turn) -> dict[str, Any]:
    """Counts of one turn."""
    usage = turn.usage
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.sampled,
            "total_tokens": usage.prompt + usage.sampled,
            "prompt_tokens_details": {"cached_tokens": usage.reused},
            "completion_tokens_details": {"reasoning_tokens": 0 if turn.calls else usage.thinking}}  # fmt: skip


def logprobs_of(turn: Turn, delta: Delta) -> dict[str, Any]:
    """Every sampled token with its log-prob, those that are no text included."""
    rows = []
    for token, logprob in zip(delta.ids.tolist(), delta.logprobs.tolist(), strict=True):
        text = turn.renderer.spell([token])
        rows.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": rows, "refusal": None}


def _call(turn: Turn, number: int, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call_id(turn, number), "type": "function", "function": function}
