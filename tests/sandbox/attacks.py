"""The attacks of attacks.txt, what they aim at, what stops each, and how to take that away."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from etude.sandbox.namespace import NamespaceSandbox
from sandbox.machine import COUNT, RECIPE

PROTECTIONS = {
    "tree": "only the system's folders are mounted: no homes, four files of /etc, no /sys, no disks, no terminal",
    "sealed root": "everything but the private folders is read-only, the root of the tree included",
    "environment": "programs start with a small environment of their own",
    "network": "a network namespace with a loopback device and nothing else",
    "processes": "a pid namespace, and a /proc of its own",
    "process 1": "process 1 of the sandbox cannot be dumped, traced, signalled, or asked for its descriptors",
    "system calls": "a list of allowed ones: no new namespaces, mounts, tracing, io_uring, bpf, keys, foreign sockets",
    "capabilities": "none, the bounding set included, and no new privileges",
    "end of a run": "every process but process 1 is killed when a run ends; where the agent's shell is to leave jobs "
    "running, they live on inside until the sandbox ends, under the same limits",
    "descriptors": "a program inherits the standard streams and the result pipe, nothing else",
    "paths": "the host's reads and writes are resolved below the workspace by the kernel; only regular files count",
    "memory": "a limit on processes and files together: a cgroup, else a watcher, RLIMIT_DATA and no memory files",
    "number of processes": "a limit on processes and threads together",
    "disk": "a tmpfs with a size and a number of files",
    "output": "each stream is cut at its limit while the program runs on",
    "clock": "wall time, and processor time summed over all processes",
}
"""Name -> what it is. docs/security.md has the same table, and a test compares them."""


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One entry of attacks.txt."""

    name: str
    protection: str
    timeout_s: float
    then: str
    """Won if the host `reads PATH` or `writes PATH`, a process is left (`others`), or process 1 is not (`lost`)."""
    source: str


def _attacks() -> tuple[Attack, ...]:
    text = Path(__file__).with_name("attacks.txt").read_text()
    found = []
    for entry in re.split(r"^#! ", text, flags=re.MULTILINE)[1:]:
        head, _, source = entry.partition("\n")
        given = head.split(" | ")
        name, protection, timeout_s, then = given + ["", "", "10", ""][len(given) :]
        found.append(Attack(name=name, protection=protection, timeout_s=float(timeout_s), then=then, source=source))
    return tuple(found)


ATTACKS = _attacks()


@dataclass(frozen=True)
class Target:
    """What attacks aim at on the host, and the limits that they try."""

    host_file: str
    host_port: int
    host_name: str
    host_pid: int
    memory_mb: int = RECIPE.memory_mb
    pids: int = RECIPE.pids
    disk_mb: int = RECIPE.disk_mb
    output_kb: int = RECIPE.output_kb

    def aim(self, source: str) -> str:
        for name in self.__dataclass_fields__:
            source = source.replace("{" + name + "}", str(getattr(self, name)))
        return source


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """A file, a server, a name and a secret, for the length of a `with`."""
    name = f"etude-{secrets.token_hex(8)}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
    ):
        named.bind(f"\0{name}")
        named.listen()
        file = Path(folder) / "answers"
        file.write_text("42")
        Path(folder).chmod(0o755)
        os.environ["ETUDE_SECRET"] = "token"
        try:
            yield Target(str(file), server.getsockname()[1], name, os.getpid())
        finally:
            del os.environ["ETUDE_SECRET"]


async def wins(attack: Attack, sandbox: NamespaceSandbox, at: Target) -> bool:
    """Carry it out. Errors: SandboxError, OSError if it broke the sandbox."""
    done = await sandbox.run_python(at.aim(attack.source), timeout_s=attack.timeout_s)
    if max(len(done.stdout), len(done.stderr), len(done.result)) > RECIPE.output_kb << 10 or b"WON" in done.stdout:
        return True
    verb, _, path = attack.then.partition(" ")
    try:
        if verb == "reads":
            return bool(await sandbox.read_file(path))
        if verb == "writes":
            await sandbox.write_file(path, b"from the host")
            return True
    except OSError:
        return False
    if verb == "others":
        return int((await sandbox.run_python(COUNT, timeout_s=10)).stdout) > 2
    if verb == "lost":
        alive = "import os\nprint(os.path.exists('/tmp/alive'))"
        return (await sandbox.run_python(alive, timeout_s=10)).stdout != b"True\n"
    return False
