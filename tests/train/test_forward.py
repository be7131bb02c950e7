from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, MistralConfig

from etude.data.packing import MicroBatch, Tree, pack
from etude.errors import ModelError
from etude.models.load import Model, model_from_config
from etude.models.routing import replay
from etude.train import fast as fast_module
from etude.train import forward as module
from etude.train.forward import PackedForward, blocks
from etude.types import Batch
from tiny import ALL, COMMON, FAMILIES, tiny_model
from train.batches import make_batch


def plain_gradient(model: Model, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradient with one plain forward a sample: nothing shared, nothing packed."""
    total = torch.zeros(())
    for sample in batch.samples:
        ids = torch.from_numpy(sample.ids.astype(np.int64))
        if sample.routes is not None:
            experts = torch.from_numpy(sample.routes.experts.astype(np.int64))
            with replay(model, experts, torch.from_numpy(sample.routes.valid)):
                logits = model.network(input_ids=ids[None, :-1]).logits[0]
        else:
            logits = model.network(input_ids=ids[None, :-1]).logits[0]
        logs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        total = total - sample.advantage * logs[torch.from_numpy(sample.mask[1:])].sum() / batch.denominator
    network = model.network.requires_grad_(True)
    names, parameters = zip(*network.named_parameters(), strict=True)
    return total.detach(), dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


def packed_gradient(
    model: Model, micros: tuple[MicroBatch, ...], denominator: float, *, fast: bool = True
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    forward = PackedForward(model, fast=fast)
    assert (forward._fast is not None) == fast
    total = torch.zeros(())
    for micro in micros:
        logs = torch.log_softmax(forward(micro) @ forward.head.T, -1)
        chosen = logs.gather(-1, torch.from_numpy(micro.targets)[:, None])[:, 0]
        total = total - (chosen * torch.from_numpy(micro.advantages)).sum() / denominator
    network = model.network.requires_grad_(True)
    names, parameters = zip(*network.named_parameters(), strict=True)
    return total.detach(), dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


@pytest.mark.parametrize(("query_block", "chunk_rows"), [(128, 512), (3, 2)])
@pytest.mark.parametrize(
    ("family", "fast"), [(family, fast) for family in ALL for fast in (True, False) if family in FAMILIES or not fast]
)
def test_a_packed_and_shared_forward_gives_the_gradient_of_separate_rows(
    family: str, fast: bool, query_block: int, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUERY_BLOCK", query_block)
    monkeypatch.setattr(fast_module, "CHUNK_ROWS", chunk_rows)
    model = tiny_model(family)
    batch = make_batch(model, 1)
    found = pack(batch.samples, max_cost=40, pair_cost=0.005)
    assert len(found.micro_batches) > 1
    assert found.tokens < found.unshared_tokens
    wanted_loss, wanted = plain_gradient(model, batch)
    loss, gradient = packed_gradient(model, found.micro_batches, batch.denominator, fast=fast)
    torch.testing.assert_close(loss, wanted_loss, atol=1e-5, rtol=1e-5)
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, expected in wanted.items():
        assert float((gradient[name] - expected).abs().max()) < 1e-5 * scale, name


def test_replayed_routes_matter_and_gradients_reach_the_router() -> None:
    model = tiny_model("qwen3_moe")
    batch = make_batch(model, 1)
    for sample in batch.samples:
        assert sample.routes is not None
        sample.routes.experts[:] = (sample.routes.experts + 1) % model.num_experts
    wanted_loss, wanted = plain_gradient(model, batch)
    micros = pack(batch.samples, max_cost=1e9, pair_cost=0).micro_batches
    loss, gradient = packed_gradient(model, micros, batch.denominator)
    torch.testing.assert_close(loss, wanted_loss, atol=1e-5, rtol=1e-5)
    router = next(name for name in gradient if name.endswith("gate.weight"))
    assert float(gradient[router].abs().max()) > 0
    torch.testing.assert_close(gradient[router], wanted[router], atol=1e-5, rtol=1e-3)
    own = tuple(
        m for m in pack(make_batch(tiny_model("qwen3_moe"), 1).samples, max_cost=1e9, pair_cost=0).micro_batches
    )
    assert abs(float(packed_gradient(tiny_model("qwen3_moe"), own, batch.denominator)[0] - loss)) > 1e-3


def test_splitting_an_episode_into_contexts_with_the_same_prefixes_leaves_the_gradient() -> None:
    import msgspec

    model = tiny_model("qwen3")
    batch = make_batch(model, 1, groups=2, size=2)
    split = []
    for sample in batch.samples:
        places = np.flatnonzero(sample.mask)
        for context, half in enumerate((places[: len(places) // 2], places[len(places) // 2 :])):
            mask = np.zeros_like(sample.mask)
            mask[half] = True
            if len(half):
                split.append(
                    msgspec.structs.replace(
                        sample, mask=mask, origin=msgspec.structs.replace(sample.origin, context=context)
                    )
                )
    assert len(split) > len(batch.samples)
    _, whole = packed_gradient(model, pack(batch.samples, max_cost=1e9, pair_cost=0).micro_batches, batch.denominator)
    _, parts = packed_gradient(
        tiny_model("qwen3"), pack(split, max_cost=1e9, pair_cost=0).micro_batches, batch.denominator
    )
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=2e-6, rtol=1e-4)


def test_blocks_cover_each_query_once_and_see_only_their_own_past() -> None:
    tree = Tree(10, 5, (3, 0, 4))
    found = blocks([tree])
    assert [query for block in found for query in range(block.start, block.end)] == list(range(10, 22))
    last = found[-1]
    assert (last.prefix_start, last.prefix_end, last.own_start) == (10, 15, 18)


def test_a_family_that_bends_attention_or_logits_is_refused_by_name() -> None:
    common = {**COMMON, "head_dim": 8}
    with pytest.raises(ModelError, match=r"softcap|sliding_window"):
        PackedForward(model_from_config(Gemma2Config(**common), seed=0))
    with pytest.raises(ModelError, match="sliding_window"):
        PackedForward(model_from_config(MistralConfig(**common, sliding_window=16), seed=0))


def test_routes_of_another_model_are_refused() -> None:
    model = tiny_model("qwen3_moe")
    (micro,) = pack(make_batch(model, 1, groups=1).samples, max_cost=1e9, pair_cost=0).micro_batches
    forward = PackedForward(tiny_model("qwen3_moe", num_hidden_layers=2))
    with pytest.raises(ModelError, match="routes do not fit"):
        forward(micro)


def balance_by_hand(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Switch Transformers, eq. 4, over top-k choices, from what transformers' routers say."""
    output = model.network(input_ids=ids[None], output_router_logits=True)
    losses = []
    for logits in output.router_logits:
        probs = torch.softmax(logits, -1)
        loads = probs.topk(model.top_k, -1).indices.reshape(-1).bincount(minlength=probs.shape[1])
        losses.append(probs.shape[1] * (probs.mean(0) * loads / loads.sum()).sum())
    return torch.stack(losses).mean()


def test_the_balance_loss_and_its_gradient() -> None:
    model = tiny_model("qwen3_moe")
    network = model.network.requires_grad_(True)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, size=11)
    _, balance = PackedForward(model).hidden(ids, np.arange(11), (Tree(0, 0, (11,)),), np.array([10]))
    wanted = balance_by_hand(model, torch.from_numpy(ids))
    torch.testing.assert_close(balance, wanted)
    params = [param for param in network.parameters() if param.requires_grad]
    for mine, plain in zip(
        torch.autograd.grad(balance, params, allow_unused=True, materialize_grads=True),
        torch.autograd.grad(wanted, params, allow_unused=True, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_even_routing_has_a_balance_loss_of_one() -> None:
    model = tiny_model("qwen3_moe")
    for name, param in model.network.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.zeros_(param)
    _, balance = PackedForward(model).hidden(np.zeros(8, np.int64), np.arange(8), (Tree(0, 0, (8,)),), np.array([7]))
    assert balance.item() == pytest.approx(1.0)
