"""What nobody inside can see or do."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from etude.sandbox.namespace import NamespaceSandbox
from sandbox.machine import Machine, box


def test_nothing_of_the_host_environment_is_inside(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_SECRET", "token")
    done = host.shell("env; tr '\\0' '\\n' < /proc/self/environ")
    names = {line.split("=")[0] for line in done.stdout.decode().splitlines()}
    allowed = {"PATH", "HOME", "LANG", "TERM", "USER", "PWD", "SHLVL", "_"}
    assert names <= allowed | {"PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8"}


def test_files_of_the_host_are_not_there(host: Machine, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the grading tests")
    tmp_path.chmod(0o755)
    paths = [str(secret), "/root", "/home", "/etc/shadow", "/etc/hostname", "/var/lib", "/var/log", "/sys", "/boot",
             "/mnt",             os.path.expanduser("~"), os.getcwd()]  # fmt: skip
    done = host.python(f"import os\nprint([p for p in {paths!r} if os.path.lexists(p)])")
    assert done.stdout == b"[]\n"
    names = host.shell("cat /etc/passwd; ls /etc /dev /run").stdout.decode()
    assert "shadow" not in names
    assert "daemon" not in names


def test_the_root_folder_holds_only_what_is_needed(host: Machine) -> None:
    names = set(host.shell("ls /").stdout.decode().split())
    assert names <= {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "tmp", "usr", "var",
                     "workspace", "root", "opt", "home", "work"}  # fmt: skip
    find = "find / -path /usr -prune -o -path /proc -prune -o -writable -not -type l -print 2>/dev/null | sort"
    writable = host.shell(find, timeout_s=30).stdout.decode().split()
    assert writable == [
        "/dev/full",
        "/dev/null",
        "/dev/random",
        "/dev/shm",
        "/dev/urandom",
        "/dev/zero",
        "/tmp",
        "/workspace",
    ]


def test_the_system_cannot_be_written(host: Machine) -> None:
    done = host.shell(
        "for p in /usr/x /etc/x /x /dev/x /run/etude/x /var/tmp/x; do touch $p 2>/dev/null && echo $p; done; true"
    )
    assert done.stdout == b""


def test_only_processes_of_the_sandbox_are_visible(host: Machine) -> None:
    done = host.python(
        "import os\nprint(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))\nprint(os.getpid())"
    )
    pids, own = done.stdout.decode().splitlines()
    assert pids == f"[1, {own}]"


def test_process_1_cannot_be_looked_into_or_ended(host: Machine) -> None:
    source = (
        "import os, signal\nfor f in 'mem', 'environ', 'maps', 'fd', 'cwd':\n"
        "    try: os.listdir('/proc/1/fd') if f == 'fd' else open('/proc/1/' + f).read(1)\n"
        "    except PermissionError: print('no', end=' ')\n"
        "for s in range(1, 65):\n"
        "    try: os.kill(1, s)\n    except OSError: pass\n"
        "print('still here')"
    )

    async def twice(sandbox: NamespaceSandbox) -> tuple[bytes, bytes]:
        first = await sandbox.run_python(source, timeout_s=10)
        second = await sandbox.run_python("print('and here')", timeout_s=10)
        return first.stdout, second.stdout

    assert host.in_box(twice) == (b"no no no no no still here\n", b"and here\n")


def test_the_control_socket_is_not_inherited(host: Machine) -> None:
    source = "import os\nprint([f for f in range(4, 1024) if os.path.lexists(f'/proc/self/fd/{f}')][:-1])"
    assert host.python(source).stdout == b"[]\n"
    assert host.shell("ls /proc/self/fd").stdout == b"0\n1\n2\n3\n4\n"


def test_other_sandboxes_are_not_visible(host: Machine) -> None:
    async def two() -> tuple[bytes, bytes]:
        async with box(host.pool, {"mine.txt": "first"}) as first, box(host.pool) as second:
            script = 'echo x > /tmp/t; echo x > /dev/shm/s; sleep 3 & python3 -c "$P"'
            server = "import socket,time;s=socket.socket(socket.AF_UNIX);s.bind('\\0name');s.listen();time.sleep(3)"
            serving = asyncio.create_task(first.exec(["sh", "-c", script], env={"P": server}, timeout_s=10))
            await asyncio.sleep(0.7)
            look = (
                "import os, socket\ns = socket.socket(socket.AF_UNIX)\nprint(s.connect_ex('\\0name') != 0)\n"
                "print(os.listdir('/workspace'), os.listdir('/tmp'), os.listdir('/dev/shm'))\n"
                "print(len([p for p in os.listdir('/proc') if p.isdigit()]))"
            )
            done = await second.run_python(look, timeout_s=10)
            await serving
            return done.stdout, done.stderr

    assert host.run(two()) == (b"True\n[] [] []\n2\n", b"")


def test_there_is_no_network_but_an_own_loopback(host: Machine) -> None:
    source = (
        "import socket\nprint(open('/proc/net/dev').read().count(':'))\n"
        "a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname()); print('loop')\n"
        "for target in ('1.1.1.1', 53), ('10.0.0.1', 80), ('169.254.169.254', 80):\n"
        "    try: socket.create_connection(target, 2)\n    except OSError as e: print(e.errno)\n"
    )
    done = host.python(source)
    assert done.stdout == b"1\nloop\n101\n101\n101\n", done.stderr


def test_a_server_on_the_hosts_loopback_cannot_be_reached(host: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = host.python(f"import socket\nprint(socket.socket().connect_ex(('127.0.0.1', {port})))")
    assert done.stdout == b"111\n"  # refused


@pytest.mark.parametrize("way", ["fork", "exec"])
def test_there_are_no_capabilities_and_no_new_privileges(host: Machine, way: str) -> None:
    done = (
        host.python("print(open('/proc/self/status').read())") if way == "fork" else host.shell("cat /proc/self/status")
    )
    fields = dict(line.split(":", 1) for line in done.stdout.decode().splitlines() if ":" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"].strip() == "1"
    assert fields["Seccomp"].strip() == "2"
    assert fields["Uid"].split() == ["1000"] * 4


CALLS = {
    "ptrace": (101, 0, 0, 0, 0), "mount": (165, 0, 0, 0, 0), "bpf": (321, 0, 0, 0), "keyctl": (250, 0, 0),
    "add_key": (248, 0, 0, 0, 0), "userfaultfd": (323, 0), "kexec_load": (246, 0, 0, 0, 0),
    "io_uring_setup": (425, 1, 0), "perf_event_open": (298, 0, 0, 0, 0, 0),
    "unshare": (272, 0x10000000), "setns": (308, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0), "pidfd_getfd": (438, 0, 0, 0), "open_by_handle_at": (304, 0, 0, 0),
    "init_module": (175, 0, 0, 0), "pivot_root": (155, 0, 0), "umount2": (166, 0, 0), "open_tree": (428, 0, 0, 0),
    "name_to_handle_at": (303, 0, 0, 0, 0, 0), "chroot": (161, 0), "reboot": (169, 0, 0, 0), "fsopen": (430, 0, 0),
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_dangerous_system_calls_are_refused(host: Machine) -> None:
    source = (
        f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nfor name, call in {CALLS!r}.items():\n"
        "    print(name, c.syscall(*call), ctypes.get_errno())"
    )
    assert host.python(source).stdout.decode().splitlines() == [f"{name} -1 1" for name in CALLS]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_new_namespaces_foreign_families_and_other_processes_limits_are_refused(host: Machine) -> None:
    calls = {
        "clone newuser": (56, 0x10000011, 0, 0, 0, 0), "clone newnet": (56, 0x40000011, 0, 0, 0, 0),
        "clone3": (435, 0, 0), "vsock": (41, 40, 1, 0), "packet": (41, 17, 3, 0), "netlink": (41, 16, 3, 0),
        "alg": (41, 38, 5, 0), "prlimit of 1": (302, 1, 7, 0, 0), "personality": (135, 0x0400000),
        "x32 getpid": (0x40000000 + 39,), "unknown": (600,),
    }  # fmt: skip
    source = (
        "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, call in {calls!r}.items():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n        r = c.syscall(*call); os._exit(77 if r >= 0 else ctypes.get_errno())\n"
        "    print(name, os.waitpid(pid, 0)[1] in (38 << 8, 31))"
    )
    assert host.python(source).stdout.decode().splitlines() == [f"{name} True" for name in calls]


def test_devices_and_set_user_id_programs_are_useless(host: Machine) -> None:
    script = (
        "mknod d b 1 1 2>/dev/null && echo device; "
        "cp /usr/bin/id . && chmod u+s id && ./id -u; su -c id 2>/dev/null; true"
    )
    assert host.shell(script).stdout == b"1000\n"
