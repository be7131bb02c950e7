"""Runs inside a sandbox (standard library only): from the fork to the first line of foreign code, and its end.

Nothing of the zygote may be reachable from here on but its memory, which holds no secret: the control socket is closed
before foreign code runs. What it does not do: set limits that hold for the whole sandbox; they hold already.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import sys
import threading
import traceback
import types
from typing import NoReturn

MAX_FILES = 1024
"""Descriptors that a process may have open."""
_PR_SET_DUMPABLE = 4
_NAME = "<run>"


def become(
    handles: list[int], limits: dict[int, int], argv: list[str], source: bytes, env: dict[str, str]
) -> NoReturn:
    """Take `handles` as descriptors 0 to 3, then execute `argv`, or Python `source` if `argv` is empty."""
    code = 126
    try:
        for number, handle in enumerate(handles):  # they are all above 3: 0 to 2 were open, and so was the socket
            os.dup2(handle, number)
        os.closerange(4, MAX_FILES)
        os.setpgid(0, 0)
        os.umask(0o022)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for kind, value in limits.items():
            resource.setrlimit(kind, (value, value))
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        _volunteer()
        os.environ.clear()
        os.environ.update(env)
        code = _run_python(source) if not argv else _execute(argv)
    except (OSError, ValueError) as error:
        os.write(2, f"cannot start: {error}\n".encode(errors="replace"))
    finally:
        os._exit(code)


def _volunteer() -> None:
    """If memory runs out, this process goes before process 1."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _execute(argv: list[str]) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect the default
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
        return 127 if isinstance(error, FileNotFoundError) else 126
    except ValueError as error:
        os.write(2, f"{error}\n".encode(errors="replace"))
        return 126


def _run_python(source: bytes) -> int:
    """As `python -c` would, in the interpreter that is here. Returns the exit code."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "etude"]:
        del sys.modules[name]
    sys.path[:] = ["/workspace", *(path for path in sys.path if not path.startswith("/run/etude"))]
    sys.argv[:] = ["-c"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if number == 2 else "surrogateescape"
        stream = open(number, "r" if number == 0 else "w", encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(source, _NAME, "exec"), main.__dict__)
    except SystemExit as stop:
        code = _exit_code(stop)
    except BaseException as error:  # foreign code may raise anything: it is reported, as the interpreter does
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # foreign code again: a broken stdout, an exit function that raises
        code = code or 1
    return code


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1
