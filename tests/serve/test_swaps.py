"""Versions are published while clients stream: no request is lost, and what spans two versions says so.

The real nano on the real engine, a real store, the real subscriber; clients over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from etude.data.formats import ChatFormat
from etude.inference.recipe import EngineRecipe
from etude.inference.torch_engine import TorchEngine
from etude.models.load import load_model
from etude.models.recipe import SHIPPED
from etude.weights.pieces import Snapshot, Stored
from etude.weights.publish import Publisher, take_incarnation
from etude.weights.replica import Replica
from etude.weights.store import open_store
from etude.weights.subscribe import Subscriber
from serve.speaking import MemoryRecorder, serving, windows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLIENTS, ROUNDS, VERSIONS = 8, 3, 6


def test_swaps_under_load_lose_no_request(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/weights")
    model = load_model("etude-nano")
    start = {name: tensor.numpy().copy() for name, tensor in model.hub_tensors().items()}
    publisher = Publisher(store, take_incarnation(store), anchor_every=3)

    def publish(step: int) -> None:
        changed = {name: Stored("F32", array * np.float32(1 + 1e-4 * step)) for name, array in start.items()}
        publisher.publish(Snapshot.take(step, changed))

    async def chat(client: httpx2.AsyncClient, number: int) -> int:
        """One conversation of several turns; how many answers ended as they should."""
        history: list[Any] = [{"role": "user", "content": f"Repair number {number}."}]
        ended = 0
        for _ in range(ROUNDS):
            body = {"model": "nano", "messages": history, "stream": True, "max_tokens": 120, "temperature": 2}
            got = await client.post("/v1/chat/completions", json=body)
            assert got.status_code == 200, got.text
            lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            events = [json.loads(line) for line in lines[:-1]]
            assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
            ended += 1
        return ended

    async def run() -> MemoryRecorder:
        replica = Replica(store, threads=1)
        engine = TorchEngine(
            model, EngineRecipe(max_concurrent=CLIENTS, kv_reuse="version"),
            fetch=lambda manifest: asyncio.to_thread(replica.fetch, manifest),
        )  # fmt: skip

        async def follow() -> None:
            async for manifest in Subscriber(store, holder="server", poll_s=0.02).manifests():
                await engine.load(manifest)

        async def publish_all(working: asyncio.Future[Any]) -> None:
            for step in range(2, VERSIONS + 1):
                await asyncio.to_thread(publish, step)
                while (await engine.stats()).swaps < step and not working.done():
                    await asyncio.sleep(0.01)

        await asyncio.to_thread(publish, 1)
        following = asyncio.create_task(follow())
        async with (
            serving(engine, chat=ChatFormat(SHIPPED["etude-nano"]), name="nano") as site,
            httpx2.AsyncClient(base_url=site.url, timeout=300) as client,
        ):
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)
            working = asyncio.gather(*(chat(client, number) for number in range(CLIENTS)))
            await publish_all(working)
            assert sum(await working) == CLIENTS * ROUNDS
            recorder = site.recorder
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await engine.close()
        return recorder

    recorder = asyncio.run(run())
    assert len(recorder.turns) == CLIENTS * ROUNDS
    windows_of(recorder.turns)
    spanning = [turn for turn in recorder.turns if turn.tokens and len(turn.tokens.versions) > 1]
    assert spanning
    for turn in spanning:
        assert turn.tokens is not None
        steps = [run.version.step for run in turn.tokens.versions]
        assert steps == sorted(steps)
        first = turn.tokens.start + int(np.argmax(turn.tokens.sampled))
        assert turn.tokens.versions[0].start == first
        assert turn.tokens.kv_epochs[-1].runs[-1].version == turn.tokens.versions[-1].version
