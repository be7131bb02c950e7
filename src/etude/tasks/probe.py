"""The program that runs harvested functions, inside the isolation that `isolation.Prober` puts around it.

It reads JSON requests, one a line, from stdin and answers each with a line on its own copy of stdout. A request is
served by a fork, so that nothing a function does outlives it; where one does not survive, all calls of the source that
killed it are `died` and a new fork takes the sources that follow:

    {"sources": [...], "calls": [[...], ...], "lines": N, "fresh": bool}  ->  per source, per call an entry

`fresh` executes the module anew before each call, as grading does. An entry is [text, wrap, arcs]: the canonical text
of the value; what would turn the value into plain data, or ""; the line transitions that the call took, as a set of
bits, hexadecimal. A call that executes more than N lines ends as `timeout`: counting lines, not seconds, makes the
outcome the same on every machine.

What it does not do: isolate, choose calls, judge.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import time
import types
from typing import Any

from etude.sandbox.iorunner import PRELOADED, canonical, raised

FILE = "solution.py"
CALL_CPU_S = 0.3
"""Backstop for what runs long without executing lines."""
LOST_CPU_S = 1.0
"""After which a call that not even the backstop could stop takes its process with it."""
SOURCE_WALL_S = 30.0
"""For all calls of one source, against those that sleep."""
MAX_EXPIRED = 2
"""So many calls of one source may run out of lines; the rest of its calls are `timeout` without being tried."""
_WRAPS = (
    (tuple, "tuple"), (list, "list"), (dict, "dict"), (set, "set"), (frozenset, "set"), (str, "str"), (int, "int"),
    (float, "float"), (bytes, "bytes"), (bytearray, "bytes"), (range, "list"), (types.MappingProxyType, "dict"),
)  # fmt: skip
_BY_NAME = {
    "dict_keys": "list", "dict_values": "list", "dict_items": "list", "deque": "list", "array": "list",
    "UserList": "list", "UserDict": "dict", "memoryview": "bytes", "Decimal": "str", "Fraction": "str", "date": "str",
    "datetime": "str", "time": "str", "timedelta": "str", "PosixPath": "str", "PurePosixPath": "str", "complex": "str",
    "UUID": "str", "type": "", "function": "call", "partial": "call",
}  # fmt: skip


class Expired(BaseException):
    """The call used up its lines or its CPU time."""


def _wrap_of(value: object) -> str:
    """What turns the value into plain data: a builtin's name, `iterator` (consume it), `call` (call it), or ""."""
    kind = type(value)
    if kind.__name__ in _BY_NAME:
        return _BY_NAME[kind.__name__]
    for base, name in _WRAPS:
        if isinstance(value, base) and kind is not base:
            return name
        if kind is base:
            return name if base in (bytearray, range, types.MappingProxyType) else ""
    return "iterator" if hasattr(kind, "__next__") and hasattr(kind, "__iter__") else ""


class _Tracer:
    """Counts the lines that the source executes and notes which followed which."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lines = 0
        self.arcs: dict[int, int] = {}
        self.mask = 0

    def __call__(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        last = 0

        def local(frame: types.FrameType, event: str, argument: object) -> Any:
            nonlocal last
            if event == "line":
                self.lines += 1
                if self.lines > self.limit:
                    raise Expired
                number = frame.f_lineno
                arc = last * 1_000 + number
                last = number
                bit = self.arcs.get(arc)
                if bit is None:
                    bit = self.arcs[arc] = len(self.arcs)
                self.mask |= 1 << bit
            return local

        return local


def _expire(signum: int, frame: object) -> None:
    raise Expired


def _execute(code: types.CodeType | str) -> dict[str, Any] | str:
    """The namespace of the executed module, or what went wrong."""
    if isinstance(code, str):
        return code
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        exec(code, module.__dict__)
    except Exception as error:
        return raised(error)
    return module.__dict__


def _compile(text: str, name: str, mode: str) -> types.CodeType | str:
    try:
        return compile(text, name, mode, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return raised(error)


def _call(call: types.CodeType, namespace: dict[str, Any], tracer: _Tracer) -> tuple[str, str]:
    tracer.lines = tracer.mask = 0
    signal.setitimer(signal.ITIMER_PROF, CALL_CPU_S)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOST_CPU_S)
    sys.settrace(tracer)
    try:
        value = eval(call, namespace)
        sys.settrace(None)
        text = canonical(value)
        return text, _wrap_of(value) if text.startswith("object ") else ""
    except Expired:
        return "timeout", ""
    except BaseException as error:
        return raised(error), ""
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _run(request: dict[str, Any], first: int, fd: int) -> None:
    """Write a JSON line [entry, ...] for each source from number `first` on."""
    signal.signal(signal.SIGPROF, _expire)
    compiled = {call: _compile(call, "<call>", "eval") for calls in request["calls"] for call in calls}
    for source, calls in zip(request["sources"][first:], request["calls"][first:], strict=True):
        module = _compile(source, FILE, "exec")
        namespace = _execute(module)
        tracer = _Tracer(request["lines"])
        entries: list[list[str]] = []
        expired = 0
        for call in calls:
            if request["fresh"] and entries:
                namespace = _execute(module)
            code = compiled[call]
            if isinstance(namespace, str):
                entries.append([namespace, "", "0"])
            elif isinstance(code, str):
                entries.append([code, "", "0"])
            elif expired >= MAX_EXPIRED:
                entries.append(["timeout", "", "0"])
            else:
                text, wrap = _call(code, namespace, tracer)
                expired += text == "timeout"
                entries.append([text, wrap, f"{tracer.mask:x}"])
        _write_all(fd, json.dumps(entries).encode() + b"\n")


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _forked(request: dict[str, Any], first: int) -> list[list[list[str]]]:
    """Entries of the sources from number `first` on, up to and including the first that a fork does not survive."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            _run(request, first, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    answers: list[list[list[str]]] = []
    received = b""
    deadline = time.monotonic() + SOURCE_WALL_S
    while select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(read_end, 1 << 18)
        if not piece:
            break
        *lines, received = (received + piece).split(b"\n")
        answers.extend(json.loads(line) for line in lines)
        if lines:
            deadline = time.monotonic() + SOURCE_WALL_S
    os.close(read_end)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if first + len(answers) < len(request["sources"]):
        answers.append([["died", "", "0"] for _ in request["calls"][first + len(answers)]])
    return answers


def _limit() -> None:
    for limit, value in (
        (resource.RLIMIT_AS, 2 << 30),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 128),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def main() -> None:
    """Serve requests until stdin ends."""
    channel = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    requests = os.fdopen(os.dup(0), "rb")
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    _limit()
    for name in sorted(PRELOADED):
        __import__(name)
    # Forks copy the pages they touch; a frozen heap is not touched by their garbage collection.
    gc.collect()
    gc.freeze()
    for line in requests:
        request = json.loads(line)
        answers: list[list[list[str]]] = []
        while len(answers) < len(request["sources"]):
            answers.extend(_forked(request, len(answers)))
        _write_all(channel, json.dumps(answers).encode() + b"\n")


if __name__ == "__main__":
    main()
