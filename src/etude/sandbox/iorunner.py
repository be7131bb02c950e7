"""The program that runs inside a sandbox to evaluate calls: standard library only, sent there as source.

It reads {"path", "calls", "cpu_s", "wall_s"} as JSON on stdin and writes one JSON line [index, text] a call to file
descriptor 3. The calls run in a fork, the module executed anew before each; after a call that ends its process (an
exit) a new fork takes the rest, after one that runs into its limit (an endless loop) the rest count as `timeout`, too.
This process itself never executes the code under test.

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


def _child(code: types.CodeType, path: str, calls: list[str], cpu_s: float, fd: int) -> None:
    """Answer the calls in order, each with the module executed anew. Nothing in Python sees the CPU timer end it."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    for call in calls:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        module = types.ModuleType("solution")
        module.__file__ = path
        sys.modules["solution"] = module
        try:
            exec(code, module.__dict__)
            text = canonical(eval(call, module.__dict__))
        except BaseException as error:
            text = raised(error)
        data = text.encode("utf-8", "replace")
        _write_all(fd, len(data).to_bytes(4, "big") + data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


class _Answers:
    """Reads length-prefixed texts from a child's pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.data = b""

    def next(self, wall_s: float) -> str | None:
        """The next text; `timeout` after `wall_s`; None where the child ended or wrote nonsense."""
        deadline = time.monotonic() + wall_s
        while True:
            size = int.from_bytes(self.data[:4], "big")
            if size > 8 * MAX_TEXT:
                return None
            if len(self.data) >= 4 + size:
                text = self.data[4 : 4 + size].decode("utf-8", "replace")
                self.data = self.data[4 + size :]
                return text
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.fd], [], [], left)[0]:
                return "timeout"
            piece = os.read(self.fd, 65_536)
            if not piece:
                return None
            self.data += piece


def _evaluate(code: types.CodeType, path: str, calls: list[str], cpu_s: float, wall_s: float) -> list[str]:
    """Texts of the first calls, up to and including the first one that does not come back; at least one."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            os.close(3)
            _child(code, path, calls, cpu_s, write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    answers = _Answers(read_end)
    texts: list[str] = []
    lost: str | None = ""
    while len(texts) < len(calls):
        lost = answers.next(wall_s)
        if lost is None or lost == "timeout":
            break
        texts.append(lost)
    os.close(read_end)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if len(texts) < len(calls):
        cpu_spent = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        texts.append("timeout" if lost == "timeout" or cpu_spent else "died")
    return texts


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
    calls = request["calls"]
    index = 0
    while index < len(calls):
        texts = [failure] if failure else _evaluate(code, path, calls[index:], request["cpu_s"], request["wall_s"])
        if texts[-1] == "timeout":  # the others would most likely spend their time in the same loop
            texts += ["timeout"] * (len(calls) - index - len(texts))
        for text in texts:
            _write_all(3, json.dumps([index, text]).encode() + b"\n")
            index += 1


if __name__ == "__main__":
    main()
