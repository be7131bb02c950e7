"""What the host and the inside say to each other (standard library only; used on both sides).

    frame = header length, body length (4 bytes each, big-endian), header (JSON), body

`Config` is what the host tells the nest once. What it does not do: bound what it reads; the host, which does not trust
what comes back, reads for itself (channel.py).
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, NamedTuple

HEAD = struct.Struct(">II")
_SMALL = 1 << 16


class Config(NamedTuple):  # a dataclass would load `inspect`, and forks pay for memory
    """The same for all sandboxes of a nest."""

    disk_bytes: int
    memory_bytes: int
    output_bytes: int
    pids: int
    nice: int
    watch_memory: bool
    """No cgroup counts memory: process 1 does it."""


def head_of(header: dict[str, Any], body_size: int) -> bytes:
    """A frame without its body."""
    text = json.dumps(header).encode()
    return HEAD.pack(len(text), body_size) + text


def send_frame(channel: socket.socket, header: dict[str, Any], *bodies: bytes) -> None:
    """Blocks until the other side has taken it."""
    size = sum(map(len, bodies))
    if size < _SMALL:
        channel.sendall(b"".join((head_of(header, size), *bodies)))
        return
    channel.sendall(head_of(header, size))
    for body in bodies:  # memory is limited: no copy of what is large
        channel.sendall(body)


def read_frame(channel: socket.socket) -> tuple[dict[str, Any], memoryview]:
    """Errors: EOFError if the other side has gone."""
    header_size, body_size = HEAD.unpack(_read_exactly(channel, HEAD.size))
    header = json.loads(bytes(_read_exactly(channel, header_size)))
    return header, _read_exactly(channel, body_size)


def _read_exactly(channel: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    at = 0
    while at < size:
        got = channel.recv_into(data[at:])
        if got == 0:
            raise EOFError("the host has gone")
        at += got
    return data
