"""Runs inside a sandbox (standard library only): keeps one MCP server alive between calls, and passes its lines on.

    host --run_python: exchange--> Unix socket --> relay --pipes--> server        one line is one JSON-RPC message

A question is one line of JSON, {"send": [line, ...], "wait_s": seconds}. The answer is one, {"alive": bool, "more":
bool, "why": text}, and then bytes that the server wrote, at most PIECE of them. With wait_s > 0 it comes as soon as the
server has sent a request or a response, else at once. Whoever else speaks to the socket is inside as well: nothing is
trusted on either side.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from typing import Any

PIECE = 48 << 10
"""Bytes of one answer: what a run may write, by the recipe of the sandbox, is more."""
MAX_KEPT = 16 << 20
"""Bytes that the server may have sent and nobody asked for."""
_PATIENCE_S = 5.0
"""How long a server may leave its input unread."""


def main(address: str, command: list[str], env: dict[str, str]) -> None:
    """Serve until the server's end of a question is the last one: the sandbox ends this process."""
    listener = socket.socket(socket.AF_UNIX)
    errors = open(f"{address}.err", "wb")  # noqa: SIM115 (the server's, for as long as it lives)
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **env},
            bufsize=0, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        errors.write(f"{command[0]}: {error.strerror}\n".encode())
        errors.close()
        server = None
    listener.bind(address)
    listener.listen(1)
    kept = bytearray()
    while True:
        caller, _ = listener.accept()
        with caller:
            question = json.loads(_line_of(caller))
            alive = _exchange(server, kept, question["send"], question["wait_s"])
            piece = bytes(kept[:PIECE])
            del kept[:PIECE]
            head = {"alive": alive, "more": bool(kept), "why": "" if alive else _last_words(address)}
            with contextlib.suppress(OSError):  # whoever asked has been killed
                caller.sendall(json.dumps(head).encode() + b"\n" + piece)


def _line_of(caller: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        part = caller.recv(1 << 16)
        if not part:
            return b'{"send": [], "wait_s": 0}'
        data += part
    return bytes(data)


def _exchange(server: Any, kept: bytearray, send: list[str], wait_s: float) -> bool:
    """Hand lines in while bytes come out, so that neither pipe can block the other. False: the server has ended."""
    if server is None:
        return False
    rest = "".join(line + "\n" for line in send).encode()
    deadline = time.monotonic() + wait_s
    os.set_blocking(server.stdin.fileno(), False)
    with selectors.DefaultSelector() as ready:
        ready.register(server.stdout, selectors.EVENT_READ)
        if rest:
            ready.register(server.stdin, selectors.EVENT_WRITE)
        while rest or (not _asks_or_answers(kept) and time.monotonic() < deadline):
            left = deadline - time.monotonic()
            if left < -_PATIENCE_S:
                return False
            for key, _ in ready.select(max(0.0, left) if not rest else 0.5):
                if key.fileobj is server.stdin:
                    rest = _write(server, rest)
                    if not rest:
                        ready.unregister(server.stdin)
                    continue
                part = os.read(server.stdout.fileno(), 1 << 16)
                kept += part
                if not part or len(kept) > MAX_KEPT:
                    return False
    return True


def _write(server: Any, rest: bytes) -> bytes:
    try:
        return rest[os.write(server.stdin.fileno(), rest) :]
    except BlockingIOError:
        return rest
    except OSError:
        return b""  # it has closed its input: reading will tell


def _asks_or_answers(kept: bytearray) -> bool:
    """Whether a whole line among `kept` has an id: notifications alone are waited past."""
    end = kept.rfind(b"\n")
    return end >= 0 and kept.find(b'"id"', 0, end) >= 0


def _last_words(address: str) -> str:
    try:
        with open(f"{address}.err", "rb") as file:
            return file.read()[-400:].decode(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
