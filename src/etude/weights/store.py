"""Objects by key: get, list, put, and create-if-absent. The ground that publishing stands on.

    open_store("file:///runs/a/weights")   files; written, synced, linked into place, folder synced
    open_store("s3://bucket/weights")      any S3 that honours If-None-Match; options from AWS_* in the environment
    open_store("memory://")                this process only

Everything goes through obstore, except writes to `file://`: obstore's local store does not sync, so a power cut could
leave an empty object that others have already read. A store that cannot create conditionally is refused when opened.

What it does not do: know what the objects mean, cache, or retry beyond obstore's own retries of dropped requests.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError
from obstore.store import LocalStore, MemoryStore, S3Store

from etude.errors import MissingError, RecipeError, StoreError

Data = bytes | bytearray | memoryview
_RETRIES = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
_TEMPORARY = "tmp"
"""Folder of a `file://` store for files that are being written; never an object."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object as a listing shows it. `modified` is the store's own time, in seconds since the epoch."""

    key: str
    size: int
    modified: float


@contextlib.contextmanager
def _typed(action: str, key: str, url: str) -> Iterator[None]:
    """Turn what obstore and the file system raise into our errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"{url} has no object {key}", cause=str(error).splitlines()[0]) from error
    except (BaseError, OSError, ValueError) as error:
        if isinstance(error, StoreError):
            raise
        text = str(error).partition("\n\nDebug source")[0].strip()
        hint = "is the store up, are the keys right, is there space?"
        raise StoreError(f"{url} failed to {action} {key}", cause=text, hint=hint) from error


class Store:
    """A store by way of obstore. Safe to share between threads. Errors of every method: StoreError, MissingError."""

    def __init__(self, inner: Any, url: str) -> None:
        self._inner = inner
        self.url = url

    def get(self, key: str) -> bytes:
        with _typed("read", key, self.url):
            return obstore.get(self._inner, key).bytes().to_bytes()

    def head(self, key: str) -> Entry | None:
        """None if there is no such object."""
        try:
            with _typed("read", key, self.url):
                return _entry(obstore.head(self._inner, key))
        except MissingError:
            return None

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        """Objects under the folder `prefix`, sorted by key; only those whose key comes after `after`."""
        with _typed("list", prefix, self.url):
            chunks = obstore.list(self._inner, prefix, offset=after, chunk_size=1000)
            return sorted((_entry(meta) for chunk in chunks for meta in chunk), key=lambda entry: entry.key)

    def put(self, key: str, data: Data) -> None:
        """Write, replacing what is there."""
        with _typed("write", key, self.url):
            obstore.put(self._inner, key, data)

    def create(self, key: str, data: Data) -> bool:
        """Write if there is nothing yet; False if there is. After an error the object may or may not be there."""
        with _typed("create", key, self.url):
            try:
                obstore.put(self._inner, key, data, mode="create")
            except AlreadyExistsError:
                return False
            return True

    def delete(self, key: str) -> None:
        """Deleting what is not there is no error."""
        with contextlib.suppress(MissingError), _typed("delete", key, self.url):
            obstore.delete(self._inner, key)

    def now(self) -> float:
        """The store's own time, read off an object that is written for it."""
        key = f"clock/{uuid.uuid4().hex}"
        self.put(key, b"")
        entry = self.head(key)
        self.delete(key)
        if entry is None:
            raise StoreError(f"{self.url} does not show an object right after it was written")
        return entry.modified

    def sweep_temporary(self, older_than_s: float) -> int:
        """Remove what killed writers left half-written; how many. Only `file://` can have such files."""
        return 0


class FileStore(Store):
    """A folder. Writers of several processes may share it; it must be a file system with hard links."""

    def __init__(self, root: Path, url: str) -> None:
        with _typed("open", str(root), url):
            root.mkdir(parents=True, exist_ok=True)
            super().__init__(LocalStore(root), url)
        self._root = root
        self._numbers = itertools.count()
        self._made: set[Path] = set()
        self._folder(root / _TEMPORARY)

    def put(self, key: str, data: Data) -> None:
        with _typed("write", key, self.url), self._written(key, data) as (temporary, path):
            temporary.rename(path)

    def create(self, key: str, data: Data) -> bool:
        with _typed("create", key, self.url), self._written(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            return True

    def now(self) -> float:
        path = self._root / _TEMPORARY / f"clock-{uuid.uuid4().hex}"
        with _typed("write", "the clock", self.url):
            path.touch()
            modified = path.stat().st_mtime
            path.unlink()
        return modified

    def entries(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        with _typed("list", prefix, self.url):
            entries = list(_scan(self._root / prefix, prefix, after))
        return sorted(entries, key=lambda entry: entry.key)

    def sweep_temporary(self, older_than_s: float) -> int:
        gone = 0
        for path in (self._root / _TEMPORARY).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > older_than_s:
                    path.unlink()
                    gone += 1
        return gone

    @contextlib.contextmanager
    def _written(self, key: str, data: Data) -> Iterator[tuple[Path, Path]]:
        """A synced temporary file with `data`, and where it belongs; the folder is synced at the end."""
        path = self._root / key
        name = f"{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}-{uuid.uuid4().hex[:8]}"
        temporary = self._root / _TEMPORARY / name
        self._folder(path.parent)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary, path
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def _folder(self, folder: Path) -> None:
        """Make a folder, and every folder above it, last through a power cut."""
        if folder in self._made:
            return
        if folder != self._root:
            self._folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)
        self._made.add(folder)


def _scan(folder: Path, prefix: str, after: str | None) -> Iterator[Entry]:
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for item in entries:
            key = f"{prefix}/{item.name}"
            if item.is_dir():
                yield from _scan(folder / item.name, key, after)
            elif after is None or key > after:
                with contextlib.suppress(FileNotFoundError):  # deleted while we look
                    stat = item.stat()
                    yield Entry(key, stat.st_size, stat.st_mtime)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())


def open_store(url: str) -> Store:
    """The store at `url`, after a probe that it can create conditionally.

    Errors: RecipeError for a URL that is none of ours; StoreError if the store does not answer, or would let a second
    publisher overwrite the first.
    """
    parts = urlsplit(url)
    store: Store
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        store = FileStore(Path(unquote(parts.path)), url)
    elif parts.scheme == "memory":
        store = Store(MemoryStore(), url)
    elif parts.scheme == "s3" and parts.netloc:
        with _typed("open", "the bucket", url):
            try:
                store = Store(S3Store.from_url(url, retry_config=_RETRIES), url)  # type: ignore[arg-type]
            except UnknownConfigurationKeyError as error:
                raise StoreError(f"{url} cannot be opened", cause=str(error), hint="check AWS_* variables") from error
    else:
        raise RecipeError(f"{url} is not a weight store", hint="file:///absolute/path, s3://bucket/prefix or memory://")
    _probe(store)
    return store


def _probe(store: Store) -> None:
    key = f"probe/{uuid.uuid4().hex}"
    try:
        created = store.create(key, b"first")
        again = store.create(key, b"second")
        found = store.get(key)
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)
    if not created or again or found != b"first":
        raise StoreError(
            f"{store.url} cannot create objects conditionally",
            cause="a second create of one key was accepted" if again else "a created object was not there",
            hint="two trainers could overwrite each other: use a store that honours If-None-Match, or file://",
        )
