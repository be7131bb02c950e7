"""Chat formats of known families, by the package `renderers`: the only file that imports it.

A renderer of the package writes a family's official format and reads its calls; what follows a sampled reply it
appends without spelling the reply again, or says that it cannot (a family that drops earlier thinking): then a new
context opens. Texts never become control ids, for what it encodes is encoded without any (SafeTokenizer).

    thinking = keep    earlier thinking stays where it was sampled: a window only ever grows
    thinking = drop    as the family's template has it: at a new request earlier thinking goes, and a new context opens

What it does not do: families that the package does not know (template.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from etude.data.calls import made
from etude.data.harmony import vocabulary
from etude.data.render import Parsed, with_system
from etude.data.tokenizer import SafeTokenizer
from etude.errors import ModelError
from etude.protocols import Message
from etude.types import ToolCall, ToolResult

_TOOLS = """You can use tools. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>"""
NAMES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "kimi_k2": "kimi-k2",
    "kimi_k25": "kimi-k2.5",
    "deepseek_v3": "deepseek-v3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "llama": "llama-3",
}
"""model_type of config.json -> name in the package."""
_PROBLEMS = {
    "invalid_json": "the call is not valid JSON",
    "unclosed_block": "the call was cut off before its end",
    "missing_name": "the call names no tool",
    "malformed_structure": "the call is not as this format has it",
}


@functools.lru_cache(maxsize=8)
def _package_renderer(name: str, tokenizer: SafeTokenizer, thinking: str) -> Any:
    """The package's, which knows no tools: those of a vocabulary share it, for gpt-oss's takes seconds.

    Errors: ModelError if the package is not installed, or the vocabulary lacks a token of the family.
    """
    try:
        from renderers import configs, create_renderer
    except ImportError as error:
        raise ModelError(
            f"the chat format {name} needs the package renderers",
            cause=str(error),
            hint="pip install 'etude-rl[formats]'",
        ) from error
    kinds: list[Any] = [kind for kind in vars(configs).values() if hasattr(kind, "model_fields")]
    by_name = {kind.model_fields["name"].default: kind for kind in kinds if "name" in kind.model_fields}
    retention = {"thinking_retention": "all"} if thinking == "keep" else {}
    try:
        harmony = vocabulary(tokenizer.pieces()) if name == "gpt-oss" else contextlib.nullcontext()
        with harmony, tokenizer.formatting():  # it looks up its control tokens
            return create_renderer(tokenizer, by_name[name](**retention))
    except Exception as error:  # whatever the package raises where a vocabulary is another's
        raise ModelError(f"the tokenizer is not of the format {name}", cause=str(error)) from error


class FamilyRenderer:
    """data.render.Renderer over one of the package's."""

    def __init__(
        self, name: str, tokenizer: SafeTokenizer, tools: Sequence[Mapping[str, Any]], *, thinking: str = "keep"
    ) -> None:
        """name: the package's. Errors: ModelError if it is not installed, or lacks a token of the family."""
        self._renderer = _package_renderer(name, tokenizer, thinking)
        self._tokenizer = tokenizer
        self._tools = [{"type": "function", "function": dict(tool)} for tool in tools] or None
        self._words = ""
        """What says which tools there are, where the family's own format has no place for it."""
        if tools and not self._writes(str(tools[0]["name"])):
            self._words = _TOOLS.format(tools="\n".join(json.dumps(tool) for tool in self._tools or ()))
        self._prompt = [int(number) for number in self.open([Message(role="user", text="?")])]
        """Ends as every prompt does: perhaps in the middle of a thought."""
        self.stop_ids = tuple(int(number) for number in self._renderer.get_stop_token_ids())

    def _writes(self, name: str) -> bool:
        """Whether the family's format names this tool in a first turn."""
        with self._tokenizer.formatting():
            ids = self._renderer.render_ids([{"role": "user", "content": "?"}], tools=self._tools)
        return name in self._tokenizer.decode(ids)

    def open(self, messages: Sequence[Message]) -> np.ndarray:
        chat = _chat(with_system(messages, self._words))
        with self._tokenizer.formatting(_texts([chat, self._tools])):
            ids = self._renderer.render_ids(chat, tools=self._tools, add_generation_prompt=True)
        return np.array(ids, np.int32)

    def follow(self, window: np.ndarray, start: int, reply: Message, new: Sequence[Message]) -> np.ndarray | None:
        before = [int(number) for number in window]
        chat = _chat(new, reply.calls)
        with self._tokenizer.formatting(_texts(chat)):
            bridged = self._renderer.bridge_to_next_turn(before[:start], before[start:], chat, tools=self._tools)
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return np.array(bridged.token_ids[len(before) :], np.int32)

    def parse(self, ids: Sequence[int] | np.ndarray) -> Parsed:
        tokens = [int(number) for number in ids]
        try:
            with self._tokenizer.formatting():
                found = self._renderer.parse_response(tokens, tools=self._tools, prompt_ids=self._prompt)
        except Exception as error:  # what a model sampled must not end a run, whatever the package makes of it
            return _unreadable(tokens, f"the reply cannot be read: {type(error).__name__}")
        calls = tuple(_call(call) for call in found.tool_calls)
        spans = [call.token_span for call in found.tool_calls if call.token_span]
        thought = len(tokens) if found.reasoning_content and not found.content and not calls else 0
        first = min((span[0] for span in spans), default=len(tokens))
        return Parsed(
            text=found.content or "", calls=calls,
            thinking_tokens=first if calls else thought,
            call_tokens=len(tokens) - first if calls else 0,
            message_tokens=0 if calls else len(tokens) - thought,
        )  # fmt: skip

    def spell(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(number) for number in ids])


def _unreadable(tokens: Sequence[int], why: str) -> Parsed:
    call = ToolCall(name="", arguments={}, error=why)
    return Parsed(text="", calls=(call,), thinking_tokens=0, call_tokens=len(tokens), message_tokens=0)


def _call(call: Any) -> ToolCall:
    if call.status in ("ok", "unknown_tool"):
        return made(call.name or "", call.arguments)
    error = _PROBLEMS.get(str(call.status), "the call cannot be read")
    return ToolCall(name=made(call.name or "", {}).name, arguments={}, error=error)


def _texts(node: Any) -> Iterator[str]:
    """Every text in messages, at any depth."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        yield from (text for value in node.values() for text in _texts(value))
    elif isinstance(node, Sequence):
        yield from (text for value in node for text in _texts(value))


def _chat(messages: Sequence[Message], calls: Sequence[ToolCall] = ()) -> list[dict[str, Any]]:
    """As the package takes them: calls with ids, each result a message of its own. calls: those made just before."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            found += _results(message.results, calls)
        elif message.role == "assistant":
            calls = message.calls
            entry: dict[str, Any] = {"role": "assistant", "content": message.text}
            if calls:
                entry["tool_calls"] = [
                    {"id": _id(place, call.name), "type": "function",
                     "function": {"name": call.name, "arguments": dict(call.arguments)}}
                    for place, call in enumerate(calls)
                ]  # fmt: skip
            found.append(entry)
        else:
            found.append({"role": message.role, "content": message.text})
    return found


def _results(results: Sequence[ToolResult], calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    found = []
    for place, result in enumerate(results):
        name = calls[place].name if place < len(calls) else ""
        found.append({"role": "tool", "tool_call_id": _id(place, name), "name": name, "content": result.text})
    return found


def _id(place: int, name: str) -> str:
    """Of call number `place` of a reply, as Kimi-K2 spells them; others take any."""
    return f"functions.{name}:{place}"
