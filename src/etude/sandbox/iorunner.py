"""The program that runs inside a sandbox to evaluate calls: standard library only, sent there as source.

It reads {"path", "calls", "cpu_s", "wall_s"} as JSON on stdin and writes one JSON line [index, text] a call to file
descriptor 3. Every call runs in a fork of its own that executes the module anew: an endless loop, an exit or a patched
builtin in one call is not seen by the next, and this process itself never executes the code under test.

`canonical` also serves the task builder, so that expected values and graded values are written by the same code.

What it does not do: isolate (the sandbox does) or compare (the host does: no expected value ever comes here).
"""

import json
import os
import select
import signal
import sys
import time
import types
from typing import Any

MAX_TEXT = 4_000
"""Characters of a canonical text; longer ones become `too long`."""
MAX_DEPTH = 20
PRELOADED = {
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json",
    "math", "operator", "random", "re", "statistics", "string", "struct", "textwrap", "typing", "unicodedata",
}  # fmt: skip
"""Imported before the forks where the source names them; pure modules whose import has no effect outside."""


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


def _child(code: types.CodeType, path: str, call: str, cpu_s: float) -> str:
    """Execute the module, then the call. Runs in a fork; a CPU timer that nothing in Python sees ends it."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    module = types.ModuleType("solution")
    module.__file__ = path
    sys.modules["solution"] = module
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        exec(code, module.__dict__)
        return canonical(eval(call, module.__dict__))
    except BaseException as error:
        return raised(error)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _read_answer(fd: int, wall_s: float) -> str:
    """A length-prefixed text from the child's pipe; `timeout` or `died` where none comes."""
    deadline = time.monotonic() + wall_s
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return "timeout"
        piece = os.read(fd, 65_536)
        data += piece
        if len(data) >= 4:
            size = int.from_bytes(data[:4], "big")
            if size > 8 * MAX_TEXT:
                return "died"
            if len(data) >= 4 + size:
                return data[4 : 4 + size].decode("utf-8", "replace")
        if not piece:
            return "died"


def _evaluate(code: types.CodeType, path: str, call: str, cpu_s: float, wall_s: float) -> str:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            os.close(3)
            data = _child(code, path, call, cpu_s).encode("utf-8", "replace")
            _write_all(write_end, len(data).to_bytes(4, "big") + data)
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        text = _read_answer(read_end, wall_s)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    if text == "died" and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return "timeout"
    return text


def _preload(source: bytes) -> None:
    for word in set(source.decode("utf-8", "replace").replace(".", " ").replace(",", " ").split()) & PRELOADED:
        __import__(word)


def main() -> None:
    """Answer the request on stdin; see the module's docstring for both formats."""
    data = b""
    while piece := os.read(0, 65_536):
        data += piece
    request = json.loads(data)
    path = request["path"]
    failure = None
    try:
        with open(path, "rb") as file:
            source = file.read()
        code = compile(source, path, "exec", dont_inherit=True)
        _preload(source)
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        failure = raised(error)
    for index, call in enumerate(request["calls"]):
        text = failure or _evaluate(code, path, call, request["cpu_s"], request["wall_s"])
        _write_all(3, json.dumps([index, text]).encode() + b"\n")
