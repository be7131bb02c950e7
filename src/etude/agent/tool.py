"""What a tool is: a class whose name, docstring and signature of `run` are its schema, and what it works on.

What goes wrong is answered, never raised, with one exception: a broken sandbox (SandboxError) is for the loop to judge.
Names and parameters are frozen once shipped: a model learned them. What it does not do: hold the tools (tools/, one
file each), or answer calls (toolbox.py).
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from etude.protocols import Sandbox
from etude.types import Task, ToolErrorKind, ToolResult

MAX_FILE_BYTES = 1 << 20
"""A longer file is not read: code that ran in the sandbox may have made it."""
NOT_PASSED = "run_tests has not passed yet"


class Found(msgspec.Struct, frozen=True):
    """One result of a web search."""

    title: str
    url: str
    text: str


Ask = Callable[[str, Sequence[str]], Awaitable[str]]
"""(question, options) -> what the user says. Errors: UserAbortedError."""
Search = Callable[[str], Awaitable[Sequence[Found]]]
"""query -> results. Errors: ProviderError."""


class ToolError(Exception):
    """A failure that the model may read."""

    def __init__(self, kind: ToolErrorKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class ProviderError(ToolError):
    """A service beyond the sandbox failed."""

    def __init__(self, text: str) -> None:
        super().__init__(ToolErrorKind.PROVIDER_ERROR, text)


class UserAbortedError(ToolError):
    """The person at the keyboard did not want it; what they said instead is the text."""

    def __init__(self, text: str) -> None:
        super().__init__(ToolErrorKind.USER_ABORTED, text)


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
    ask: Ask | None = None
    """None: nobody is there."""
    search: Search | None = None
    lint_command: str = ""
    """The project's own linter; empty: ruff, or syntax alone."""
    todos: list[Any] = field(default_factory=list)
    jobs: int = 0
    """Background jobs that were started."""
    shell: bytes = b""
    """Folder, variables and functions that the last call of the shell left: commands that make them anew."""


class Tool:
    """Base of the tools. `run` returns the answer's text, or a ToolResult; Errors: ToolError, OSError, SandboxError."""

    name: ClassVar[str]
    registry: ClassVar[dict[str, type[Tool]]] = {}
    only_reads: ClassVar[bool] = False
    """Calls of such tools in one turn run side by side."""
    cuts_middle: ClassVar[bool] = False
    """Where a long answer loses text: in the middle, or at its end."""

    def __init_subclass__(cls) -> None:
        if name := cls.__dict__.get("name"):
            Tool.registry[name] = cls

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    run: Any
    """async (self, **arguments) -> str | ToolResult"""

    def checked(self, arguments: Mapping[str, object], *, strict: bool) -> dict[str, object]:
        """Arguments that `run` takes as they are. Errors: ToolError naming the first that is wrong."""
        return checked(type(self), arguments, strict=strict)

    async def read_text(self, path: str) -> str:
        """Errors: ToolError for what is no text file of the workspace, OSError, SandboxError."""
        check_path(path)
        data = await self.desk.sandbox.read_file(path)
        if len(data) > MAX_FILE_BYTES:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{path} is too large")
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{path} is not text") from None

    async def write_text(self, path: str, text: str) -> None:
        """Errors: as `read_text`."""
        check_path(path)
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, "new is not valid text") from None
        if len(data) > MAX_FILE_BYTES:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{path} would be too large")
        await self.desk.sandbox.write_file(path, data)


MakeTool = Callable[[Desk], Tool]
"""A class of tools, or what makes one that needs more than the desk."""


def check_path(path: str) -> None:
    """Errors: ToolError for what cannot name a file."""
    if not path or "\0" in path:
        raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, "path is not the name of a file")


def failed(kind: ToolErrorKind, text: str) -> ToolResult:
    """An error as the model reads it."""
    return ToolResult(text=f"error: {text}", error=kind)


# Arguments


_ARGUMENTS: dict[type[Tool], type[msgspec.Struct]] = {}


def arguments_of(tool: type[Tool]) -> type[msgspec.Struct]:
    """The arguments of `run` as a struct: what checks them, and what their JSON schema is made of."""
    if tool in _ARGUMENTS:
        return _ARGUMENTS[tool]
    hints = typing.get_type_hints(tool.run, include_extras=True)
    fields: list[Any] = []
    for parameter in list(inspect.signature(tool.run).parameters.values())[1:]:
        default = () if parameter.default is inspect.Parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    _ARGUMENTS[tool] = msgspec.defstruct(tool.name, fields, kw_only=True, forbid_unknown_fields=True)
    return _ARGUMENTS[tool]


def schema(tool: type[Tool]) -> dict[str, Any]:
    """The tool as JSON schema, in the form that chat formats take."""
    whole = msgspec.json.schema(arguments_of(tool))
    parts = whole.get("$defs", {})
    inner = _without_references(parts[whole["$ref"].rpartition("/")[2]], parts)
    parameters = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    parameters |= {key: inner[key] for key in ("properties", "required") if key in inner}
    return {"name": tool.name, "description": inspect.getdoc(tool) or "", "parameters": parameters}


def _without_references(node: Any, parts: Mapping[str, Any]) -> Any:
    """As most chat formats want it: everything written out, no titles, no nulls for what may be left out."""
    if isinstance(node, list):
        return [_without_references(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _without_references(parts[node["$ref"].rpartition("/")[2]], parts)
    if "anyOf" in node:
        kinds = [kind for kind in node["anyOf"] if kind != {"type": "null"}]
        if len(kinds) == 1:
            rest = {key: value for key, value in node.items() if key not in ("anyOf", "default")}
            return _without_references({**kinds[0], **rest}, parts)
    return {key: _without_references(value, parts) for key, value in node.items() if key not in ("title", "default")}


def checked(tool: type[Tool], arguments: Mapping[str, object], *, strict: bool) -> dict[str, object]:
    """Arguments that `run` takes as they are.

    Not strict: numbers may come as text, and unknown arguments are left out. Errors: ToolError naming the first that is
    wrong.
    """
    kind = arguments_of(tool)
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    given = {name: value for name, value in arguments.items() if strict or name in known}
    given = {name: value for name, value in given.items() if value is not None or not _has_default(known.get(name))}
    try:
        found = msgspec.convert(given, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, _readable(tool.name, str(error))) from None
    return {name: getattr(found, name) for name in known}


def _has_default(field: Any) -> bool:
    return field is not None and not field.required


_KINDS = {"str": "text", "int": "a number", "float": "a number", "bool": "true or false", "array": "a list",
          "object": "an object"}  # fmt: skip


def _readable(tool: str, message: str) -> str:
    """msgspec's words for a model."""
    what, _, where = message.partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    if match := re.match(r"Object missing required field `(\w+)`", what):
        return f"{where or tool} needs {match[1]}"
    if match := re.match(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return f"{where or tool} has no argument {match[1][:40]!r}"
    if match := re.match(r"Expected `([\w ]+)", what):
        wanted = [_KINDS.get(word, word) for word in re.findall(r"\w+", match[1]) if word != "null"]
        return f"{where or tool} must be {' or '.join(wanted)}"
    return f"{where or tool}: {what}"
