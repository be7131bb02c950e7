"""Swaps: sentinel weights make each token prove its stamp; requests in flight go on with their KV."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from engine_driver import Reply, ask, expand, manifest, reply, serving, version, whole
from etude.errors import EngineError, RequestError, StoreError, VersionError
from etude.inference.torch_engine import TorchEngine
from etude.protocols import GenerateRequest
from etude.types import Manifest, Version
from tiny import tiny_model


def sentinel(n: int) -> dict[str, torch.Tensor]:
    """Weights whose head forces token n whatever came before: the body passes a constant on."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tiny_model("llama").hub_tensors().items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["lm_head.weight"][n, 0] = 100.0
    return tensors


async def fetch(wanted: Manifest) -> Mapping[str, np.ndarray | torch.Tensor]:
    return sentinel(wanted.version.n)


async def generate_over_swaps(engine: TorchEngine, *, requests: int, swaps: int) -> list[Reply]:
    """Every 16 tokens of the first request, a new version."""

    async def first() -> Reply:
        request = ask([50, 51, 52], context="first", tokens=16 * (swaps + 1))
        chunks = []
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            if chunk.stop is None:
                await engine.load(manifest(len(chunks)))
        return whole(request, chunks)

    others = [reply(engine, [60 + n, 61], context=f"c{n}", tokens=16 * (swaps + 1)) for n in range(requests - 1)]
    return list(await asyncio.gather(first(), *others))


def test_every_token_proves_its_stamp_and_nothing_is_prefilled_again() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None) as engine:
            await engine.load(manifest(0))
            replies = await generate_over_swaps(engine, requests=5, swaps=5)
            stats = await engine.stats()
            assert stats.swaps == 6
            assert stats.version == version(5)
            assert stats.swap_pause_s > 0
            assert stats.prefilled_tokens == 3 + 4 * 2  # the prompts, once
            assert len({stamp.n for stamp in replies[0].versions}) >= 5
            for got in replies:
                assert [stamp.n for stamp in got.versions] == got.ids.tolist()
                assert np.allclose(got.logprobs, 0.0)

    asyncio.run(run())


def test_the_version_of_every_kv_entry_is_recorded() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None) as engine:
            await engine.load(manifest(0))
            for got in await generate_over_swaps(engine, requests=3, swaps=4):
                (epoch,) = got.last.kv_epochs
                start = len(got.window) - len(got.ids)
                assert epoch.first == start
                kv = expand(epoch.runs, 0, len(got.window) - 1)
                # The step that samples token p + 1 computes the KV of token p.
                assert kv[start - 1 :] == got.versions
                assert set(kv[: start - 1]) == {version(0)}

    asyncio.run(run())


def test_a_next_turn_goes_on_with_kv_of_older_versions_and_counts_it() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None) as engine:
            await engine.load(manifest(1))
            first = await reply(engine, [50, 51, 52], tokens=4)
            await engine.load(manifest(2))
            second = await reply(engine, [*first.window, 53, 54], tokens=4)
            assert second.ids.tolist() == [2, 2, 2, 2]
            assert second.last.reused_tokens == 6  # all but the last token sampled, whose KV was not computed
            stats = await engine.stats()
            assert (stats.reused_tokens, stats.stale_reused_tokens) == (6, 6)
            assert stats.prefilled_tokens == 3 + 3
            (epoch,) = second.last.kv_epochs
            assert epoch.first == 3
            assert [(run.start, run.version.n) for run in epoch.runs] == [(0, 1), (6, 2)]

    asyncio.run(run())


def test_kv_reuse_version_computes_again_after_a_swap_and_opens_an_epoch() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None, kv_reuse="version") as engine:
            await engine.load(manifest(1))
            first = await reply(engine, [50, 51, 52], tokens=4)
            again = await reply(engine, [*first.window, 53], tokens=2)
            assert again.last.reused_tokens == 6
            await engine.load(manifest(2))
            second = await reply(engine, [*again.window, 54], tokens=2)
            assert second.last.reused_tokens == 0
            assert [epoch.first for epoch in second.last.kv_epochs] == [3, 11]
            assert [[run.version.n for run in epoch.runs] for epoch in second.last.kv_epochs] == [[1], [2]]
            assert (await engine.stats()).stale_reused_tokens == 0

    asyncio.run(run())


def test_requests_in_flight_keep_their_kv_even_with_kv_reuse_version() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None, kv_reuse="version") as engine:
            await engine.load(manifest(0))
            replies = await generate_over_swaps(engine, requests=2, swaps=3)
            assert (await engine.stats()).prefilled_tokens == 3 + 2
            assert all([stamp.n for stamp in got.versions] == got.ids.tolist() for got in replies)

    asyncio.run(run())


def test_siblings_do_not_share_across_versions() -> None:
    prompt = np.arange(80, dtype=np.int32)

    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None) as engine:
            await engine.load(manifest(1))
            await reply(engine, prompt, context="a", tokens=2)
            assert (await reply(engine, prompt, context="b", tokens=2)).last.reused_tokens == 79
            await engine.load(manifest(2))
            other = await reply(engine, prompt, context="c", tokens=2)
            assert other.last.reused_tokens == 0
            assert [run.version.n for run in other.last.kv_epochs[0].runs] == [2]
            assert (await reply(engine, prompt, context="d", tokens=2)).last.reused_tokens == 79

    asyncio.run(run())


