"""Runs inside a sandbox as its process 1 (standard library only): answers the host, one question after the other.

    {"op": "run", ...}                                    -> inside_run.py: a fork does it, and ends with all it made,
                                                             or leaves it running
    {"op": "put" | "get" | "list" | "save" | "restore"}   -> inside_files.py

Process 1 of a pid namespace cannot be killed or stopped from inside; it is not dumpable, so nobody inside can look into
it. It keeps one fork ready before the first run, and after a run that may leave something, as a shell's do: more of
those will come, others often do not. What it does not do: judge what a run did; a non-zero exit code is data.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any, NoReturn

from etude.sandbox import inside_child
from etude.sandbox.inside_files import Workspace, encode_error
from etude.sandbox.inside_run import Fork, Run, is_over_memory, kill_all, others, reap_orphans
from etude.sandbox.inside_wire import Config, head_of, read_frame, send_frame

_WATCH_MS = 50
"""Between two looks at the memory of what runs on between questions, where no cgroup counts it."""
_IDLE_MS = 3
"""After so long without a question, prepare for the next; a sandbox that is closed after its last answer never does."""


def serve(channel: socket.socket, config: Config) -> NoReturn:
    """Answer until the host hangs up; then end, and with process 1 everything in the sandbox."""
    workspace = Workspace("/workspace", config.disk_bytes)
    ask = select.poll()
    ask.register(channel, select.POLLIN)
    fork: Fork | None = None
    is_limited, goes_on = False, True
    kept: frozenset[int] = frozenset()
    with contextlib.suppress(EOFError, ConnectionError):
        send_frame(channel, {"ready": True})
        while True:
            if is_limited and goes_on and fork is None and not ask.poll(_IDLE_MS):
                fork = Fork(config)
            while kept and not ask.poll(_WATCH_MS):
                kept = _look_after(kept, config)
            header, body = read_frame(channel)
            is_limited = True  # the host asks nothing before it has put this process into its cgroup
            try:
                if header["op"] == "run":
                    if fork is None or not fork.is_waiting():
                        fork = Fork(config)
                    goes_on = bool(header.get("leaves"))
                    run, fork = Run(fork, channel, config, header, body, kept), None
                    answer, bodies = run.finish()
                    workspace.mend()
                elif header["op"] == "save":
                    _save(workspace, channel)
                    continue
                else:
                    answer, bodies = _files(workspace, header, body)
            except OSError as error:
                answer, bodies = encode_error(error), []
            send_frame(channel, answer, *bodies)
            if header["op"] == "run" and (kept or goes_on):  # looked for while nobody waits
                kept = others()
    os._exit(0)


def _look_after(kept: frozenset[int], config: Config) -> frozenset[int]:
    """What still runs of what was left running."""
    if config.watch_memory and is_over_memory(config.memory_bytes):
        kill_all(lambda ended: None)
    reap_orphans(lambda ended: None)
    return kept & others()


def _save(workspace: Workspace, channel: socket.socket) -> None:
    entries = workspace.save()
    size = sum(int(str(size)) for _, kind, _, size in entries if kind == "f")
    channel.sendall(head_of({"entries": entries}, size))
    for content in workspace.contents(entries):  # one at a time: memory is limited
        channel.sendall(content)


def _files(workspace: Workspace, header: dict[str, Any], body: memoryview) -> tuple[dict[str, Any], list[bytes]]:
    op = header["op"]
    if op == "put":
        at = 0
        for path, size in header["files"]:
            workspace.write(path, body[at : at + size])
            at += size
        return {}, []
    if op == "get":
        return {}, [workspace.read(header["path"])]
    if op == "list":
        return {"files": workspace.files()}, []
    workspace.restore(header["entries"], body)
    return {}, []


def rehearse(config: Config) -> None:
    """In the nest, once: do what sandboxes do, so that each of them need not do it for the first time."""
    inside_child.prepare()
    ours, theirs = socket.socketpair()
    workspace = Workspace("/run/etude", config.disk_bytes)
    for _ in range(8):
        request = {"op": "run", "argv": [], "env": {}, "stdin": 1, "timeout_s": 5.0}
        send_frame(theirs, request, b"x", b"print(1)")
        answer, bodies = Run(Fork(config), ours, config, *read_frame(ours)).finish()
        send_frame(ours, answer, *bodies)
        read_frame(theirs)
        _files(workspace, {"op": "list"}, memoryview(b""))
    workspace.close()
    ours.close()
    theirs.close()
