"""An engine behind a socket behaves as the engine itself: tokens, records, errors by type, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_driver import ask, manifest, reply, serving, version
from etude.errors import EngineError, OverloadedError, RequestError, StoreError, VersionError
from etude.frames import Client, Server
from etude.inference.client import EngineClient
from etude.inference.service import handlers
from etude.inference.torch_engine import TorchEngine
from etude.protocols import Engine
from etude.types import Manifest
from tiny import tiny_model


async def fetch(wanted: Manifest) -> Mapping[str, np.ndarray | torch.Tensor]:
    if wanted.version.n == 13:
        raise StoreError("the blob is gone", cause="gc", hint="take a newer one")
    return {
        name: tensor.numpy() for name, tensor in tiny_model("qwen3_moe", seed=wanted.version.n).hub_tensors().items()
    }


@contextlib.asynccontextmanager
async def served(tmp_path: Path, **recipe: object) -> AsyncIterator[tuple[TorchEngine, EngineClient]]:
    async with serving(tiny_model("qwen3_moe"), fetch=fetch, **recipe) as engine:  # type: ignore[arg-type]
        server = Server(handlers(engine))
        await server.listen(tmp_path / "engine")
        client = await Client.connect(tmp_path / "engine", name="engine")
        try:
            yield engine, EngineClient(client)
        finally:
            await client.close()
            await server.close()


def test_the_client_is_an_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as (engine, client):
            assert isinstance(client, Engine)
            assert isinstance(engine, Engine)
            near = await reply(engine, [5, 6, 7], context="near", tokens=20, seed=1)
            far = await reply(client, [5, 6, 7], context="far", tokens=20, seed=1)
            assert far.ids.tolist() == near.ids.tolist()
            assert np.abs(far.logprobs - near.logprobs).max() < 1e-6
            assert far.last.kv_epochs == near.last.kv_epochs
            assert far.last.routes is not None
            assert near.last.routes is not None
            assert np.array_equal(far.last.routes.experts, near.last.routes.experts)
            logprobs, routes = await client.score(far.window, far.last.routes)
            assert routes is not None
            assert np.abs(logprobs[3:] - far.logprobs).max() < 1e-4
            await client.forget("far")
            await client.load(manifest(3))
            assert (await client.stats()).version == version(3)

    asyncio.run(run())


def test_errors_keep_their_type_and_words(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, max_concurrent=1, max_queue=0) as (_, client):
            with pytest.raises(RequestError, match="empty"):
                await reply(client, np.zeros(0, np.int32))
            with pytest.raises(VersionError, match="step 9"):
                await reply(client, [5], min_step=9)
            with pytest.raises(StoreError, match="gone") as refused:
                await client.load(manifest(13))
            assert (refused.value.cause, refused.value.hint) == ("gc", "take a newer one")
            outcomes = await asyncio.gather(
                *(reply(client, [5], context=f"c{n}", tokens=60) for n in range(4)), return_exceptions=True
            )
            assert any(isinstance(outcome, OverloadedError) for outcome in outcomes)

    asyncio.run(run())


@pytest.mark.parametrize("args", [None, 5, {"request_id": "r"}, {"ids": "text"}, [1, 2]])
@pytest.mark.parametrize("method", ["generate", "score", "load"])
def test_malformed_arguments_are_a_request_error(tmp_path: Path, method: str, args: object) -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            with pytest.raises(RequestError, match="malformed"):
                async for _ in handlers(engine)[method](args):
                    pass

    asyncio.run(run())


def test_closing_the_iterator_cancels_on_the_other_side(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as (engine, client):
            chunks = client.generate(ask([5, 6], tokens=120))
            await anext(chunks)
            await chunks.aclose()  # type: ignore[attr-defined]
            while (await engine.stats()).running:
                await asyncio.sleep(0.01)
            assert (await engine.stats()).sampled_tokens < 120

    asyncio.run(run())


def test_a_dead_process_is_an_engine_error(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as (_, client):
            assert not client.closed
            await client._client.close()
            assert client.closed
            with pytest.raises(EngineError, match="gone"):
                await client.stats()

    asyncio.run(run())
