"""The fast path computes what transformers' modules compute, from the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from engine_driver import ask, version
from etude.inference.contexts import ContextTable
from etude.inference.fast import supports
from etude.inference.forward import Forward, Work, layer_shapes, use_engine_attention
from etude.inference.kv import KVMemory
from etude.inference.requests import Sequence
from etude.models.load import Model, model_from_config
from tiny import FAMILIES, random_ids, tiny_config, tiny_model

PROMPTS = (90, 90, 3, 40)
"""The first two are siblings: the second reads the first one's beginning."""


def run_steps(model: Model, *, use_fast: bool) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """Logits of every step of a batch that prefills in pieces and decodes given tokens, and the routes."""
    use_engine_attention(model, max_context=model.max_context)
    memory = KVMemory(layer_shapes(model), slots=8, window=128, budget_tokens=1024, dtype=torch.float32)
    routes = np.zeros((0, model.num_moe_layers, model.top_k), np.uint8) if model.num_moe_layers else None
    table = ContextTable(memory, kv_reuse="context", routes=routes)
    forward = Forward(model, memory, use_fast=use_fast)
    sequences: list[Sequence] = []
    logits: list[torch.Tensor] = []

    def step(decode: list[Work], prefill: list[Work]) -> None:
        with torch.inference_mode():
            logits.append(forward.step(decode, prefill).clone())
        for work in (*decode, *prefill):
            assert work.sequence.context is not None
            work.sequence.context.computed += work.count

    for number, length in enumerate(PROMPTS):
        ids = random_ids(length, seed=0).numpy().astype(np.int32)
        sequence = Sequence(ask(ids, tokens=30), length + 30, sink=None)
        sequence.context = table.open(f"c{number}", ids, length + 30, version(0))
        assert sequence.context is not None
        if number == 1:
            assert sequence.context.base == 64
        step([Work(other, 1) for other in sequences], [Work(sequence, (sequence.pending + 1) // 2)])
        if sequence.pending:
            step([], [Work(sequence, sequence.pending)])
        table.publish(sequence.context, version(0))
        sequences.append(sequence)
        for other in sequences:
            other.append(int(random_ids(1, seed=len(logits))[0]), 0.0)
    return logits, [
        s.context.routes[: s.context.computed] for s in sequences if s.context and s.context.routes is not None
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_equals_plain(family: str) -> None:
    assert supports(tiny_model(family))
    fast, fast_routes = run_steps(tiny_model(family), use_fast=True)
    plain, plain_routes = run_steps(tiny_model(family), use_fast=False)
    for one, other in zip(fast, plain, strict=True):
        assert torch.allclose(one.log_softmax(-1), other.log_softmax(-1), atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(fast_routes, plain_routes, strict=True):
        assert np.array_equal(np.sort(ours), np.sort(theirs))


def test_a_mixture_without_renormalisation_and_with_dense_layers() -> None:
    changes = {"norm_topk_prob": False, "mlp_only_layers": [1]}
    fast, _ = run_steps(tiny_model("qwen3_moe", **changes), use_fast=True)
    plain, _ = run_steps(tiny_model("qwen3_moe", **changes), use_fast=False)
    for one, other in zip(fast, plain, strict=True):
        assert torch.allclose(one.log_softmax(-1), other.log_softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_swapped_in_reach_the_fast_path(family: str) -> None:
    model, other = tiny_model(family), tiny_model(family, seed=5)
    use_engine_attention(model, max_context=128)
    memory = KVMemory(layer_shapes(model), slots=1, window=128, budget_tokens=128, dtype=torch.float32)
    forward = Forward(model, memory)
    with torch.no_grad():  # also the norms, which start as ones
        for number, tensor in enumerate(other.hub_tensors().values()):
            tensor += 0.01 * (number % 7)
    model.assign(other.hub_tensors())
    forward.refresh()
    ids = random_ids(9).numpy().astype(np.int32)
    sequence = Sequence(ask(ids), 20, sink=None)
    routes = np.zeros((0, model.num_moe_layers, model.top_k), np.uint8) if model.num_moe_layers else None
    sequence.context = ContextTable(memory, kv_reuse="none", routes=routes).open("c", ids, 20, version(0))
    with torch.inference_mode():
        got = forward.step([], [Work(sequence, 9)])[0]
        expected = other.network(torch.from_numpy(ids).long()[None]).logits[0, -1]
    assert torch.allclose(got.log_softmax(-1), expected.log_softmax(-1), atol=1e-5, rtol=1e-5)


def test_what_it_does_not_know_it_does_not_support() -> None:
    assert not supports(tiny_model("llama", dtype="bfloat16"))
    assert not supports(tiny_model("llama", attention_bias=True))
    assert not supports(tiny_model("llama", hidden_act="gelu"))
    shape = tiny_config("llama")
    qwen2 = Qwen2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=shape.max_position_embeddings,
    )  # fmt: skip
    assert not supports(model_from_config(qwen2, seed=0))
