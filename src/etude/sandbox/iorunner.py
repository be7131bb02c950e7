"""The program that runs inside a sandbox to evaluate calls: standard library only, sent there as source.

It reads {"path", "calls", "first", "cpu_s", "wall_s"} as JSON on stdin and writes one JSON line [index, text] to file
descriptor 3 for each call from number `first` on, the module executed anew before each. A call that runs into its limit
ends this process by SIGPROF (processor time) or SIGALRM (the clock), one that exits ends it, too: the host sees what is
missing, and asks again from there on. A fork of this process alone would cost as much as all of its calls.

`canonical` also serves the task builder, so that expected values and graded values are written by the same code.

What it does not do: isolate (the sandbox does) or compare (the host does: no expected value ever comes here).
"""

import json
import os
import signal
import sys
import types
from typing import Any

MAX_TEXT = 4_000
"""Characters of a canonical text; longer ones become `too long`."""
MAX_DEPTH = 20
PRELOADED = {
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
    "math", "operator", "random", "re", "statistics", "string", "struct", "textwrap", "typing", "unicodedata",
}  # fmt: skip
"""Imported beforehand where the source names them, so that no call pays for it; pure modules."""


class TooLong(Exception):
    """The canonical text would exceed MAX_TEXT or MAX_DEPTH."""


def canonical(value: object) -> str:
    """The text that stands for a value: equal texts mean equal values of equal, exactly builtin types.

    Sets are sorted by their elements' texts, dicts keep insertion order, anything that is not builtin data becomes
    `object TypeName`: no method of the value is ever called.
    """
    try:
        text = _write(value, 0)
    except TooLong:
        return "too long"
    return text if len(text) <= MAX_TEXT else "too long"


def _write(value: Any, depth: int) -> str:
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return repr(value)
    if kind is int:
        if value.bit_length() > 12_000:
            raise TooLong
        return repr(value)
    if kind is str or kind is bytes:
        if len(value) > MAX_TEXT:
            raise TooLong
        return repr(value)
    if kind in (list, tuple, set, frozenset, dict):
        return _write_collection(value, kind, depth)
    return "object " + type.__getattribute__(kind, "__name__")


def _write_collection(value: Any, kind: type, depth: int) -> str:
    if depth >= MAX_DEPTH or len(value) > MAX_TEXT:
        raise TooLong
    items: list[str] = []
    length = 0
    for item in value.items() if kind is dict else value:
        if kind is dict:
            text = _write(item[0], depth + 1) + ": " + _write(item[1], depth + 1)
        else:
            text = _write(item, depth + 1)
        length += len(text) + 2
        if length > MAX_TEXT:
            raise TooLong
        items.append(text)
    if kind is list:
        return "[" + ", ".join(items) + "]"
    if kind is tuple:
        return "(" + ", ".join(items) + (",)" if len(items) == 1 else ")")
    if kind is dict:
        return "{" + ", ".join(items) + "}"
    if not items:
        return kind.__name__ + "()"
    inner = "{" + ", ".join(sorted(items)) + "}"
    return inner if kind is set else "frozenset(" + inner + ")"


def raised(error: BaseException) -> str:
    """The text that stands for an exception: its type's name alone."""
    return "raises " + type.__getattribute__(type(error), "__name__")


def _answer(code: types.CodeType, request: dict[str, Any], fd: int) -> None:
    """Answer the calls in order. Nothing in Python sees a timer end it."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    path, calls = request["path"], request["calls"]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    for index in range(request["first"], len(calls)):
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, request["wall_s"])
        module = types.ModuleType("solution")
        module.__file__ = path
        sys.modules["solution"] = module
        try:
            exec(code, module.__dict__)
            text = canonical(eval(calls[index], module.__dict__))
        except BaseException as error:
            text = raised(error)
        _write_all(fd, json.dumps([index, text]).encode() + b"\n")


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _preload(source: bytes) -> None:
    for word in set(source.decode("utf-8", "replace").replace(".", " ").replace(",", " ").split()) & PRELOADED:
        __import__(word)


def main() -> None:
    """Answer the request on stdin; see the module's docstring for both formats."""
    data = b""
    while piece := os.read(0, 65_536):
        data += piece
    request = json.loads(data)
    fd = os.dup(3)
    os.close(3)  # what the code under test prints there by chance is no answer
    try:
        with open(request["path"], "rb") as file:
            source = file.read()
        code = compile(source, request["path"], "exec", dont_inherit=True)
        _preload(source)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        for index in range(request["first"], len(request["calls"])):
            _write_all(fd, json.dumps([index, raised(error)]).encode() + b"\n")
        return
    _answer(code, request, fd)
    os._exit(0)  # not what the code under test registered for the end


if __name__ == "__main__":
    main()
