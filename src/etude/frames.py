"""Msgpack frames: how processes speak, and how nouns lie on disk.

A frame is a 4-byte big-endian length and a msgpack body. Numpy arrays travel as {dtype, shape, bytes}; there is no
pickle. `encode`/`decode` serve files too. `connect`/`serve` give request-and-stream calls with cancellation over a Unix
socket in a private folder; the same frames go over TCP between machines.

    client                                server
      {id, method, args}      ------->      handler(args) -> async iterator of items
      {id, item}              <-------      one frame an item
      {id, end} | {id, error} <-------
      {id, cancel}            ------->      closes the iterator

What it does not do: discovery, retries, back-pressure (the engine limits its own queue).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import re
import traceback
import typing
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from etude.errors import BY_NAME, EngineError, EtudeError, StoreError
from etude.types import FORMAT

MAX_FRAME = 1 << 30
"""Bytes; a longer frame is refused as malformed."""
T = TypeVar("T")
_PLAIN_DTYPE = re.compile(r"[<>|][biuf]\d{1,2}")
"""Booleans, integers and floats; what else numpy reads from a dtype's text (objects, records) is refused both ways."""


def _pack_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        if not _PLAIN_DTYPE.fullmatch(value.dtype.str):
            raise TypeError(f"arrays of {value.dtype} cannot be encoded")
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _unpack_array(kind: type, value: Any) -> object:
    if kind is np.ndarray:
        try:
            dtype, shape = value["dtype"], tuple(value["shape"])
            if not _PLAIN_DTYPE.fullmatch(dtype):
                raise ValueError(f"arrays of {dtype!r} are refused")
            if any(length < 0 for length in shape):
                raise ValueError(f"an array cannot have the shape {shape}")
            return np.frombuffer(value["data"], dtype=np.dtype(dtype)).reshape(shape)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an array: {error}") from error
    raise TypeError(f"{kind.__name__} cannot be decoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)


def encode(value: object) -> bytes:
    """Msgpack bytes of a noun (or of plain lists, dicts, strings, numbers, bytes and arrays)."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """The noun that `data` holds. Errors: msgspec.DecodeError (a ValueError), naming the field where it can."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_unpack_array)
    except RecursionError as error:
        raise msgspec.DecodeError("nested too deeply") from error


class _Formatted(msgspec.Struct):
    """All that is read of a file before its format is known."""

    format: int = FORMAT


def convert(value: object, kind: type[T]) -> T:
    """The noun that plain decoded values (dicts, lists) stand for. Errors: msgspec.ValidationError."""
    return msgspec.convert(value, type=kind, dec_hook=_unpack_array)


def write_file(path: Path, value: object) -> None:
    """Write a noun so that it is there whole or not at all, and survives a power cut."""
    write_bytes(path, encode(value))


def write_bytes(path: Path, data: bytes) -> None:
    """Temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}", cause=str(error), hint="free space or fix permissions") from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_bytes(file: int, data: bytes) -> None:
    """Write all of `data` to a descriptor. Errors: OSError with the kernel's reason, also where it took only a part."""
    left = memoryview(data)
    while left:
        # a disk that fills up takes a part without a word: the write of the rest says why
        left = left[os.write(file, left) :]


def read_file(path: Path, kind: type[T]) -> T:
    """Errors: StoreError if the file is missing, cut or of another format."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}", cause=str(error)) from error
    try:
        number = decode(data, _Formatted).format
        if number != FORMAT:
            cause = f"format = {number}"
            raise StoreError(f"{path} is of another format", cause=cause, hint=f"this Etude reads format = {FORMAT}")
        return decode(data, kind)
    except msgspec.MsgspecError as error:
        hint = "it may be cut; restore it"
        raise StoreError(f"{path} is not a {kind.__name__}", cause=str(error), hint=hint) from error


# Calls over a socket

Handler = Callable[[Any], AsyncIterator[Any]]
"""Takes decoded plain arguments, yields encodable items. Registered by method name."""


async def _read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > MAX_FRAME:
            return None
        frame = decode(await reader.readexactly(size), dict[str, Any])
        return frame if isinstance(frame.get("id"), int) else None
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
        return None


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _frame(body: dict[str, object]) -> bytes:
    data = encode(body)
    if len(data) > MAX_FRAME:
        raise EngineError(f"a message of {len(data)} bytes is too long", cause=f"the limit is {MAX_FRAME} bytes")
    return len(data).to_bytes(4, "big") + data


def _error_body(error: BaseException) -> dict[str, object]:
    if isinstance(error, EtudeError):
        return {"kind": type(error).__name__, "message": error.message, "cause": error.cause, "hint": error.hint}
    return {"kind": "EngineError", "message": f"{type(error).__name__}: {error}", "cause": None, "hint": None}


def _forget(running: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    running.pop(number, None)


class Server:
    """Serves handlers on a Unix socket, any number of clients."""

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self._handlers = handlers
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def listen(self, path: Path) -> None:
        """The socket file appears when calls can be made. Its folder must be private to the user."""
        try:
            path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._client, path=str(path))
        except OSError as error:
            hint = "its folder must exist and be yours, and the path be shorter than 108 bytes"
            raise EngineError(f"cannot listen on {path}", cause=str(error), hint=hint) from error

    async def close(self) -> None:
        """Hang up on every client; what handlers were doing is cancelled."""
        if self._server is not None:
            self._server.close()
        clients = dict(self._clients)
        for writer in clients:
            writer.close()
        await asyncio.gather(*clients.values())

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients[writer] = typing.cast("asyncio.Task[None]", asyncio.current_task())
        try:
            await self._serve(reader, writer)
        finally:
            del self._clients[writer]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        while (frame := await _read_frame(reader)) is not None:
            number = frame["id"]
            if frame.get("cancel"):
                if task := running.get(number):
                    task.cancel()
                continue
            task = asyncio.create_task(self._answer(number, frame, writer))
            running[number] = task
            task.add_done_callback(functools.partial(_forget, running, number))
        tasks = list(running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _hang_up(writer)

    async def _answer(self, number: int, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            handler = self._handlers.get(frame["method"])
            if handler is None:
                raise EngineError(f"no method {frame['method']!r}")
            async with contextlib.aclosing(handler(frame["args"])) as items:  # type: ignore[type-var]
                async for item in items:
                    writer.write(_frame({"id": number, "item": item}))
                    await writer.drain()
            writer.write(_frame({"id": number, "end": True}))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the process boundary: whatever it was, the caller must hear of it
            if not isinstance(error, EtudeError):
                traceback.print_exc()
            with contextlib.suppress(ConnectionError):
                writer.write(_frame({"id": number, "error": _error_body(error)}))


class Client:
    """One connection; calls run concurrently. When the peer dies, every open call raises EngineError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self.name = name
        self._writer = writer
        self._numbers = itertools.count()
        self._queues: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._closed = False
        self._pump = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, path: Path, *, name: str, timeout_s: float = 60.0) -> Client:
        """Wait for the socket to appear and connect. Errors: EngineError after `timeout_s`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(path), limit=1 << 20)
                return cls(reader, writer, name)
            except OSError as error:
                may_come = isinstance(error, FileNotFoundError | ConnectionRefusedError)
                if not may_come:
                    raise EngineError(f"cannot reach {name} at {path}", cause=str(error)) from error
                if asyncio.get_running_loop().time() > deadline:
                    raise EngineError(f"{name} did not come up in {timeout_s:.0f} s", cause=str(error)) from error
                await asyncio.sleep(0.02)

    @property
    def closed(self) -> bool:
        """Whether the peer is gone or `close` was called."""
        return self._closed

    async def stream(self, method: str, args: object, kind: type[T]) -> AsyncIterator[T]:
        """Items of one call, decoded as `kind`. Closing the iterator early cancels the call on the other side."""
        if self._closed:
            raise EngineError(f"{self.name} is gone", hint="the run restarts it; see its log in the run's folder")
        number = next(self._numbers)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._queues[number] = queue
        ended = False
        try:
            self._writer.write(_frame({"id": number, "method": method, "args": args}))
            while True:
                frame = await queue.get()
                if "item" in frame:
                    yield self._item(frame["item"], kind)
                    continue
                ended = True
                if error := frame.get("error"):
                    raise BY_NAME.get(error["kind"], EngineError)(
                        error["message"], cause=error["cause"], hint=error["hint"]
                    )
                return
        finally:
            del self._queues[number]
            if not ended and not self._closed:
                self._writer.write(_frame({"id": number, "cancel": True}))

    def _item(self, item: object, kind: type[T]) -> T:
        try:
            return msgspec.convert(item, type=kind, dec_hook=_unpack_array)
        except msgspec.ValidationError as error:
            raise EngineError(f"{self.name} answered something else than {kind}", cause=str(error)) from error

    async def call(self, method: str, args: object, kind: type[T]) -> T:
        """The single item of a call."""
        async with contextlib.aclosing(self.stream(method, args, kind)) as items:  # type: ignore[type-var]
            async for item in items:
                return item
        raise EngineError(f"{self.name} answered nothing to {method}")

    async def close(self) -> None:
        self._pump.cancel()
        self._hang_up()
        await _hang_up(self._writer)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (frame := await _read_frame(reader)) is not None:
            if queue := self._queues.get(frame["id"]):
                queue.put_nowait(frame)
        self._hang_up()

    def _hang_up(self) -> None:
        self._closed = True
        gone = _error_body(EngineError(f"{self.name} is gone", cause="the connection closed"))
        for queue in self._queues.values():
            queue.put_nowait({"error": gone})
