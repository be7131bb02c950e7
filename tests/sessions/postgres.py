"""A real PostgreSQL server for the tests of a session, which can be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from etude.errors import EtudeError


def _program(name: str) -> str | None:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def _user() -> str:
    """Whom the server runs as: it refuses root."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres").pw_name
    return "nobody"


@dataclass
class Postgres:
    """One server on a Unix socket and a loopback port."""

    folder: Path
    port: int
    user: str

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://etude@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """URL of a new, empty one."""
        name = f"sessions_{uuid.uuid4().hex[:8]}"
        self._as_user("createdb", "-h", str(self.folder), "-p", str(self.port), "-U", "etude", name)
        return self.url(name)

    def start(self) -> None:
        options = f"-k {self.folder} -p {self.port} -c listen_addresses=127.0.0.1 -c fsync=on"
        self._as_user("pg_ctl", "-D", str(self.folder / "data"), "-w", "-t", "60", "-l", str(self.folder / "log"),
                      "-o", options, "start")  # fmt: skip

    def stop(self, mode: str = "immediate") -> None:
        """immediate: as a crash, without a last checkpoint."""
        self._as_user("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", mode, "stop")

    def _as_user(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        command = [program, *arguments]
        if os.getuid() == 0:
            command = ["runuser", "-u", self.user, "--", *command]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", timeout=120
        )
        if done.returncode != 0:
            raise EtudeError(f"{name} failed", cause=done.stdout)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[Postgres]:
    """Skips the test where there is no server."""
    if _program("initdb") is None or (os.getuid() == 0 and shutil.which("runuser") is None):
        pytest.skip("needs a PostgreSQL server: apt-get install postgresql")
    server = Postgres(folder, _free_port(), _user())
    if os.getuid() == 0:
        shutil.chown(folder, server.user)
        for parent in folder.parents:  # the server's user must be able to walk to it
            if parent.stat().st_uid == 0 and parent != Path("/") and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
    server._as_user("initdb", "-D", str(folder / "data"), "-U", "etude", "-A", "trust", "--no-sync")
    server.start()
    try:
        yield server
    finally:
        pid = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        try:
            server.stop()
        except EtudeError:  # too busy a machine: nothing may stay behind
            os.kill(pid, signal.SIGQUIT)
