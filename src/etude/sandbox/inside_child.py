"""Runs inside a sandbox (standard library only): from the fork to the first line of foreign code, and its end.

Nothing of the zygote may be reachable from here on but its memory, which holds no secret: the control socket is closed
before foreign code runs. A fork pays for every page of memory that it is the first to write, about a hundred for the
bare fork, so what can be prepared once is prepared in the nest (`prepare`), and little Python runs here.
What it does not do: set limits that hold for the whole sandbox; they hold already.
"""

from __future__ import annotations

import _signal  # `signal` turns every number into an enum, which touches much memory
import atexit
import ctypes
import fcntl
import io
import json
import os
import resource
import sys
import types
from typing import NoReturn

MAX_FILES = 1024
"""Descriptors that a process may have open."""
_PR_SET_DUMPABLE = 4
_NAME = "<run>"
_OURS = ("etude", "etude.sandbox", *(f"etude.sandbox.inside_{name}" for name in
         ("child", "files", "nest", "run", "wire", "zygote")))  # fmt: skip

_prctl = ctypes.PyDLL(None).prctl
_KNOWN: dict[bytes, types.CodeType] = {}
"""Programs that are run often, compiled once."""


def prepare() -> None:
    """In the nest, once: standard streams, and what the interpreter sets up at first use."""
    with open(os.path.join(os.path.dirname(__file__), "iorunner.py"), "rb") as file:
        program = file.read()
    _KNOWN[program] = compile(program, _NAME, "exec")
    read, write = os.pipe()  # streams that are made on pipes behave as pipes when a fork puts its own there
    for number, (name, handle) in enumerate((("stdin", read), ("stdout", write), ("stderr", write))):
        kept = os.dup(number)
        os.dup2(handle, number)
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        stream = io.TextIOWrapper(
            open(number, "wb" if number else "rb", closefd=False),  # noqa: SIM115 (it stays open)
            encoding="utf-8",
            errors=errors,
            line_buffering=name == "stderr",
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
        os.dup2(kept, number)
        os.close(kept)
    os.close(read)
    os.close(write)
    main, stderr = sys.modules["__main__"], sys.stderr
    with open(os.devnull, "w") as sys.stderr:
        _execute_source(b"class A:\n    x: int = 1\nprint(*[A.x for _ in 'ab'], file=__import__('sys').stderr)")
        _execute_source(b"def f():\n    raise ValueError(1)\nf()")
        _execute_source(b"raise SystemExit('no')")
    sys.modules["__main__"], sys.stderr = main, stderr


def encode(argv: list[str], source: bytes, env: dict[str, str]) -> bytes:
    """What `wait` waits for."""
    if not argv and not env:
        return b"-" + source  # the frequent case: no need to touch `json`
    return b"+" + json.dumps([argv, env]).encode() + b"\n" + source


def wait(handles: list[int], max_data: int) -> NoReturn:
    """In a new fork: take `handles` as descriptors 0 to 3 and the one that tells what to do, do it, and end.

    `max_data`: bytes of private memory that this process may have (RLIMIT_DATA), 0 where a cgroup counts.
    """
    code = 126
    try:
        for number, handle in enumerate([fcntl.fcntl(handle, fcntl.F_DUPFD, 16) for handle in handles]):
            os.dup2(handle, number)
        os.closerange(5, MAX_FILES)
        os.setpgid(0, 0)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        _prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        _volunteer()
        if max_data:
            resource.setrlimit(resource.RLIMIT_DATA, (max_data, max_data))
        for name in _OURS:
            sys.modules.pop(name, None)
        _execute_source(b"pass")  # touches the memory that the real one will touch
        parts = []
        while part := os.read(4, 1 << 20):
            parts.append(part)
        os.close(4)
        code = _become(b"".join(parts))
    except (OSError, ValueError) as error:
        os.write(2, f"cannot start: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _become(work: bytes) -> int:
    if work[:1] == b"-":
        return _run_python(work[1:])
    head, _, source = work[1:].partition(b"\n")
    argv, env = json.loads(head)
    os.environ.update(env)
    return _execute(argv) if argv else _run_python(source)


def _volunteer() -> None:
    """If memory runs out, this process goes before process 1."""
    handle = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(handle, b"1000")
    os.close(handle)


def _execute(argv: list[str]) -> int:
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them; programs expect the default
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126


def _run_python(source: bytes) -> int:
    """As `python -c` would, in the interpreter that is here. Returns the exit code."""
    code = _execute_source(source)
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # foreign code again: a broken stdout, an exit function that raises
        code = code or 1
    return code


def _execute_source(source: bytes) -> int:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        exec(_KNOWN.get(source) or compile(source, _NAME, "exec"), main.__dict__)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:  # foreign code may raise anything: it is reported, as the interpreter does
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace else None  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1
