import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude import frames
from etude.errors import EngineError, StoreError, VersionError
from etude.frames import Client, Server, decode, encode, read_file, write_file
from etude.types import IOCheck, Task, Version
from test_types import make_task, version

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


# Bytes


@settings(max_examples=40, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_as_they_went(value: object) -> None:
    assert decode(encode(value), Any) == value


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i2", "<i4", ">i4", "i8", "u8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (2, 3, 2)])
def test_arrays_keep_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    np.testing.assert_array_equal(decode(encode(array), np.ndarray), array, strict=True)


def test_arrays_that_are_not_contiguous_keep_their_values() -> None:
    array = np.arange(24).reshape(4, 6).T[::2, 1:]
    np.testing.assert_array_equal(decode(encode(array), np.ndarray), array, strict=True)


def test_numpy_scalars_become_plain_numbers() -> None:
    row = decode(encode({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}), Any)
    assert row == {"a": 0.5, "b": 3, "c": True}


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.zeros(2, dtype=[("a", "<i4"), ("b", "O")]),
        np.zeros(2, dtype=[("a", "<i4"), ("b", "<f4")]),
        np.zeros(1, dtype="M8[s]"),
        np.array(["text"]),
    ],
    ids=["objects", "record of objects", "record", "dates", "texts"],
)
def test_only_arrays_of_numbers_are_sent(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot be encoded"):
        encode(array)


HOSTILE_ARRAYS = [
    *({"dtype": dtype, "shape": [1], "data": bytes(8)} for dtype in (
        "O", "|O", "V8", "S8", "U2", "M8[s]", "i4,O", "f4,f4", "i4, (2", "(2,3)f4,,", "(" * 5000, "f4:;", "", "\0",
        "<f999", "<f3", None, 5, ["O"], [["a", "O"]], {"names": ["a"], "formats": ["O"]},
    )),
    *({"dtype": "<i4", "shape": shape, "data": bytes(4)} for shape in (
        [-1], [2], [0], [2**62, 0], [2**63], [2**64 - 1], ["a"], [1.5], [None], None, 1, "1", [[1]], [1] * 100,
    )),
    *({"dtype": "<i4", "shape": [1], "data": data} for data in ("0000", b"", b"000", b"00000", None, 4, [0])),
    {"dtype": "<i4", "shape": [1]}, {"shape": [1], "data": bytes(4)}, {}, [], 5, None, "array", b"array",
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE_ARRAYS, ids=lambda value: str(value)[:60])
def test_what_is_no_array_is_refused_by_name_of_the_field(hostile: object) -> None:
    data = encode({"ids": hostile})
    with pytest.raises(msgspec.ValidationError, match=r"ids"):
        decode(data, _Holder)


class _Holder(msgspec.Struct):
    ids: np.ndarray


def test_every_cut_of_a_noun_is_refused() -> None:
    data = encode(make_task())
    assert decode(data, Task) == make_task()
    for length in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            decode(data[:length], Task)


def test_deep_nesting_and_lengths_that_lie_are_refused_without_using_memory() -> None:
    for data in (
        b"\x91" * 100_000 + b"\x90",
        b"\x81\xa1a" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ):
        with pytest.raises(msgspec.DecodeError):
            decode(data, Any)


# Files


def test_a_file_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_file(tmp_path / "task.mp", make_task())
    assert read_file(tmp_path / "task.mp", Task) == make_task()
    assert os.listdir(tmp_path) == ["task.mp"]


def test_a_file_of_another_format_is_refused_by_name_also_if_it_has_new_fields(tmp_path: Path) -> None:
    plain = msgspec.msgpack.decode(encode(make_task()))
    for changes in ({"format": 2}, {"format": 2, "new_field": 1}, {"format": 0}):
        write_file(tmp_path / "task.mp", {**plain, **changes})
        with pytest.raises(StoreError, match="another format") as caught:
            read_file(tmp_path / "task.mp", Task)
        assert caught.value.cause == f"format = {changes['format']}"


def test_a_file_that_is_cut_missing_or_something_else_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "task.mp"
    with pytest.raises(StoreError, match="cannot read"):
        read_file(path, Task)
    for data in (encode(make_task())[:-3], b"", b"\x91" * 10_000, encode(version(1)), encode([1, 2])):
        path.write_bytes(data)
        with pytest.raises(StoreError, match="is not a Task"):
            read_file(path, Task)


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "task.mp"
    with pytest.raises(StoreError, match="cannot write"):
        write_file(tmp_path / "missing" / "task.mp", make_task())
    path.mkdir()
    with pytest.raises(StoreError, match="cannot write"):
        write_file(path, make_task())
    assert os.listdir(tmp_path) == ["task.mp"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "task.mp"
    tasks = [make_task(prompt=letter * 200_000) for letter in "ab"]
    write_file(path, tasks[0])
    done = threading.Event()

    def rewrite() -> None:
        for number in range(30):
            write_file(path, tasks[number % 2])
        done.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not done.is_set():
        assert read_file(path, Task) in tasks
    writer.join()


# Calls


async def _echo(args: object) -> AsyncIterator[object]:
    yield args


async def _count(args: dict[str, int]) -> AsyncIterator[int]:
    for number in range(args["upto"]):
        yield number
        await asyncio.sleep(0)


async def _refuse(_: object) -> AsyncIterator[object]:
    raise VersionError("not served", cause="too old", hint="wait")
    yield


async def _break(_: object) -> AsyncIterator[object]:
    yield 1
    raise ZeroDivisionError("oops")


HANDLERS: dict[str, frames.Handler] = {"echo": _echo, "count": _count, "refuse": _refuse, "break": _break}


def with_server(body: Callable[[Client, Path], Awaitable[None]], folder: Path, **handlers: frames.Handler) -> None:
    async def main() -> None:
        server = Server({**HANDLERS, **handlers})
        await server.listen(folder / "socket")
        client = await Client.connect(folder / "socket", name="the engine")
        try:
            async with asyncio.timeout(60):
                await body(client, folder / "socket")
        finally:
            await client.close()
            await server.close()

    asyncio.run(main())


def test_many_calls_run_at_once_and_keep_their_items_apart(tmp_path: Path) -> None:
    async def one(client: Client, upto: int) -> list[int]:
        return [number async for number in client.stream("count", {"upto": upto}, int)]

    async def body(client: Client, _: Path) -> None:
        counted = await asyncio.gather(*(one(client, upto) for upto in range(1, 40)))
        assert counted == [list(range(upto)) for upto in range(1, 40)]

    with_server(body, tmp_path)


def test_nouns_and_arrays_cross_the_socket(tmp_path: Path) -> None:
    async def body(client: Client, _: Path) -> None:
        check = IOCheck(call="f(1)", expected="2", visible=False)
        assert await client.call("echo", check, IOCheck) == check
        array = np.arange(200_000, dtype=np.float32)
        np.testing.assert_array_equal(await client.call("echo", array, np.ndarray), array, strict=True)

    with_server(body, tmp_path)


def test_an_error_arrives_with_its_kind_cause_and_hint(tmp_path: Path) -> None:
    async def body(client: Client, _: Path) -> None:
        with pytest.raises(VersionError) as caught:
            await client.call("refuse", None, int)
        assert (caught.value.message, caught.value.cause, caught.value.hint) == ("not served", "too old", "wait")
        with pytest.raises(EngineError, match="ZeroDivisionError: oops"):
            _ = [item async for item in client.stream("break", None, int)]
        with pytest.raises(EngineError, match="no method 'sing'"):
            await client.call("sing", None, int)
        assert await client.call("echo", 3, int) == 3

    with_server(body, tmp_path)


def test_an_answer_of_a_wrong_type_or_none_at_all_is_an_engine_error(tmp_path: Path) -> None:
    async def body(client: Client, _: Path) -> None:
        with pytest.raises(EngineError, match="something else"):
            await client.call("echo", {"incarnation": "one"}, Version)
        with pytest.raises(EngineError, match="answered nothing"):
            await client.call("count", {"upto": 0}, int)

    with_server(body, tmp_path)


def test_a_caller_that_walks_away_stops_the_handler(tmp_path: Path) -> None:
    stopped = asyncio.Event()

    async def endless(_: object) -> AsyncIterator[int]:
        try:
            for number in range(10**9):
                yield number
                await asyncio.sleep(0.001)
        finally:
            stopped.set()

    async def body(client: Client, _: Path) -> None:
        async with contextlib.aclosing(client.stream("endless", None, int)) as items:  # type: ignore[type-var]
            async for number in items:
                if number == 3:
                    break
        await asyncio.wait_for(stopped.wait(), 30)

    with_server(body, tmp_path, endless=endless)


def test_an_item_that_cannot_be_encoded_is_an_error_not_a_hang(tmp_path: Path) -> None:
    async def odd(_: object) -> AsyncIterator[object]:
        yield object()

    async def body(client: Client, _: Path) -> None:
        with pytest.raises(EngineError, match="cannot be encoded"):
            await client.call("odd", None, int)

    with_server(body, tmp_path, odd=odd)


def test_a_message_beyond_the_limit_is_refused_where_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 10_000)

    async def long(_: object) -> AsyncIterator[bytes]:
        yield bytes(20_000)

    async def body(client: Client, _: Path) -> None:
        with pytest.raises(EngineError, match="too long"):
            await client.call("echo", bytes(20_000), bytes)
        with pytest.raises(EngineError, match="too long"):
            await client.call("long", None, bytes)
        assert await client.call("echo", 1, int) == 1

    with_server(body, tmp_path, long=long)


HOSTILE_FRAMES = [
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
    b"\x00\x00\x00\x05\xc1\xc1",
    b"\x00\x00\x00\x01\xc1",
    b"\x00\x00\x00\x01\x05",
    b"\x00\x00\x00\x01\x80",
    b"\x00\x00\x00\x05\x81\xa2id\xc0",
    (1000).to_bytes(4, "big") + b"\x91" * 1000,
    (6).to_bytes(4, "big") + b"\x81\xa2id\x91\x01",
    (200_001).to_bytes(4, "big") + b"\x91" * 200_000 + b"\x90",
]


@pytest.mark.parametrize("hostile", HOSTILE_FRAMES, ids=lambda data: data[:12].hex())
def test_a_broken_frame_ends_that_connection_and_no_other(tmp_path: Path, hostile: bytes) -> None:
    async def body(client: Client, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(hostile)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        assert await client.call("echo", 1, int) == 1

    with_server(body, tmp_path)


def test_a_frame_without_method_is_answered_with_an_error(tmp_path: Path) -> None:
    async def body(_: Client, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        data = encode({"id": 7})
        writer.write(len(data).to_bytes(4, "big") + data)
        size = int.from_bytes(await reader.readexactly(4), "big")
        answer = decode(await reader.readexactly(size), dict[str, Any])
        assert answer["id"] == 7
        assert answer["error"]["kind"] == "EngineError"
        writer.close()

    with_server(body, tmp_path)


def test_a_server_that_is_killed_ends_every_open_call(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    source = (
        "import asyncio, sys; from pathlib import Path; from etude.frames import Server\n"
        "async def hang(_):\n    yield 1\n    await asyncio.sleep(120)\n"
        "async def main():\n    await Server({'hang': hang}).listen(Path(sys.argv[1]))\n    await asyncio.sleep(120)\n"
        "asyncio.run(main())\n"
    )
    server = subprocess.Popen([sys.executable, "-c", source, str(path)])

    async def main() -> None:
        client = await Client.connect(path, name="the engine", timeout_s=60)
        items = client.stream("hang", None, int)
        assert await anext(items) == 1
        server.kill()
        with pytest.raises(EngineError, match="the engine is gone"):
            await anext(items)
        with pytest.raises(EngineError, match="the engine is gone"):
            await client.call("hang", None, int)
        await client.close()

    try:
        asyncio.run(main())
    finally:
        server.kill()
        server.wait()


def test_a_server_that_does_not_come_or_cannot_be_reached_is_named(tmp_path: Path) -> None:
    async def connect(path: Path) -> None:
        await Client.connect(path, name="the engine", timeout_s=0.1)

    with pytest.raises(EngineError, match="the engine did not come up"):
        asyncio.run(connect(tmp_path / "nothing"))
    with pytest.raises(EngineError, match="cannot reach the engine"):
        asyncio.run(connect(tmp_path / ("x" * 200)))
    with pytest.raises(EngineError, match="cannot listen") as caught:
        asyncio.run(Server({}).listen(tmp_path / ("x" * 200)))
    assert "108 bytes" in str(caught.value)
