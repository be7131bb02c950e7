"""The agent's tools, one class each, and the toolbox that answers calls.

    ToolCall (untrusted) --toolbox: known? arguments right?--> Tool.run --text--> cut to the limit --> ToolResult

A new tool is a new subclass of Tool: its name, its docstring and the signature of `run` are its schema. What goes wrong
is answered, never raised, with one exception: a broken sandbox (SandboxError) is for the loop to judge. Names and
parameters are frozen: a shipped model learned them.
"""

from __future__ import annotations

import inspect
import logging
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from etude.code.edit import EditError, apply_edit
from etude.code.view import failure_text, numbered
from etude.errors import SandboxError
from etude.protocols import Sandbox
from etude.sandbox.iochecks import run_iochecks
from etude.types import Task, ToolCall, ToolErrorKind, ToolResult

MAX_FILE_BYTES = 1 << 20
"""A longer file is not read: code that ran in the sandbox may have made it."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Desk:
    """What the tools of one episode work on, and what they leave to the loop."""

    task: Task
    sandbox: Sandbox
    timeout_s: float = 10.0
    """For the call at hand."""
    finish_needs_pass: bool = False
    has_passed: bool = False
    is_finished: bool = False


class ToolError(Exception):
    """A failure that the model may read."""

    def __init__(self, kind: ToolErrorKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Tool:
    """Base of the tools. `run` returns the answer's text, or a ToolResult; Errors: ToolError, OSError, SandboxError."""

    name: ClassVar[str]
    registry: ClassVar[dict[str, type[Tool]]] = {}

    def __init_subclass__(cls) -> None:
        Tool.registry[cls.name] = cls

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    run: Any
    """async (self, **arguments) -> str | ToolResult"""

    async def read_text(self, path: str) -> str:
        if not path or "\0" in path:
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, "path is not the name of a file")
        data = await self.desk.sandbox.read_file(path)
        if len(data) > MAX_FILE_BYTES:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{path} is too large")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{path} is not text") from None


class ReadFile(Tool):
    """Show a file with line numbers."""

    name = "read_file"

    async def run(self, path: str) -> str:
        return numbered(await self.read_text(path))


class EditFile(Tool):
    """Replace `old` by `new` in a file. `old` must occur once; else `line` says on which line it begins."""

    name = "edit_file"

    async def run(self, path: str, old: str, new: str, line: int | None = None) -> str:
        try:
            edited = apply_edit(await self.read_text(path), old, new, line)
        except EditError as error:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, str(error)) from error
        try:
            data = edited.encode()
        except UnicodeEncodeError:
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, "new is not valid text") from None
        if len(data) > MAX_FILE_BYTES:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{path} would be too large")
        await self.desk.sandbox.write_file(path, data)
        return "ok"


class RunTests(Tool):
    """Run the visible tests; shows the first failure."""

    name = "run_tests"

    async def run(self) -> ToolResult:
        spec = self.desk.task.verifier
        visible = [check for check in spec.checks if check.visible]
        if not visible:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, "this task has no visible tests")
        outcomes = await run_iochecks(self.desk.sandbox, spec, visible, self.desk.timeout_s)
        passed = all(outcome.passed for outcome in outcomes)
        self.desk.has_passed |= passed
        return ToolResult(text=failure_text(outcomes), passed=passed)


class Finish(Tool):
    """End the work with a message for the user."""

    name = "finish"

    async def run(self, message: str) -> str:
        if self.desk.finish_needs_pass and not self.desk.has_passed:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, NOT_PASSED)
        self.desk.is_finished = True
        return "ok"


NOT_PASSED = "run_tests has not passed yet"


def schema(tool: type[Tool]) -> dict[str, Any]:
    """The tool as JSON schema, from its signature, in the form that chat formats take."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter, kind in _parameters(tool):
        properties[parameter.name] = {"type": "integer" if kind is int else "string"}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return {
        "name": tool.name,
        "description": inspect.getdoc(tool) or "",
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        },
    }


def _parameters(tool: type[Tool]) -> list[tuple[inspect.Parameter, type]]:
    """Parameters of `run` with their type, str or int; `int | None` reads as int."""
    hints = typing.get_type_hints(tool.run)
    found = []
    for parameter in list(inspect.signature(tool.run).parameters.values())[1:]:
        hint = hints[parameter.name]
        if isinstance(hint, types.UnionType):
            hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
        found.append((parameter, hint))
    return found


class Toolbox:
    """The tools of one episode. `names` come from a checked recipe."""

    def __init__(self, names: Sequence[str], desk: Desk, *, output_chars: int) -> None:
        self._tools = {name: Tool.registry[name](desk) for name in names}
        self._output_chars = output_chars

    def schemas(self) -> tuple[dict[str, Any], ...]:
        return tuple(schema(type(tool)) for tool in self._tools.values())

    async def answer(self, call: ToolCall) -> ToolResult:
        """Carry out one call. Whatever is wrong with it is in the result. Errors: SandboxError."""
        try:
            if call.error is not None:
                raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, call.error)
            tool = self._tools.get(call.name)
            if tool is None:
                known = ", ".join(self._tools)
                raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, f"no tool {call.name[:40]!r}; tools: {known}")
            answer = await tool.run(**_checked(type(tool), call.arguments))
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
        return self._cut(answer)

    def _cut(self, result: ToolResult) -> ToolResult:
        extra = len(result.text) - self._output_chars
        if extra <= 0:
            return result
        text = f"{result.text[: self._output_chars]}\n({extra} characters cut)"
        return ToolResult(text=text, error=result.error, passed=result.passed)


def failed(kind: ToolErrorKind, text: str) -> ToolResult:
    """An error as the model reads it."""
    return ToolResult(text=f"error: {text}", error=kind)


def _reason(error: OSError) -> str:
    """What went wrong with a path, without the host's own paths."""
    kinds = {FileNotFoundError: "no such file", IsADirectoryError: "is a directory", PermissionError: "not allowed"}
    return kinds.get(type(error), "the file cannot be used")


def _checked(tool: type[Tool], arguments: typing.Mapping[str, object]) -> dict[str, object]:
    """Arguments that `run` takes as they are. Errors: ToolError naming the first that is wrong."""
    parameters = _parameters(tool)
    wrong = [name for name in arguments if name not in [parameter.name for parameter, _ in parameters]]
    if wrong:
        raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, f"{tool.name} has no argument {wrong[0][:40]!r}")
    checked: dict[str, object] = {}
    for parameter, kind in parameters:
        optional = parameter.default is not inspect.Parameter.empty
        value = arguments.get(parameter.name)
        if value is None and optional:
            continue
        if value is None:
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, f"{tool.name} needs {parameter.name}")
        if kind is int and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            value = int(value)  # chat formats without types carry numbers as text
        if not isinstance(value, kind) or isinstance(value, bool):
            expected = "a number" if kind is int else "text"
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, f"{parameter.name} must be {expected}")
        checked[parameter.name] = value
    return checked
