"""Calls in the text of a reply, as open models write them, read back: nothing that was sampled makes this raise.

    hermes    <tool_call>{"name": "grep", "arguments": {"pattern": "x"}}</tool_call>         Qwen, SmolLM2, many others
    xml       <tool_call><function=grep><parameter=pattern>x</parameter></function></tool_call>         Qwen3-Coder

A call that cannot be read is a ToolCall with `error`. Values of the second form are text; what a tool wants as a number
it takes from text (agent/tool.py). What it does not do: look at ids (render, template, families).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from msgspec.structs import replace

from etude.frames import encode
from etude.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CUT = "the call was cut off before its end"
Read = Callable[[str], tuple[str, list[ToolCall]]]


def made(name: object, arguments: object) -> ToolCall:
    """A call of what a model's JSON held: anything at all, half a character and numbers of any length included."""
    if not isinstance(name, str):
        return ToolCall(name="", arguments={}, error="the name of the call is not text")
    call = ToolCall(name=name, arguments=arguments if isinstance(arguments, dict) else {})
    try:
        encode(call)  # as the episode will keep it
    except (ValueError, OverflowError, RecursionError, TypeError):
        return ToolCall(name="", arguments={}, error="the call holds half a character, or a number that is too large")
    return call if isinstance(arguments, dict) else replace(call, error="the arguments are not an object")


def read_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """(text beside the calls, calls in order)."""
    return _blocks(text, _hermes)


def read_xml(text: str) -> tuple[str, list[ToolCall]]:
    """(text beside the calls, calls in order)."""
    return _blocks(text, _xml)


def _blocks(text: str, read: Callable[[str], ToolCall]) -> tuple[str, list[ToolCall]]:
    beside, calls, at = [], [], 0
    while (start := text.find(OPEN, at)) >= 0:
        beside.append(text[at:start])
        end = text.find(CLOSE, start)
        inner_end = len(text) if end < 0 else end
        inner = text[start + len(OPEN) : inner_end]
        if end < 0:
            calls.append(ToolCall(name=_name_in(inner), arguments={}, error=CUT))
        elif OPEN in inner:
            calls.append(ToolCall(name=_name_in(inner), arguments={}, error="a call begins inside the call"))
        else:
            calls.append(read(inner.strip()))
        at = len(text) if end < 0 else end + len(CLOSE)
    beside.append(text[at:])
    return "".join(beside).strip("\n"), calls


def _hermes(inner: str) -> ToolCall:
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError):
        return ToolCall(name=_name_in(inner), arguments={}, error="the call is not valid JSON")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(name="", arguments={}, error='a call is an object with "name" and "arguments"')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some write the arguments as text once more
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return made(found["name"], arguments)


_FUNCTION = re.compile(r"<function=([^>\n]{1,200})>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>(.*?)</parameter>", re.DOTALL)


def _xml(inner: str) -> ToolCall:
    whole = _FUNCTION.fullmatch(inner)
    if whole is None:
        return ToolCall(name=_name_in(inner), arguments={}, error="a call is <function=NAME> ... </function>")
    rest = _PARAMETER.sub("", whole[2]).strip()
    if rest:
        return ToolCall(name=whole[1], arguments={}, error="something stands between the parameters of the call")
    arguments = {match[1]: _trimmed(match[2]) for match in _PARAMETER.finditer(whole[2])}
    return made(whole[1], arguments)


def _trimmed(value: str) -> str:
    """Without the line feeds that the format sets around a value."""
    return value.removeprefix("\n").removesuffix("\n")


def _name_in(inner: str) -> str:
    """The name of a broken call, where it can be seen."""
    match = re.search(r'"name"\s*:\s*"([^"\n]{1,100})"|<function=([^>\n]{1,100})>', inner[:1000])
    return (match[1] or match[2]) if match else ""
