"""Answering a turn's calls: check, run, cut; calls that only read side by side, the others one after the other.

    calls of a turn --in order--> [read read] edit [read shell] ...     results in the order of the calls
                                   together   alone  alone each

A call that fails is an error result and loses none of the others. What it does not do: decide when an episode ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from etude.agent.tool import Desk, MakeTool, Tool, ToolError, failed
from etude.errors import SandboxError
from etude.types import ToolCall, ToolErrorKind, ToolResult

_log = logging.getLogger(__name__)


class Toolbox:
    """The tools of one episode. `names` come from a checked recipe; `extra` makes further ones by name (MCP)."""

    def __init__(
        self,
        names: Sequence[str],
        desk: Desk,
        *,
        output_chars: int,
        strict: Sequence[str] = (),
        extra: Mapping[str, MakeTool] | None = None,
    ) -> None:
        makers: dict[str, MakeTool] = {name: Tool.registry[name] for name in names}
        self._tools = {name: make(desk) for name, make in {**makers, **(extra or {})}.items()}
        self._output_chars = output_chars
        self._strict = frozenset(strict)

    def only_reads(self, call: ToolCall) -> bool:
        """Whether the call may run beside others of its turn."""
        tool = self._tools.get(call.name)
        return tool is None or tool.only_reads

    def together(self, calls: Sequence[ToolCall]) -> Iterator[Sequence[ToolCall]]:
        """The calls of a turn, in order, in groups that may run side by side."""
        place = 0
        while place < len(calls):
            end = place
            while end < len(calls) and self.only_reads(calls[end]):
                end += 1
            yield calls[place : max(end, place + 1)]
            place = max(end, place + 1)

    async def answer_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answers to calls that run side by side, in order. Errors: SandboxError, once all of them have ended."""
        found = await asyncio.gather(*(self.answer(call) for call in calls), return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return [result for result in found if isinstance(result, ToolResult)]

    async def answer(self, call: ToolCall) -> ToolResult:
        """Carry out one call. Whatever is wrong with it is in the result. Errors: SandboxError."""
        tool = self._tools.get(call.name)
        try:
            if call.error is not None:
                raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, call.error)
            if tool is None:
                known = ", ".join(self._tools)
                raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, f"no tool {call.name[:40]!r}; tools: {known}")
            arguments = tool.checked(call.arguments, strict=call.name in self._strict)
            answer = await tool.run(**arguments)
        except ToolError as error:
            answer = failed(error.kind, str(error))
        except SandboxError:
            raise
        except TimeoutError:
            answer = failed(ToolErrorKind.TIMEOUT, "the tool took too long")
        except OSError as error:
            answer = failed(ToolErrorKind.UNEXPECTED_ENVIRONMENT, _reason(error))
        except Exception:  # a bug of ours must not end the run: it becomes data, and every `unknown` is looked into
            _log.exception("tool %s failed in a way that nobody foresaw", call.name)
            answer = failed(ToolErrorKind.UNKNOWN, "the tool broke")
        if isinstance(answer, str):
            answer = ToolResult(text=answer)
        return self._cut(answer, middle=tool is not None and tool.cuts_middle)

    def _cut(self, result: ToolResult, *, middle: bool) -> ToolResult:
        extra = len(result.text) - self._output_chars
        if extra <= 0:
            return result
        if middle:
            half = self._output_chars // 2
            text = f"{result.text[:half]}\n({extra} characters cut)\n{result.text[len(result.text) - half :]}"
        else:
            text = f"{result.text[: self._output_chars]}\n({extra} characters cut)"
        return ToolResult(text=text, error=result.error, passed=result.passed)


def _reason(error: OSError) -> str:
    """What went wrong with a path, without the host's own paths."""
    kinds = {FileNotFoundError: "no such file", IsADirectoryError: "is a directory", PermissionError: "not allowed"}
    return kinds.get(type(error), "the file cannot be used")
