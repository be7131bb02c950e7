"""Runs inside a sandbox (standard library only): the workspace's files, read and written without following links out.

Every path is resolved by the kernel below the workspace (`openat2`, RESOLVE_BENEATH): a link that leads inside is
followed, one that leads outside is refused. Called by the trusted process between two runs, when nothing else lives in
the sandbox. What a hostile program can leave behind (links, FIFOs, sockets, sparse giants, names that are not text,
folders without permissions) is refused with an OSError that names it, or left out where a listing says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator

_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def refused(number: int, why: str, path: str) -> OSError:
    """The kind of OSError that belongs to an errno."""
    return OSError(number, why, path)


class Workspace:
    """Files below one folder. Paths are relative, with `/`; sizes in bytes."""

    def __init__(self, root: str, max_bytes: int) -> None:
        self._root = os.open(root, _FOLDER)
        self._max_bytes = max_bytes

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._root)

    def mend(self) -> None:
        """Give the root folder its permissions back, whatever a program did to them."""
        os.fchmod(self._root, 0o755)

    def read(self, path: str) -> bytes:
        """Errors: FileNotFoundError, IsADirectoryError, PermissionError, OSError(EFBIG)."""
        file = self._open(path, _READ)
        try:
            _check_kind(os.fstat(file), path)
            return self._read_all(file, path)
        finally:
            os.close(file)

    def write(self, path: str, data: bytes | memoryview, mode: int | None = None) -> None:
        """Whole or not at all; makes missing folders. A link in the last place is refused, not replaced."""
        folder, name = os.path.split(_clean(path))
        parent = self._make_folder(folder)
        try:
            old = _look(parent, name)
            if old is not None:
                if stat.S_ISLNK(old.st_mode):
                    raise refused(errno.EACCES, "is a link: write to the file that it leads to", path)
                _check_kind(old, path)
            if mode is None:
                mode = stat.S_IMODE(old.st_mode) if old is not None else 0o644
            _write_whole(parent, name, data, mode)
        finally:
            os.close(parent)

    def walk(self) -> list[tuple[str, os.stat_result]]:
        """Everything below the workspace, folders before what they hold, links as links.

        Names that are not UTF-8, and paths too long for the kernel, are left out: no tool could name them. A program
        cannot hide its files by taking permissions away: the owner's are given back on the way.
        """
        found: list[tuple[str, os.stat_result]] = []
        todo = [""]
        while todo:
            folder = todo.pop()
            for name in sorted(self._names(folder)):
                path = f"{folder}/{name}" if folder else name
                try:
                    path.encode()
                    status = self._status(path)
                except (UnicodeEncodeError, OSError):
                    continue
                found.append((path, status))
                if stat.S_ISDIR(status.st_mode):
                    todo.append(path)
        return found

    def files(self) -> list[str]:
        """Regular files, sorted."""
        return sorted(path for path, status in self.walk() if stat.S_ISREG(status.st_mode))

    def save(self) -> list[list[object]]:
        """Entries [path, kind, mode, size or link's target], folders before what they hold. Kinds: d, f, l.

        The contents follow by `contents`. FIFOs and sockets are left out. Errors: OSError(EFBIG) if the files claim
        more bytes than the disk has (they have holes).
        """
        entries: list[list[object]] = []
        total = 0
        for path, status in self.walk():
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                entries.append([path, "d", mode, 0])
            elif stat.S_ISLNK(status.st_mode):
                entries.append([path, "l", mode, self._target(path)])
            elif stat.S_ISREG(status.st_mode):
                total += status.st_size
                if total > self._max_bytes:
                    raise refused(errno.EFBIG, "the workspace claims more bytes than its disk has", path)
                entries.append([path, "f", mode, status.st_size])
        return entries

    def contents(self, entries: list[list[object]]) -> Iterator[bytes]:
        """Of the files among `entries`, one after the other, each of the size that its entry says.

        What runs in the background may change a file meanwhile: it must not change where the next one begins.
        """
        for path, kind, _, size in entries:
            if kind == "f":
                data = b""
                with contextlib.suppress(OSError):
                    data = self.read(str(path))
                yield data[: int(str(size))].ljust(int(str(size)), b"\0")

    def restore(self, entries: list[list[object]], body: memoryview) -> None:
        """What `save` returned, into an empty workspace. Links come last, so that none is ever walked through."""
        at = 0
        for path, kind, mode, size in entries:
            if kind == "d":
                os.close(self._make_folder(str(path)))
            elif kind == "f":
                self.write(str(path), body[at : at + int(str(size))], int(str(mode)))
                at += int(str(size))
        for path, kind, _, target in entries:
            if kind == "l":
                folder, name = os.path.split(str(path))
                parent = self._make_folder(folder)
                os.symlink(str(target), name, dir_fd=parent)
                os.close(parent)
        for path, kind, mode, _ in reversed(entries):
            if kind == "d":
                handle = self._open(str(path), _FOLDER)
                os.fchmod(handle, int(str(mode)))
                os.close(handle)

    def _open(self, path: str, flags: int) -> int:
        how = _OpenHow(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
        name = os.fsencode(_clean(path) or ".")
        handle = _libc.syscall(_OPENAT2, self._root, name, ctypes.byref(how), ctypes.sizeof(how))
        if handle >= 0:
            return int(handle)
        number = ctypes.get_errno()
        if number == errno.EXDEV:
            raise refused(errno.EACCES, "leads out of the workspace", path)
        if number == errno.ELOOP:
            raise refused(errno.EACCES, "its links lead in a circle", path)
        if number == errno.ENXIO:
            raise refused(errno.EACCES, "is not a regular file", path)
        raise refused(number, os.strerror(number), path)

    def _make_folder(self, path: str) -> int:
        """A handle on the folder, made with its parents where it is missing."""
        missing = []
        while True:
            try:
                handle = self._open(path, _FOLDER)
                break
            except FileNotFoundError:
                path, name = os.path.split(path)
                if name:
                    missing.append(name)
        for name in reversed(missing):
            parent = handle
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
                path = f"{path}/{name}" if path else name
                handle = self._open(path, _FOLDER)
            except FileExistsError:
                raise refused(errno.EACCES, "a link that leads nowhere is in the way", f"{path}/{name}") from None
            finally:
                os.close(parent)
        return handle

    def _status(self, path: str) -> os.stat_result:
        handle = self._open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            needed = stat.S_IRWXU if stat.S_ISDIR(status.st_mode) else stat.S_IRUSR
            if not stat.S_ISLNK(status.st_mode) and status.st_mode & needed != needed:
                os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(status.st_mode) | needed)
                status = os.fstat(handle)
            return status
        finally:
            os.close(handle)

    def _names(self, folder: str) -> list[str]:
        handle = self._open(folder, _FOLDER)
        try:
            return os.listdir(handle)
        finally:
            os.close(handle)

    def _read_all(self, file: int, path: str) -> bytes:
        size = os.fstat(file).st_size
        if size > self._max_bytes:
            raise refused(errno.EFBIG, f"is larger than {self._max_bytes} bytes", path)
        data = os.read(file, size + 1)  # in one piece: nothing runs that could change it, and memory is limited
        if len(data) != size:
            raise refused(errno.EIO, f"has {len(data)} bytes instead of {size}", path)
        return data

    def _target(self, path: str) -> str:
        above = self._open(os.path.dirname(path), _FOLDER)
        try:
            return os.readlink(os.path.basename(path), dir_fd=above)
        finally:
            os.close(above)


def _check_kind(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise refused(errno.EISDIR, "is a folder", path)
    if not stat.S_ISREG(status.st_mode):
        raise refused(errno.EACCES, "is not a regular file", path)


def _look(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _clean(path: str) -> str:
    if "\0" in path:
        raise refused(errno.EINVAL, "a path cannot hold a zero byte", path.replace("\0", "\\0"))
    if path.startswith("/"):
        raise refused(errno.EACCES, "leads out of the workspace: paths are relative to it", path)
    return path


def _write_whole(parent: int, name: str, data: bytes | memoryview, mode: int) -> None:
    if name in ("", ".", ".."):
        raise refused(errno.EISDIR, "is a folder", name or ".")
    temporary = f".{os.urandom(8).hex()}.tmp"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fchmod(file, mode)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        os.unlink(temporary, dir_fd=parent)
        raise
    finally:
        os.close(file)


def encode_error(error: OSError) -> dict[str, object]:
    """What the host needs to raise the same error."""
    path = error.filename if isinstance(error.filename, str) else ""
    return {"errno": error.errno or errno.EIO, "why": error.strerror or str(error), "path": path}
