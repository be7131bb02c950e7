"""What HTTP and recording add to the engine: the same requests over frames and over HTTP, in the same minutes.

    python benchmarks/serve.py --json FILE [--clients 1 8 32] [--model etude-nano]

engine   clients in this process ask the engine's process over its socket, in ids
http     the same clients ask a server's process, which asks the same engine: /v1/chat/completions, streamed
record   as http, and every turn is redacted and on disk (synced) before its answer ends; it goes on to SQLite

first_ms is until the first part of an answer is there; between_ms is from it to the last, for each of NEW - 1 tokens.
All arms use one engine process and the same 32 prompts, each with a seed, so that replies are the same work. The engine
has the prompts in its KV memory from an untimed round: its first tokens come as soon as they can.
Clients are as light as can be (a socket, and a search for the events' ends): what is measured is the server. Each round
runs every arm once; ratios are of one round. Limit: on N cores, engine, server and clients share them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from measuring import arguments, in_turn, ratio, report

from etude import config
from etude.data.formats import ChatFormat
from etude.data.render import Renderer
from etude.frames import Client
from etude.inference.client import EngineClient
from etude.models.recipe import model_folder
from etude.protocols import GenerateRequest, Message
from etude.serve.parts import make_server
from etude.serve.recipe import ServeRecipe
from etude.serve.server import run
from etude.serving import serve_stage
from etude.sessions.opening import open_recorder
from etude.sessions.recipe import SessionsRecipe

NEW, HEAT = 96, 2.0
"""Tokens of a reply, and the temperature: at 1 the nano ends most replies after a dozen tokens."""
LINES = "\n".join(f"{n}\t    total_{n} = clamp(x + {n}, low, high)" for n in range(1, 16))
Ask = Callable[[int], Awaitable[list[float]]]
"""Number of a request -> when each part of its answer came, in seconds since it was asked."""
PROMPTS = 32


def text_of(number: int) -> str:
    return f"Repair number {number}.\nsolution.py\n{LINES}\n"


async def serve_process(model: str, socket: str, sessions: str) -> None:
    """The server's process: says its address, and serves until it is killed. sessions: a folder; empty: no recorder."""
    engine = EngineClient(await Client.connect(Path(socket), name="engine", timeout_s=120))
    chat = ChatFormat(model_folder(model))
    async with contextlib.AsyncExitStack() as stack:
        recorder = None
        if sessions:
            recipe = SessionsRecipe(db=f"sqlite:///{sessions}/sessions.db", journal=f"{sessions}/journal")
            recorder = await stack.enter_async_context(open_recorder(recipe, chat.renderer(()).spell))
        server = make_server(engine, chat, ServeRecipe(port=0, consent="train"), name=model, recorder=recorder)
        await server.start()
        print(server.url, flush=True)
        await asyncio.Event().wait()


def over_frames(engine: EngineClient, renderer: Renderer) -> Ask:
    async def ask(number: int) -> list[float]:
        ids = renderer.open([Message(role="user", text=text_of(number))])
        request = GenerateRequest(
            request_id=os.urandom(8).hex(), context_id=os.urandom(8).hex(), ids=ids, max_new_tokens=NEW,
            stop_ids=renderer.stop_ids, seed=number, temperature=HEAT,
        )  # fmt: skip
        began = time.perf_counter()
        return [time.perf_counter() - began async for _ in engine.generate(request)]

    return ask


def over_http(url: str, model: str) -> Ask:
    host, port = url.removeprefix("http://").split(":")
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(number: int) -> list[float]:
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": text_of(number)}], "stream": True,
                           "max_tokens": NEW, "seed": number, "temperature": HEAT}).encode()  # fmt: skip
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        reader, writer = free.pop() if free else await asyncio.open_connection(host, int(port))
        began = time.perf_counter()
        writer.write(head + body)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        times = []
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            await reader.readexactly(size + 2)
            times.append(time.perf_counter() - began)
        await reader.readexactly(2)
        free.append((reader, writer))
        return times

    return ask


