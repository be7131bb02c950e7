"""Runs inside bubblewrap (standard library only): the nest, a small Python process from which sandboxes are forked.

    bubblewrap: read-only system, no network, own pids, no privileges, dies with Etude
      +-- nest (process 1 there)      one request = one byte and one end of a socket
            +-- sandbox: own user, pid, mount, network, ipc and uts namespace; private /workspace, /tmp, /proc, /dev/shm
            |     +-- zygote (process 1 there, see inside_zygote.py), without capabilities, under seccomp
            +-- sandbox ...

Forking from a process that has its modules loaded takes a quarter of the time of bubblewrap and Python together,
and the sandboxes share its memory pages. The nest never sees foreign code or data; when it ends, the kernel kills all
that it made. What it does not do: answer requests of a sandbox; those go straight to its own socket.
"""

from __future__ import annotations

import _signal
import array
import ctypes
import fcntl
import gc
import os
import resource
import socket
import struct

from etude.sandbox import inside_child, inside_zygote
from etude.sandbox.inside_wire import Config, read_frame, send_frame

WARM = "bisect collections copy datetime functools heapq itertools json math operator re string struct typing"
"""What the programs inside are likely to import, loaded once and shared by all. Every page of it is a cost to every
fork, so only what is small or frequent; not `random` and `threading`, which repair themselves after every fork."""

_CLONE = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""New mount, uts, ipc, user, pid and network namespace."""
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_NOSUID, _NODEV, _NOEXEC, _BIND = 2, 4, 8, 4096
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_SET_SECCOMP, _PR_SET_DUMPABLE = 24, 38, 47, 22, 4
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.PyDLL(None, use_errno=True)


def main() -> None:
    """Serve until the host closes the control socket (this process's standard input)."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    try:
        header, rules = read_frame(control)
    except EOFError:
        os._exit(0)
    config = Config(**header)
    os.nice(config.nice)
    for name in WARM.split():
        __import__(name)
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    os.umask(0o022)
    os.environ.pop("PWD", None)
    inside_zygote.rehearse(config)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # the kernel reaps what the nest forks
    gc.collect()
    gc.freeze()
    control.sendall(b"k")
    user, group = os.getuid(), os.getgid()
    clone = _SYS_CLONE[os.uname().machine]
    while True:
        request, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            os._exit(0)
        # As os.fork, but at once into new namespaces. Neither this process nor its forks ever have a second thread.
        pid = _libc.syscall(clone, _CLONE | _signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            control.close()
            _start(handles[0], user, group, config, bytes(rules))
        if pid < 0:
            failed = socket.socket(fileno=handles[0])
            send_frame(failed, {"failed": f"clone: {os.strerror(ctypes.get_errno())}"})
            failed.close()
        else:
            os.close(handles[0])


def _start(handle: int, user: int, group: int, config: Config, rules: bytes) -> None:
    """In a fork that has its namespaces: become a sandbox. Never returns."""
    channel = socket.socket(fileno=handle)
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        _mount_private(config)
        _raise_loopback()
        socket.sethostname("sandbox")
        os.chdir("/workspace")
        _limit(config)
        _drop_privileges(rules)
    except OSError as error:
        send_frame(channel, {"failed": str(error)})
        os._exit(1)
    inside_zygote.serve(channel, config)


def _mount_private(config: Config) -> None:
    """One tmpfs, whose size is the disk limit, seen as /workspace, /tmp and /dev/shm; a /proc of its own processes."""
    inodes = max(1024, config.disk_bytes // 4096)
    options = f"size={config.disk_bytes},nr_inodes={inodes},mode=755".encode()
    _mount(b"tmpfs", b"/tmp", b"tmpfs", _NOSUID | _NODEV, options)
    for name in ("workspace", "tmp", "shm"):
        os.mkdir(f"/tmp/{name}", 0o755)
    _mount(b"/tmp/workspace", b"/workspace", None, _BIND, None)
    _mount(b"/tmp/shm", b"/dev/shm", None, _BIND, None)
    _mount(b"/tmp/tmp", b"/tmp", None, _BIND, None)
    _mount(b"proc", b"/proc", b"proc", _NOSUID | _NODEV | _NOEXEC, None)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = array.array("b", struct.pack("16sH22x", b"lo", 0))
        fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", request, 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | _IFF_UP))


def _limit(config: Config) -> None:
    """Limits that hold for everything in the sandbox; those of a single run are set by the zygote."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: config.disk_bytes,
        resource.RLIMIT_NOFILE: inside_child.MAX_FILES,
        resource.RLIMIT_MEMLOCK: 64 << 10,
        resource.RLIMIT_MSGQUEUE: 64 << 10,
        resource.RLIMIT_NPROC: config.pids + 1,  # counted for each user namespace since Linux 5.14
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_privileges(rules: bytes) -> None:
    """No capability now or ever; nobody may look into this process; then the system-call filter."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    _check(_libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0), "clear ambient capabilities")
    version_3 = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(version_3, bytes(24)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    buffer = ctypes.create_string_buffer(rules, len(rules))
    head = struct.pack("HxxxxxxP", len(rules) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, head, 0, 0), "seccomp")


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), options), f"mount {target.decode()}")


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def _check(answer: int, what: str) -> None:
    if answer != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