def test_a_failed_download_leaves_the_old_version_serving() -> None:
    async def broken(_: Manifest) -> Mapping[str, np.ndarray | torch.Tensor]:
        raise StoreError("the blob is gone")

    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=broken) as engine:
            with pytest.raises(StoreError, match="gone"):
                await engine.load(manifest(1))
            assert set((await reply(engine, [5, 6])).versions) == {version(0)}

    asyncio.run(run())


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype"])
def test_a_version_that_does_not_fit_leaves_the_old_one_serving(damage: str) -> None:
    async def odd(wanted: Manifest) -> Mapping[str, np.ndarray | torch.Tensor]:
        tensors = sentinel(1)
        if damage == "missing":
            del tensors["model.norm.weight"]
        elif damage == "shape":
            tensors["model.norm.weight"] = torch.ones(3)
        else:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
        return tensors

    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=odd) as engine:
            before = await reply(engine, [5, 6], temperature=0.0)
            with pytest.raises(EngineError, match=r"1\.1.*model\.norm\.weight"):
                await engine.load(manifest(1))
            after = await reply(engine, [5, 6], context="d", temperature=0.0)
            assert set(after.versions) == {version(0)}
            assert after.ids.tolist() == before.ids.tolist()

    asyncio.run(run())


def test_numpy_weights_are_taken_as_published() -> None:
    async def arrays(wanted: Manifest) -> Mapping[str, np.ndarray | torch.Tensor]:
        return {name: tensor.numpy() for name, tensor in sentinel(wanted.version.n).items()}

    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=arrays) as engine:
            await engine.load(manifest(9))
            assert (await reply(engine, [5, 6], tokens=3)).ids.tolist() == [9, 9, 9]

    asyncio.run(run())


def test_a_minimum_step_and_an_exact_version_are_kept_or_refused() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None) as engine:
            with pytest.raises(VersionError, match="no version"):
                await reply(engine, [5])
            await engine.load(manifest(3))
            assert (await reply(engine, [5], min_step=3, exact=version(3), tokens=2)).ids.tolist() == [3, 3]
            with pytest.raises(VersionError, match="step 4"):
                await reply(engine, [5], min_step=4)
            with pytest.raises(VersionError, match=r"1\.2"):
                await reply(engine, [5], exact=version(2))

    asyncio.run(run())


async def ask_again(engine: TorchEngine, *, exact: Version) -> None:
    """Short pinned requests, one after the other, until one is refused."""
    for n in range(100):
        await reply(engine, [5], context=f"q{n}", exact=exact, tokens=1)


async def load_at_every_chunk(engine: TorchEngine, request: GenerateRequest) -> None:
    async for chunk in engine.generate(request):
        if chunk.stop is None:
            await engine.load(manifest(2))


def test_a_pinned_request_delays_the_swap_and_is_never_mixed() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None) as engine:
            await engine.load(manifest(1))
            request = ask([5], context="p", exact=version(1), tokens=120)
            free = asyncio.create_task(reply(engine, [5], context="f", tokens=120))
            chunks = [await anext(running := engine.generate(request))]
            loading = asyncio.create_task(engine.load(manifest(2)))
            with pytest.raises(VersionError, match="about to be replaced"):
                await ask_again(engine, exact=version(1))
            assert not loading.done()
            chunks += [chunk async for chunk in running]
            assert whole(request, chunks).ids.tolist() == [1] * 120
            await loading
            got = await free
            assert [stamp.n for stamp in got.versions] == got.ids.tolist()

    asyncio.run(run())


def test_a_pinned_request_that_takes_too_long_fails_and_the_swap_happens() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=fetch, serves=None, pin_timeout_s=0.0) as engine:
            await engine.load(manifest(1))
            request = ask([5], exact=version(1), tokens=120)
            with pytest.raises(VersionError, match="replaced"):
                await load_at_every_chunk(engine, request)
            assert (await reply(engine, [5], tokens=1)).ids.tolist() == [2]

    asyncio.run(run())


def test_diverged_weights_fail_the_request_and_spoil_nobody_after() -> None:
    async def diverged(wanted: Manifest) -> Mapping[str, np.ndarray | torch.Tensor]:
        tensors = sentinel(wanted.version.n)
        if wanted.version.n == 1:
            tensors["model.embed_tokens.weight"].fill_(torch.nan)
        return tensors

    async def run() -> None:
        async with serving(tiny_model("llama"), fetch=diverged) as engine:
            await engine.load(manifest(1))
            with pytest.raises(EngineError, match="finite"):
                await reply(engine, np.arange(90, dtype=np.int32))
            await engine.load(manifest(2))
            texts = [np.arange(n, dtype=np.int32) for n in (2, 30, 60)]
            got = await asyncio.gather(*(reply(engine, ids, context=f"c{n}") for n, ids in enumerate(texts)))
            assert all(one.ids.tolist() == [2] * 8 for one in got)

    asyncio.run(run())


def test_an_engine_without_a_way_to_fetch_says_so() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            with pytest.raises(EngineError, match="cannot load"):
                await engine.load(manifest(1))

    asyncio.run(run())


def test_request_errors_are_not_version_errors() -> None:
    assert not issubclass(RequestError, VersionError)
