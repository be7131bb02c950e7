"""What is served: families beside those with a fast path, 16-bit weights; and what is refused before it serves."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from transformers import GptOssConfig, MistralConfig, PreTrainedConfig, Qwen2Config, RwkvConfig

from engine_driver import Reply, reply, serving, teacher_forced
from etude.errors import ModelError
from etude.inference.recipe import EngineRecipe
from etude.inference.torch_engine import TorchEngine
from etude.models.load import Model, model_from_config
from tiny import tiny_model

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip


async def one_reply(model: Model) -> Reply:
    async with serving(model) as engine:
        return await reply(engine, [5, 6, 7, 8], tokens=30)


@pytest.mark.parametrize("config", [Qwen2Config(**SHAPE), MistralConfig(**SHAPE, sliding_window=None)])
def test_other_families_run_by_their_modules(config: PreTrainedConfig) -> None:
    got = asyncio.run(one_reply(model_from_config(config, seed=0)))
    expected = teacher_forced(model_from_config(config, seed=0), got.window)[4:]
    assert np.abs(expected - got.logprobs).max() < 1e-4


def test_16_bit_weights_are_served() -> None:
    got = asyncio.run(one_reply(tiny_model("llama", dtype="bfloat16", initializer_range=0.02)))
    expected = teacher_forced(tiny_model("llama", dtype="bfloat16", initializer_range=0.02), got.window)[4:]
    assert np.abs(expected - got.logprobs).max() < 0.05


def test_a_sliding_window_that_never_slides_is_served_and_another_is_refused() -> None:
    got = asyncio.run(one_reply(model_from_config(MistralConfig(**SHAPE, sliding_window=128), seed=0)))
    assert len(got.ids) == 30
    with pytest.raises(ModelError, match="sliding window of 64"):
        TorchEngine(model_from_config(MistralConfig(**SHAPE, sliding_window=64), seed=0), EngineRecipe())


def test_a_mixture_whose_routes_cannot_be_recorded_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="qwen2_moe"):
        TorchEngine(tiny_model("qwen2_moe"), EngineRecipe())


def test_a_mixture_is_served_without_routes_where_none_are_wanted() -> None:
    async def run() -> Reply:
        async with serving(tiny_model("qwen2_moe"), records_routes=False) as engine:
            return await reply(engine, [5, 6, 7, 8], tokens=30)

    got = asyncio.run(run())
    assert got.last.routes is None
    expected = teacher_forced(tiny_model("qwen2_moe"), got.window)[4:]
    assert np.abs(expected - got.logprobs).max() < 1e-4


def test_attention_that_our_function_does_not_know_is_refused() -> None:
    with pytest.raises(ModelError):
        TorchEngine(model_from_config(GptOssConfig(**SHAPE, num_local_experts=2, head_dim=8), seed=0), EngineRecipe())


def test_a_family_without_attention_is_refused_by_name() -> None:
    config = RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, context_length=128)
    with pytest.raises(ModelError, match="rwkv"):
        TorchEngine(model_from_config(config, seed=0), EngineRecipe())
