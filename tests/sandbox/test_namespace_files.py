"""Files go in and out without following links, whatever a program left behind."""

from __future__ import annotations

import asyncio

import pytest

from etude.sandbox.namespace import NamespaceSandbox
from sandbox.machine import Machine, box, closing


def test_files_written_are_read_back_and_listed(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> None:
        data = bytes(range(256)) * 4000
        await sandbox.write_file("deep/er/data.bin", data)
        await sandbox.write_file("solution.py", b"")
        assert await sandbox.read_file("deep/er/data.bin") == data
        assert await sandbox.read_file("./deep/../solution.py") == b""
        assert await sandbox.list_files() == ("deep/er/data.bin", "solution.py")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("missing")
        with pytest.raises(IsADirectoryError):
            await sandbox.read_file("deep")

    host.in_box(run)


@pytest.mark.parametrize("path", ["/etc/passwd", "../etc/passwd", "a/../../etc/passwd", "", ".", "..", "nul\0byte"])
def test_a_path_that_leads_out_or_is_none_is_refused(host: Machine, path: str) -> None:
    async def run(sandbox: NamespaceSandbox) -> None:
        with pytest.raises((PermissionError, FileNotFoundError, IsADirectoryError, OSError)):
            await sandbox.read_file(path)
        with pytest.raises(OSError):  # noqa: PT011 (of several kinds)
            await sandbox.write_file(path, b"x")
        assert await sandbox.list_files() == ()

    host.in_box(run)


def test_a_link_that_leads_out_is_refused(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> None:
        plant = (
            "ln -s /etc/passwd out; ln -s ../tmp up; ln -s /proc/self/root/etc/passwd magic; ln -s loop loop; "
            "ln -s in here; echo x > in"
        )
        await sandbox.exec(["sh", "-c", plant], timeout_s=10)
        for path in ("out", "up/x", "magic", "loop"):
            with pytest.raises(PermissionError):
                await sandbox.read_file(path)
            with pytest.raises(PermissionError):
                await sandbox.write_file(path, b"changed")
        assert await sandbox.read_file("here") == b"x\n"
        assert await sandbox.list_files() == ("in",)

    host.in_box(run)


def test_what_is_not_a_regular_file_is_refused_without_waiting(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> None:
        plant = (
            "import os, socket\nos.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('sock')\n"
            "open('holes', 'wb').truncate(8 << 20); open('more-holes', 'wb').truncate(8 << 20)"
        )
        await sandbox.run_python(plant, timeout_s=10)
        async with asyncio.timeout(10):
            for path in ("fifo", "sock"):
                with pytest.raises(PermissionError, match="not a regular file"):
                    await sandbox.read_file(path)
                with pytest.raises(PermissionError, match="not a regular file"):
                    await sandbox.write_file(path, b"x")
            with pytest.raises(OSError, match="more bytes than its disk"):
                await sandbox.snapshot()

    host.in_box(run)


def test_hostile_names_and_permissions_do_not_stop_the_host(host: Machine) -> None:
    async def run(sandbox: NamespaceSandbox) -> None:
        plant = (
            "import os\nopen(b'not-text-\\xff', 'w').close()\nopen('new\\nline', 'w').close()\n"
            "os.mkdir('closed'); open('closed/file', 'w').write('found'); os.chmod('closed/file', 0)\n"
            "os.chmod('closed', 0)\n"
            "deep = os.open('.', os.O_RDONLY)\n"
            "for _ in range(600):\n    os.mkdir('d' * 20, dir_fd=deep)\n"
            "    os.dup2(os.open('d' * 20, os.O_RDONLY, dir_fd=deep), deep); os.closerange(5, 20)\n"
            "os.chmod('/workspace', 0)"
        )
        done = await sandbox.run_python(plant, timeout_s=20)
        assert done.exit_code == 0, done.stderr
        assert await sandbox.list_files() == ("closed/file", "new\nline")
        assert await sandbox.read_file("closed/file") == b"found"

    host.in_box(run)


def test_a_snapshot_and_a_fork_are_copies(host: Machine) -> None:
    async def run() -> None:
        async with box(host.pool, {"a.txt": "one", "d/b.txt": "two"}) as first:
            await first.exec(
                [
                    "sh",
                    "-c",
                    "chmod 755 a.txt; mkdir -p empty; ln -s a.txt link; ln -s /etc/passwd out; mkfifo f; chmod 555 d",
                ],
                timeout_s=10,
            )
            saved = await first.snapshot()
            assert not saved.memory
            async with closing(await first.fork()) as second:
                await first.write_file("a.txt", b"changed")
                await second.write_file("new.txt", b"of the fork")
                assert await second.read_file("a.txt") == b"one"
                assert await second.list_files() == ("a.txt", "d/b.txt", "new.txt")
                assert await first.list_files() == ("a.txt", "d/b.txt")
                shown = await second.exec(
                    ["sh", "-c", "readlink link out; stat -c %a a.txt d; ls -A empty; ls -A"], timeout_s=10
                )
                assert shown.stdout.decode().split() == [
                    "a.txt",
                    "/etc/passwd",
                    "755",
                    "755",
                    "a.txt",
                    "d",
                    "empty",
                    "link",
                    "new.txt",
                    "out",
                ]
            async with closing(await host.pool.restore(saved)) as third:
                assert await third.read_file("link") == b"one"
                with pytest.raises(PermissionError):
                    await third.read_file("out")

    host.run(run())
