"""KV reuse: it changes nothing but the work done, frees what is no longer needed, and what was dropped is recorded."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine_driver import Reply, ask, reply, serving
from etude.errors import RequestError
from etude.inference.torch_engine import TorchEngine
from tiny import ALL, random_ids, tiny_model


def text(count: int, seed: int = 0) -> np.ndarray:
    return random_ids(count, seed=seed).numpy().astype(np.int32)


async def until_idle(engine: TorchEngine) -> None:
    while (await engine.stats()).running:
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("family", ALL)
def test_a_next_turn_from_kept_kv_equals_a_full_recomputation(family: str) -> None:
    async def turns(kv_reuse: str) -> list[Reply]:
        async with serving(tiny_model(family), kv_reuse=kv_reuse) as engine:
            got, window = [], text(20)
            for turn in range(3):
                got.append(await reply(engine, window, tokens=8, seed=turn))
                window = np.concatenate([got[-1].window, text(5, seed=turn)])
            stats = await engine.stats()
            assert (stats.reused_tokens > 0) == (kv_reuse == "context")
            return got

    for kept, fresh in zip(asyncio.run(turns("context")), asyncio.run(turns("none")), strict=True):
        assert kept.ids.tolist() == fresh.ids.tolist()
        assert np.abs(kept.logprobs - fresh.logprobs).max() < 1e-5


def test_only_what_is_new_is_prefilled_in_a_next_turn() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            first = await reply(engine, text(20), tokens=8)
            await reply(engine, np.concatenate([first.window, text(5)]), tokens=8)
            stats = await engine.stats()
            assert stats.prefilled_tokens == 20 + 1 + 5  # the last sampled token's KV was never computed
            assert stats.reused_tokens == 27

    asyncio.run(run())


def test_siblings_that_come_together_prefill_their_prompt_once() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            got = await asyncio.gather(*(reply(engine, text(90), context=f"c{n}", tokens=4) for n in range(8)))
            assert (await engine.stats()).prefilled_tokens == 90 + 7  # the others compute its last token only
            assert sorted(one.last.reused_tokens for one in got) == [0] + [89] * 7

    asyncio.run(run())


def test_a_short_common_header_is_copied() -> None:
    header = text(40)

    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            await reply(engine, np.concatenate([header, text(60, seed=1)]), context="a", tokens=2)
            other = np.concatenate([header, text(60, seed=2)])
            got = await reply(engine, other, context="b", tokens=6, seed=3)
            assert got.last.reused_tokens == 40
        async with serving(tiny_model("llama")) as engine:
            alone = await reply(engine, other, tokens=6, seed=3)
            assert alone.ids.tolist() == got.ids.tolist()
            assert np.abs(alone.logprobs - got.logprobs).max() < 1e-5

    asyncio.run(run())


def test_siblings_of_different_lengths_and_owners_that_leave_first() -> None:
    """The owner of a shared beginning is forgotten while others still read it."""

    async def run() -> None:
        async with serving(tiny_model("qwen3_moe"), max_concurrent=4) as engine:
            await reply(engine, text(70), context="owner", tokens=2)
            one = await reply(engine, text(70), context="one", tokens=3, seed=1)
            await engine.forget("owner")
            for n in range(6):  # others take the freed memory, if it is free
                await reply(engine, text(90, seed=n + 9), context=f"x{n}", tokens=2)
            two = await reply(engine, np.concatenate([one.window, text(9)]), context="one", tokens=6, seed=2)
            assert two.last.reused_tokens == 72
        async with serving(tiny_model("qwen3_moe")) as engine:
            alone = await reply(engine, two.window[:-6], tokens=6, seed=2)
            assert np.abs(alone.logprobs - two.logprobs).max() < 1e-4

    asyncio.run(run())


def test_another_continuation_drops_what_no_longer_holds_and_opens_an_epoch() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            first = await reply(engine, text(20), tokens=8)
            changed = np.concatenate([first.window[:24], text(6, seed=5)])
            got = await reply(engine, changed, tokens=6, seed=1)
            assert got.last.reused_tokens <= 24
            assert [epoch.first for epoch in got.last.kv_epochs] == [20, 30]
        async with serving(tiny_model("llama")) as engine:
            alone = await reply(engine, changed, tokens=6, seed=1)
            assert np.abs(alone.logprobs - got.logprobs).max() < 1e-5

    asyncio.run(run())


def test_eviction_frees_the_longest_unused_and_its_next_turn_opens_an_epoch() -> None:
    async def run() -> None:
        async with serving(tiny_model("qwen3_moe"), kv_tokens=128, max_concurrent=2) as engine:
            first = await reply(engine, text(40), context="old", tokens=4)
            rows = first.last.routes
            assert rows is not None
            assert len(rows.experts) == 43
            for n in range(3):
                await reply(engine, text(40, seed=n + 1), context=f"new{n}", tokens=4)
            second = await reply(engine, np.concatenate([first.window, text(3)]), context="old", tokens=4)
            assert second.last.reused_tokens == 0
            assert [epoch.first for epoch in second.last.kv_epochs] == [40, 47]
            # Rows that an earlier reply sent are not sent again: their route stands.
            assert second.last.routes_start == 43
            assert second.last.routes is not None
            assert len(second.last.routes.experts) == 47 + 4 - 1 - 43

    asyncio.run(run())


def test_running_requests_are_never_evicted_others_wait() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), kv_tokens=100, max_concurrent=8) as engine:
            got = await asyncio.gather(*(reply(engine, text(30, n), context=f"c{n}", tokens=15) for n in range(6)))
            assert all(len(one.ids) == 15 for one in got)
            assert (await engine.stats()).prefilled_tokens == 6 * 30

    asyncio.run(run())


def test_a_request_beyond_the_kv_budget_is_refused_by_name() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), kv_tokens=64) as engine:
            with pytest.raises(RequestError, match="does not fit") as refused:
                await reply(engine, text(60), tokens=10)
            assert "engine.kv_tokens is 64" in str(refused.value)
            assert len((await reply(engine, text(60), tokens=4)).ids) == 4

    asyncio.run(run())


@pytest.mark.parametrize("keep_context", [True, False])
def test_keep_context_decides_whether_the_kv_stays(keep_context: bool) -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            first = await reply(engine, text(20), tokens=4, keep_context=keep_context)
            second = await reply(engine, first.window, tokens=4)
            assert second.last.reused_tokens == (23 if keep_context else 0)

    asyncio.run(run())


def test_forget_frees_a_context_and_ignores_unknown_ones() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            first = await reply(engine, text(20), tokens=4)
            await engine.forget("c")
            await engine.forget("never seen")
            assert (await reply(engine, first.window, tokens=4)).last.reused_tokens == 0

    asyncio.run(run())


def test_closing_the_iterator_cancels_and_frees_the_row() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), max_concurrent=1) as engine:
            chunks = engine.generate(ask(text(10), tokens=110, keep_context=False))
            await anext(chunks)
            assert (await engine.stats()).running == 1
            await chunks.aclose()  # type: ignore[attr-defined]
            await until_idle(engine)
            stats = await engine.stats()
            assert stats.sampled_tokens < 110
            assert len((await reply(engine, text(10), tokens=5)).ids) == 5

    asyncio.run(run())


def test_a_cancelled_task_and_a_cancelled_waiter_leave_nothing_behind() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), max_concurrent=1) as engine:
            running = asyncio.create_task(reply(engine, text(10), context="a", tokens=110))
            waiting = asyncio.create_task(reply(engine, text(10), context="b", tokens=110))
            await asyncio.sleep(0.05)
            running.cancel()
            waiting.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
            await until_idle(engine)
            assert (await engine.stats()).waiting == 0
            assert len((await reply(engine, text(10), context="b", tokens=5)).ids) == 5

    asyncio.run(run())