async def load(ask: Ask, clients: int, requests: int) -> dict[str, float]:
    """`clients` at once, `requests` in all."""
    todo = itertools.islice(itertools.cycle(range(PROMPTS)), requests)
    answers: list[list[float]] = []

    async def client() -> None:
        for number in todo:
            answers.append(await ask(number))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    wall_s = time.perf_counter() - began
    return {"requests_per_s": requests / wall_s, "first_ms": 1e3 * statistics.median(times[0] for times in answers),
            "whole_ms": 1e3 * statistics.median(times[-1] for times in answers),
            "between_ms": 1e3 * statistics.median((times[-1] - times[0]) / (NEW - 1) for times in answers)}  # fmt: skip


@contextlib.asynccontextmanager
async def processes(model: str) -> AsyncIterator[tuple[str, str, str]]:
    """(the engine's socket, address of a server without a recorder, of one with)."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        folder = Path(name)
        stage = serve_stage(model, "", {}, "", [])
        (folder / "recipe.toml").write_text(config.resolved_text("serve", stage))
        socket = str(folder / "engine")
        words = [sys.executable, "-m", "etude.worker", name, "serve", socket, str(os.getpid())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        started = [subprocess.Popen(words, env=environment)]
        urls = []
        try:
            for sessions in ("", str(folder / "sessions")):
                words = [sys.executable, __file__, "--serve", model, socket, sessions]
                started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment))
                output = started[-1].stdout
                assert output is not None
                urls.append((await asyncio.to_thread(output.readline)).strip())
            yield socket, urls[0], urls[1]
        finally:
            for process in started:
                process.kill()
                process.wait()


def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="etude-nano")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=96, help="of each arm and round; a third with one client")
    parser.add_argument("--serve", nargs=3, metavar=("MODEL", "SOCKET", "JOURNAL"), help="for its own use")
    given = parser.parse_args()
    if given.serve:
        run(serve_process(*given.serve))
    with asyncio.Runner() as runner:
        around = processes(given.model)
        socket, plain, recording = runner.run(around.__aenter__())
        engine = EngineClient(runner.run(Client.connect(Path(socket), name="engine", timeout_s=120)))
        renderer = ChatFormat(model_folder(given.model)).renderer(())
        asks = {"engine": over_frames(engine, renderer), "http": over_http(plain, given.model),
                "record": over_http(recording, given.model)}  # fmt: skip
        arms = {}
        for clients in given.clients:
            for name, ask in asks.items():
                requests = max(8, given.requests // 3) if clients == 1 else given.requests
                runner.run(load(ask, clients, PROMPTS))  # once untimed
                arms[f"{name}, {clients} clients"] = _arm(runner, ask, clients, requests)
        rows = in_turn(arms, repeats=given.repeats)
        runner.run(around.__aexit__(None, None, None))
    return report("serve", rows, _values(rows, given.clients), given.json)


def _arm(runner: asyncio.Runner, ask: Ask, clients: int, requests: int) -> Callable[[], Mapping[str, float]]:
    return lambda: runner.run(load(ask, clients, requests))


def _values(rows: list[dict[str, Any]], measured: list[int]) -> dict[str, float]:
    """Of each goal; NaN: left out."""
    values: dict[str, float] = {}
    for clients in (1, 8, 32):
        for arm, base in (("http", "engine"), ("record", "http")):
            names = [f"{one}, {clients} clients" for one in (arm, base)]
            quantities = {"requests_per_s": ""}
            if arm == "http":
                quantities |= {"first_ms": "_first", "between_ms": "_between"}
            for quantity, ending in quantities.items():
                value = ratio(rows, names[0], names[1], quantity) if clients in measured else float("nan")
                values[f"{arm}_{clients}{ending}"] = value
    return values


if __name__ == "__main__":
    sys.exit(not main())
