"""Which files of the host a sandbox can see, and which Python runs there: the arguments of bubblewrap.

Seen, read-only: /usr with its links, the Python prefix, a few files of /etc that programs cannot do without, and the
sources of `iorunner` and `inside_*`. All else of the host (homes, /var, /run, the run's folder, other users' files,
secrets in /etc) is not there to be found. The root folder itself is memory, sealed before anything runs.
What it does not do: /workspace, /tmp and /proc, which each sandbox makes for itself (inside_nest.py).
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox.recipe import SandboxRecipe

ROOT_RUNS_AS = 1_900_000_000
"""User and group that root starts bubblewrap as: no name, no files, no rights."""
INSIDE_ID = 1000
"""User and group that programs inside see."""
ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "USER": "agent",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}
"""The whole environment of a program inside. The fixed hash seed makes the order of sets the same in every run."""
SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
OLDEST_PYTHON = (3, 9)

_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d")
_PRIVATE = ("/tmp", "/workspace", "/dev", "/proc")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FILES = {
    "/etc/passwd": f"root:x:0:0::/nonexistent:/bin/false\nagent:x:{INSIDE_ID}:{INSIDE_ID}::/tmp:/bin/sh\n",
    "/etc/group": f"root:x:0:\nagent:x:{INSIDE_ID}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "/run/etude/etude/__init__.py": "",
    "/run/etude/etude/sandbox/__init__.py": "",
}
_INSIDE = ("inside_child", "inside_files", "inside_nest", "inside_run", "inside_wire", "inside_zygote", "iorunner")
_START = "import sys; sys.path.insert(0, '/run/etude'); from etude.sandbox.inside_nest import main; main()"


@dataclass(frozen=True, kw_only=True, slots=True)
class Python:
    """An interpreter that a sandbox can run."""

    executable: str
    prefix: str
    """Bound read-only; empty if it lies under /usr."""
    why: str
    """How it was chosen, for `etude doctor`."""


def choose_python(recipe: SandboxRecipe) -> Python:
    """Errors: SandboxError if the asked one cannot be read by a sandbox, or there is none."""
    if recipe.python != "auto":
        if (python := _at(recipe.python, "asked for by the recipe")) is None:
            raise SandboxError(
                f"a sandbox cannot run {recipe.python}",
                cause="it is missing, or the user that sandboxes run as cannot read it",
                hint=f'install it under /usr, or set sandbox.python = "auto" (Python {OLDEST_PYTHON[0]}.'
                f"{OLDEST_PYTHON[1]} or newer)",
            )
        return python
    own = getattr(sys, "_base_executable", sys.executable)
    if python := _at(own, "the one that runs Etude"):
        return python
    for path in SYSTEM_PYTHONS:
        if python := _at(path, f"the system's, because sandboxes cannot read {own}"):
            return python
    raise SandboxError(
        "there is no Python that a sandbox can run",
        cause=f"the user that sandboxes run as cannot read {own}, and {' and '.join(SYSTEM_PYTHONS)} are missing",
        hint="apt install python3",
    )


def _at(path: str, why: str) -> Python | None:
    executable = os.path.realpath(path)
    prefix = str(Path(executable).parent.parent)
    if not os.access(executable, os.X_OK) or not _can_be_read(executable):
        return None
    if _is_under(prefix, "/usr"):
        return Python(executable=executable, prefix="", why=why)
    home = os.path.expanduser("~")
    if prefix == "/" or _is_under(home, prefix) or _is_under(os.getcwd(), prefix):
        return None  # binding this prefix would show more than a Python
    if any(_is_under(prefix, private) for private in _PRIVATE):
        return None  # every sandbox covers it with a folder of its own
    return Python(executable=executable, prefix=prefix, why=why)


def _is_under(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _can_be_read(path: str) -> bool:
    """Root's sandboxes run as a user without rights: every folder on the way must be open to all."""
    if os.geteuid() != 0:
        return os.access(path, os.R_OK)
    try:
        folders = all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(path).parents)
        return folders and bool(os.stat(path).st_mode & stat.S_IROTH)
    except OSError:
        return False


def find_bubblewrap() -> str:
    """Errors: SandboxError if it is not installed."""
    if found := shutil.which("bwrap", path=os.environ.get("PATH", "") + ":/usr/bin:/usr/local/bin"):
        return found
    raise SandboxError("no sandbox can be started", cause="bubblewrap (bwrap) is not installed", hint=BWRAP_HINT)


BWRAP_HINT = "apt install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"


def command(python: Python, open_files: list[int]) -> list[str]:
    """bubblewrap's argv. Appends descriptors to `open_files`: pass them on, then close them."""
    argv = [
        find_bubblewrap(), "--unshare-user", "--unshare-all", "--die-with-parent", "--as-pid-1",
        "--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID), "--cap-drop", "ALL", "--clearenv",
    ]  # fmt: skip
    path = f"{python.prefix}/bin:{ENV['PATH']}" if python.prefix else ENV["PATH"]
    for name, value in {**ENV, "PATH": path}.items():
        argv += ["--setenv", name, value]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_LINKS:
        system = Path("/", name)
        if system.is_symlink():
            argv += ["--symlink", os.readlink(system), str(system)]
        elif system.is_dir():
            argv += ["--ro-bind", str(system), str(system)]
    etc = (*_ETC, *sorted(path.name for path in Path("/etc").glob("python3*")))
    for name in etc:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    if python.prefix:
        argv += ["--ro-bind", python.prefix, python.prefix]
    for written, text in _written_files():
        open_files.append(_in_memory(written, text))
        argv += ["--perms", "0444", "--file", str(open_files[-1]), written]
    for name in _DEVICES:
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        argv += ["--symlink", f"/proc/self/{target}", f"/dev/{name}"]
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/workspace"):
        argv += ["--dir", folder]
    argv += ["--proc", "/proc", "--remount-ro", "/", "--chdir", "/"]
    return [*argv, "--", python.executable, "-s", "-B", "-X", "utf8", "-c", _START]


def _written_files() -> Iterator[tuple[str, str]]:
    yield from _FILES.items()
    for name in _INSIDE:
        source = files("etude.sandbox").joinpath(f"{name}.py").read_text(encoding="utf-8")
        yield f"/run/etude/etude/sandbox/{name}.py", source


def _in_memory(name: str, text: str) -> int:
    handle = os.memfd_create(name)
    os.write(handle, text.encode())
    os.lseek(handle, 0, os.SEEK_SET)
    return handle
