"""The engine's log-probs are those that plain transformers gives the same tokens (docs/semantics.md, agreement)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agreement_table import HEADER, measure
from engine_driver import Reply, ask, reply, serving, teacher_forced, whole
from etude.inference.torch_engine import TorchEngine
from etude.models.load import Model, load_model
from tiny import ALL, random_ids, tiny_model

TOLERANCE = 1e-4


def prompts(count: int, *, vocab: int = 97) -> list[np.ndarray]:
    return [random_ids(3 + 7 * (n % 9), vocab=vocab, seed=n).numpy().astype(np.int32) for n in range(count)]


async def replies(engine: TorchEngine, texts: list[np.ndarray], **fields: object) -> list[Reply]:
    return list(await asyncio.gather(*(reply(engine, ids, context=f"c{n}", **fields) for n, ids in enumerate(texts))))


def worst_difference(plain: Model, got: Reply) -> float:
    start = len(got.window) - len(got.ids)
    expected = teacher_forced(plain, got.window, got.last.routes)[start:]
    return float(np.abs(expected - got.logprobs).max())


@pytest.mark.parametrize("family", ALL)
def test_engine_and_trainer_agree(family: str) -> None:
    async def run() -> list[Reply]:
        async with serving(tiny_model(family), max_concurrent=6) as engine:
            return await replies(engine, prompts(14), tokens=30)

    plain = tiny_model(family)
    for got in asyncio.run(run()):
        assert len(got.ids) == 30
        assert worst_difference(plain, got) < TOLERANCE


@pytest.mark.parametrize("family", ALL)
def test_they_agree_over_turns_shared_prefixes_and_temperatures(family: str) -> None:
    prompt = random_ids(80).numpy().astype(np.int32)

    async def play(engine: TorchEngine, name: str) -> list[Reply]:
        turns, window = [], prompt
        for turn in range(3):
            turns.append(await reply(engine, window, context=name, tokens=6))
            window = np.concatenate([turns[-1].window, random_ids(4, seed=turn).numpy()]).astype(np.int32)
        return turns

    async def run() -> list[list[Reply]]:
        async with serving(tiny_model(family), max_concurrent=5) as engine:
            episodes = list(await asyncio.gather(*(play(engine, f"c{n}") for n in range(7))))
            assert (await engine.stats()).reused_tokens > 7 * 3 * 70
            return episodes

    plain = tiny_model(family)
    for turns in asyncio.run(run()):
        rows = np.zeros((len(turns[-1].window) - 1, plain.num_moe_layers, plain.top_k), np.uint8)
        for got in turns:
            if got.last.routes is not None:
                start = got.last.routes_start
                rows[start : start + len(got.last.routes.experts)] = got.last.routes.experts
        routes = None
        if plain.num_moe_layers:
            assert turns[-1].last.routes is not None
            routes = type(turns[-1].last.routes)(experts=rows, valid=np.ones(len(rows), bool))
        expected = teacher_forced(plain, turns[-1].window, routes)
        for got in turns:
            place = slice(len(got.window) - len(got.ids), len(got.window))
            assert np.abs(expected[place] - got.logprobs).max() < TOLERANCE


def test_log_probs_are_those_at_the_sampling_temperature() -> None:
    async def run() -> Reply:
        async with serving(tiny_model("llama")) as engine:
            return await reply(engine, [5, 6, 7], tokens=20, temperature=0.5)

    import torch

    got, plain = asyncio.run(run()), tiny_model("llama")
    with torch.no_grad():
        logits = plain.network(torch.from_numpy(got.window.astype(np.int64))[None]).logits[0]
    expected = (logits / 0.5).log_softmax(-1)[torch.arange(2, 22), torch.from_numpy(got.ids.astype(np.int64))]
    assert np.abs(expected.numpy() - got.logprobs).max() < TOLERANCE


@pytest.mark.parametrize("family", ALL)
def test_a_batch_of_one_and_a_batch_of_many_agree(family: str) -> None:
    texts = prompts(32)

    async def run(concurrent: int) -> list[Reply]:
        async with serving(tiny_model(family), max_concurrent=concurrent) as engine:
            return await replies(engine, texts, tokens=10, seed=7)

    alone, together = asyncio.run(run(1)), asyncio.run(run(32))
    for one, many in zip(alone, together, strict=True):
        assert one.ids.tolist() == many.ids.tolist()
        assert np.abs(one.logprobs - many.logprobs).max() < TOLERANCE


def test_score_gives_what_generate_recorded() -> None:
    async def run() -> None:
        async with serving(tiny_model("qwen3_moe")) as engine:
            got = await reply(engine, [5, 6, 7], tokens=20)
            logprobs, routes = await engine.score(got.window, got.last.routes)
            assert logprobs[0] == 0
            assert np.abs(logprobs[3:] - got.logprobs).max() < TOLERANCE
            assert routes is not None
            assert got.last.routes is not None
            assert np.array_equal(routes.experts, got.last.routes.experts)
            own, _ = await engine.score(got.window)
            assert np.abs(own[3:] - got.logprobs).max() < TOLERANCE

    asyncio.run(run())


def test_forced_routes_change_the_score() -> None:
    async def run() -> None:
        async with serving(tiny_model("qwen3_moe")) as engine:
            ids = random_ids(12).numpy().astype(np.int32)
            own, routes = await engine.score(ids)
            assert routes is not None
            other = type(routes)(experts=(routes.experts + 1) % 4, valid=routes.valid)
            forced, taken = await engine.score(ids, other)
            assert np.abs(own - forced).max() > 1e-3
            assert taken is not None
            assert np.array_equal(taken.experts, other.experts)
            assert np.abs(forced - teacher_forced(tiny_model("qwen3_moe"), ids, other)).max() < TOLERANCE

    asyncio.run(run())


def test_tokens_are_drawn_from_the_models_distribution() -> None:
    async def run() -> list[Reply]:
        async with serving(tiny_model("llama"), max_concurrent=64, max_queue=600) as engine:
            return await replies(engine, [np.array([5, 6, 7], np.int32)] * 600, tokens=1)

    import torch

    plain = tiny_model("llama")
    with torch.no_grad():
        expected = plain.network(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).numpy()
    counts = np.bincount([int(got.ids[0]) for got in asyncio.run(run())], minlength=97)
    assert np.abs(counts / 600 - expected).max() < 5 * np.sqrt(0.25 / 600)
    likely = expected > 0.02
    chi_squared = ((counts - 600 * expected) ** 2 / (600 * expected))[likely].sum()
    assert chi_squared < 3 * likely.sum() + 10


@pytest.mark.parametrize("family", ALL)
def test_the_trainer_scores_what_the_engine_sampled_with_routes_forced_and_free(family: str) -> None:
    found = measure(family, lambda: tiny_model(family))
    assert found.forced.size == 24 * 32
    assert found.forced.max() < TOLERANCE
    assert (found.free is not None) == bool(tiny_model(family).num_moe_layers)
    # In float32 a router may fall out otherwise only where two experts are all but equal.
    assert found.free is None or np.median(found.free) < TOLERANCE


def test_the_table_of_support_has_every_family_and_no_number_above_the_tolerance() -> None:
    text = (Path(__file__).parents[2] / "docs/support.md").read_text(encoding="utf-8")
    table = text.split(HEADER)[1].split("\n\n")[0].strip().splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in table] == [
        *(f"{family}, tiny" for family in ALL), "etude-nano", "etude-nano, upcycled to four experts", "SmolLM2-135M",
    ]  # fmt: skip
    assert all(float(row.split(" | ")[3]) < TOLERANCE for row in table)


@pytest.mark.slow
def test_smollm2_agrees() -> None:
    from transformers import AutoTokenizer

    from smollm2 import smollm2_folder

    folder = str(smollm2_folder())
    encode = AutoTokenizer.from_pretrained(folder).encode
    texts = [
        np.array(encode(text), np.int32)
        for text in ("def add(a, b):\n    return", "The capital of France is", "import numpy as np\n\n" * 12)
    ]

    async def run() -> list[Reply]:
        async with serving(load_model(folder), max_concurrent=2) as engine:
            return await replies(engine, texts, tokens=24)

    plain = load_model(folder)
    for got in asyncio.run(run()):
        assert worst_difference(plain, got) < TOLERANCE


def test_a_reply_in_pieces_is_the_reply() -> None:
    async def run() -> None:
        async with serving(tiny_model("llama")) as engine:
            request = ask([5, 6], tokens=50)
            got = whole(request, [chunk async for chunk in engine.generate(request)])
            assert len(got.chunks) > 2
            assert [chunk.stop for chunk in got.chunks[:-1]] == [None] * (len(got.chunks) - 1)
            assert len(got.ids) == len(got.logprobs) == 50

    asyncio.run(run())
