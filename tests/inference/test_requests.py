"""Requests of any kind: what cannot be served is refused by name, and nobody else is harmed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_driver import ask, reply, serving
from etude.errors import EngineError, EtudeError, OverloadedError, RequestError
from etude.inference.requests import check
from etude.inference.torch_engine import TorchEngine
from etude.types import StopReason
from tiny import random_ids, tiny_model

LIMITS = {"vocab_size": 97, "max_context": 128, "kv_tokens": 1000}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"ids": np.zeros(0, np.int32)}, "empty"),
        ({"ids": np.array([1.0, 2.0], np.float32)}, "integers"),
        ({"ids": np.array([True, False])}, "integers"),
        ({"ids": np.array([[1, 2]], np.int32)}, "row of integers"),
        ({"ids": np.array([5, 97], np.int32)}, "97"),
        ({"ids": np.array([5, -1], np.int32)}, "-1"),
        ({"ids": np.array([2**40], np.int64)}, "no token"),
        ({"ids": np.zeros(128, np.int32)}, "too long: 128"),
        ({"ids": np.zeros(5000, np.int32)}, "too long: 5000"),
        ({"tokens": 0}, "max_new_tokens = 0"),
        ({"tokens": -3}, "max_new_tokens = -3"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"stop_ids": (97,)}, "stop_ids has 97"),
        ({"banned_ids": (-1,)}, "banned_ids has -1"),
        ({"banned_ids": tuple(range(97))}, "every token"),
    ],
)
def test_a_malformed_request_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        check(ask(**{"ids": [5, 6], **fields}), **LIMITS)  # type: ignore[arg-type]


def test_the_limit_of_the_window_is_named() -> None:
    with pytest.raises(RequestError) as refused:
        check(ask(np.zeros(200, np.int32)), **LIMITS)
    assert "128 tokens" in str(refused.value)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=140),
    tokens=st.integers(-(2**60), 2**60),
    temperature=st.floats(),
    stop_ids=st.lists(st.integers(-5, 120), max_size=4),
)
def test_whatever_comes_is_taken_or_refused(
    ids: list[int], tokens: int, temperature: float, stop_ids: list[int]
) -> None:
    request = ask(np.array(ids, np.int32), tokens=tokens, temperature=temperature, stop_ids=tuple(stop_ids))
    try:
        limit = check(request, **LIMITS)
    except RequestError:
        return
    assert len(ids) < limit <= 128


def test_refused_requests_harm_nobody() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            good = asyncio.create_task(reply(engine, [5, 6, 7], context="good", tokens=40, seed=1))
            bad = [reply(engine, np.array([5, 99 + n], np.int32), context=f"b{n}") for n in range(20)]
            outcomes = await asyncio.gather(*bad, return_exceptions=True)
            assert all(isinstance(outcome, RequestError) for outcome in outcomes)
            got = await good
        async with serving(tiny_model("llama")) as engine:
            assert (await reply(engine, [5, 6, 7], tokens=40, seed=1)).ids.tolist() == got.ids.tolist()

    asyncio.run(run())


def test_too_many_waiting_requests_are_refused_as_overload() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), max_concurrent=1, max_queue=2) as engine:
            asked = [reply(engine, [5, 6], context=f"c{n}", tokens=60) for n in range(8)]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            refused = [outcome for outcome in outcomes if isinstance(outcome, OverloadedError)]
            assert len(refused) == 5
            assert "max_queue is 2" in str(refused[0])
            assert len((await reply(engine, [5, 6], tokens=3)).ids) == 3

    asyncio.run(run())


def test_an_id_or_a_context_in_use_is_refused() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            first = ask([5, 6], context="c", tokens=100)
            chunks = engine.generate(first)
            await anext(chunks)
            with pytest.raises(RequestError, match="has a request running"):
                await reply(engine, [5, 6], context="c")
            with pytest.raises(RequestError, match="is running already"):
                await anext(engine.generate(first))
            assert [chunk async for chunk in chunks][-1].stop is StopReason.LENGTH

    asyncio.run(run())


def test_replies_stop_where_they_should() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            plain = await reply(engine, [5, 6], tokens=30, seed=3)
            assert plain.stop is StopReason.LENGTH
            stop = int(plain.ids[10])
            stopped = await reply(engine, [5, 6], context="d", tokens=30, seed=3, stop_ids=(stop,))
            assert stopped.stop is StopReason.END
            assert stopped.ids.tolist() == plain.ids[: plain.ids.tolist().index(stop) + 1].tolist()
            full = await reply(engine, random_ids(120).numpy().astype(np.int32), context="e", tokens=30)
            assert full.stop is StopReason.CONTEXT
            assert len(full.window) == 128

    asyncio.run(run())


def test_banned_tokens_never_come_and_log_probs_are_of_what_was_drawn_from() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            free = await reply(engine, [5, 6], tokens=60, seed=3)
            banned = tuple(sorted(set(free.ids.tolist())))
            got = await reply(engine, [5, 6], context="d", tokens=60, seed=3, banned_ids=banned)
            assert not set(got.ids.tolist()) & set(banned)
            only = await reply(engine, [5, 6], context="e", tokens=5, banned_ids=tuple(n for n in range(97) if n != 11))
            assert only.ids.tolist() == [11] * 5
            assert np.allclose(only.logprobs, 0.0)

    asyncio.run(run())


def test_temperature_zero_takes_the_likeliest_token() -> None:
    async def run() -> None:
        async with serving(tiny_model("qwen3")) as engine:
            one = await reply(engine, [5, 6], tokens=20, temperature=0.0, seed=1)
            two = await reply(engine, [5, 6], context="d", tokens=20, temperature=0.0, seed=2)
            assert one.ids.tolist() == two.ids.tolist()
            logprobs, _ = await engine.score(one.window)
            assert np.abs(logprobs[2:] - one.logprobs).max() < 1e-4

    asyncio.run(run())


def test_a_seed_repeats_a_reply_and_no_seed_does_not() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            ids = [(await reply(engine, [5, 6], tokens=20, seed=s)).ids.tolist() for s in (1, 1, 2, None, None)]
            assert ids[0] == ids[1]
            assert ids[0] != ids[2]
            assert ids[3] != ids[4]

    asyncio.run(run())


def test_score_refuses_what_generate_refuses() -> None:
    async def run() -> None:
        async with serving(tiny_model("qwen3_moe")) as engine:
            for ids in (np.zeros(0, np.int32), np.array([97], np.int32), np.zeros(129, np.int32), np.zeros(3)):
                with pytest.raises(RequestError):
                    await engine.score(ids)
            _, routes = await engine.score(np.arange(9, dtype=np.int32))
            with pytest.raises(RequestError, match="do not fit the ids"):
                await engine.score(np.arange(12, dtype=np.int32), routes)
            logprobs, none = await engine.score(np.array([5], np.int32))
            assert logprobs.tolist() == [0.0]
            assert none is not None
            assert len(none.experts) == 0

    asyncio.run(run())


def test_after_close_everything_is_refused_and_waiters_are_told() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama"), max_concurrent=1) as engine:
            waiting = [asyncio.create_task(reply(engine, [5], context=f"c{n}", tokens=120)) for n in range(3)]
            await asyncio.sleep(0.02)
            await engine.close()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert any(isinstance(outcome, EngineError) for outcome in outcomes)
            for call in (engine.stats(), engine.forget("c"), reply(engine, [5])):
                with pytest.raises(EngineError, match="closed"):
                    await call

    asyncio.run(run())


def test_an_engine_that_dies_tells_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise MemoryError("no memory left")

    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            forward = vars(engine)["_forward"]
            waiting = [asyncio.create_task(reply(engine, [5], context=f"c{n}", tokens=120)) for n in range(3)]
            monkeypatch.setattr(forward, "step", explode)
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(outcome, EngineError) and "no memory left" in str(outcome) for outcome in outcomes)
            with pytest.raises(EngineError, match="died"):
                await engine.stats()

    asyncio.run(run())


def test_many_loops_may_use_one_engine() -> None:
    async def make() -> TorchEngine:
        async with serving(tiny_model("llama")) as engine:
            ids = await asyncio.to_thread(lambda: asyncio.run(reply(engine, [5, 6], context="other", tokens=9)))
            assert len(ids.ids) == 9
            return engine

    with pytest.raises(EtudeError):
        asyncio.run(asyncio.run(make()).stats())
