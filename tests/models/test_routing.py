"""Capture and replay: forcing what was chosen changes nothing; forcing something else follows the family's formula."""

from __future__ import annotations

import pytest
import torch

from etude.errors import ModelError
from etude.models.load import Model
from etude.models.routers import gate_values, in_groups, routers, scores
from etude.models.routing import RouteTally, capture, replay
from tiny import MIXTURES, random_ids, tiny_model

TOKENS = 11


def forward(model: Model, ids: torch.Tensor) -> torch.Tensor:
    return model.network(ids[None], use_cache=False).logits[0]


@pytest.fixture(params=MIXTURES)
def model(request: pytest.FixtureRequest) -> Model:
    return tiny_model(request.param)


@pytest.fixture
def ids() -> torch.Tensor:
    return random_ids(TOKENS)


def other_experts(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """A legal choice that differs from the router's own everywhere."""
    with torch.no_grad(), capture(model) as routes:
        forward(model, ids)
    return (routes.experts() + 1) % model.num_experts


def test_captured_routes_are_the_top_k_of_the_router(model: Model, ids: torch.Tensor) -> None:
    logits: list[torch.Tensor] = []
    handle = routers(model)[1].register_forward_hook(lambda _, __, output: logits.append(output[0]))
    with torch.no_grad(), capture(model) as routes:
        forward(model, ids)
    handle.remove()
    assert routes.experts().shape == (TOKENS, model.num_moe_layers, 2)
    own = logits[0].topk(2).indices  # the correction bias of DeepSeek-V3 is 0 here, and there is one group
    assert torch.equal(routes.experts()[:, 1].sort().values, own.sort().values)


def test_each_forward_is_captured_apart(model: Model, ids: torch.Tensor) -> None:
    with torch.no_grad(), capture(model) as routes:
        forward(model, ids)
        forward(model, ids[:4])
    assert len(routes) == 2
    assert torch.equal(routes.experts(0)[:4], routes.experts(1))


def test_replaying_the_own_choice_changes_nothing(model: Model, ids: torch.Tensor) -> None:
    with torch.no_grad(), capture(model) as routes:
        plain = forward(model, ids)
    with torch.no_grad(), replay(model, routes.experts(), torch.ones(TOKENS, dtype=torch.bool)):
        replayed = forward(model, ids)
    assert (plain - replayed).abs().max() < 1e-5


def test_a_forced_set_is_what_the_experts_see(model: Model, ids: torch.Tensor) -> None:
    forced = other_experts(model, ids)
    valid = torch.ones(TOKENS, dtype=torch.bool)
    with torch.no_grad(), replay(model, forced, valid), capture(model) as routes:
        changed = forward(model, ids)
    assert torch.equal(routes.experts(), forced)
    with torch.no_grad():
        assert (forward(model, ids) - changed).abs().max() > 1e-3


@pytest.mark.parametrize("family", MIXTURES)
def test_gate_values_of_the_own_choice_are_the_networks_own(family: str, ids: torch.Tensor) -> None:
    model = tiny_model(family)
    seen: list[tuple[torch.Tensor, ...]] = []
    handle = routers(model)[-1].register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        forward(model, ids)
    handle.remove()
    logits, values, chosen = seen[0]
    assert torch.allclose(gate_values(routers(model)[-1], logits, chosen), values, atol=1e-7)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_own_order_is_the_routers_with_bias_and_groups(family: str, ids: torch.Tensor) -> None:
    model = tiny_model(family, n_routed_experts=8, n_group=4, topk_group=2)
    router = routers(model)[0]
    router.e_score_correction_bias.copy_(torch.linspace(-1, 1, 8))
    seen: list[tuple[torch.Tensor, ...]] = []
    handle = router.register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        forward(model, ids)
    handle.remove()
    logits, _, chosen = seen[0]
    order = in_groups(router, scores(router, logits) + router.e_score_correction_bias)
    assert int(order.isinf().sum()) == TOKENS * 4
    assert torch.equal(order.topk(2).indices.sort().values, chosen.sort().values)


def test_a_tally_counts_what_was_replayed_and_what_the_router_would_have_chosen(ids: torch.Tensor) -> None:
    model = tiny_model("qwen3_moe")
    with torch.no_grad(), capture(model) as routes:
        forward(model, ids)
    forced = routes.experts().clone()
    for token in range(3):  # one of two experts is another: overlap 1/2 there, in the first layer
        absent = [expert for expert in range(4) if expert not in forced[token, 0].tolist()]
        forced[token, 0, 0] = absent[0]
    tally, valid = RouteTally(), torch.arange(TOKENS) < 6
    with torch.no_grad(), replay(model, forced, valid, tally=tally):
        forward(model, ids)
    recorded, shared, replaced = tally.counts.tolist()
    assert recorded == 6 * model.num_moe_layers * 2
    assert replaced == 0
    assert shared <= recorded - 3
    assert tally.row()["route_overlap"] == pytest.approx(shared / recorded)
    assert RouteTally().row() == {}


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_gate_values_follow_the_family_formula_on_the_forced_set(ids: torch.Tensor, norm_topk_prob: bool) -> None:
    model = tiny_model("qwen3_moe", norm_topk_prob=norm_topk_prob)
    forced = other_experts(model, ids)
    seen: list[tuple[torch.Tensor, ...]] = []
    with torch.no_grad(), replay(model, forced, torch.ones(TOKENS, dtype=torch.bool)):
        handle = routers(model)[0].register_forward_hook(lambda _, __, output: seen.append(output))
        forward(model, ids)
        handle.remove()
    logits, values, chosen = seen[0]
    probabilities = logits.softmax(-1)
    for token in range(TOKENS):
        expected = torch.stack([probabilities[token, expert] for expert in chosen[token]])
        if norm_topk_prob:
            expected = expected / expected.sum()
        assert torch.allclose(values[token], expected, atol=1e-6)


def test_rows_that_are_not_valid_use_the_own_choice(model: Model, ids: torch.Tensor) -> None:
    forced = torch.full((TOKENS, model.num_moe_layers, 2), -1)
    forced[:4] = other_experts(model, ids)[:4]
    valid = torch.arange(TOKENS) < 4
    with torch.no_grad(), replay(model, forced, valid), capture(model) as routes:
        forward(model, ids)
    assert torch.equal(routes.experts()[:4], forced[:4])
    assert (routes.experts()[4:] >= 0).all()
    with torch.no_grad(), replay(model, forced, torch.zeros(TOKENS, dtype=torch.bool)):
        assert torch.equal(forward(model, ids), forward(model, ids))


def test_gradients_reach_the_router_through_a_replay(model: Model, ids: torch.Tensor) -> None:
    with replay(model, other_experts(model, ids), torch.ones(TOKENS, dtype=torch.bool)):
        forward(model, ids).square().sum().backward()
    for router in routers(model):
        assert router.weight.grad is not None
        assert router.weight.grad.abs().max() > 0


def test_hooks_are_gone_after_the_block(model: Model, ids: torch.Tensor) -> None:
    with torch.no_grad():
        plain = forward(model, ids)
        with replay(model, other_experts(model, ids), torch.ones(TOKENS, dtype=torch.bool)), capture(model) as routes:
            forward(model, ids)
        assert torch.equal(forward(model, ids), plain)
    assert len(routes) == 1


@pytest.mark.parametrize("damage", ["shape", "range", "twice", "rows"])
def test_routes_that_do_not_fit_are_refused(model: Model, ids: torch.Tensor, damage: str) -> None:
    experts, valid = other_experts(model, ids), torch.ones(TOKENS, dtype=torch.bool)
    if damage == "shape":
        experts = experts[:, :1]
    elif damage == "range":
        experts[3, 0, 0] = model.num_experts
    elif damage == "twice":
        experts[3, 0] = 1
    else:
        experts, valid = experts[:-1], valid[:-1]
    with pytest.raises(ModelError, match="routes"), replay(model, experts, valid):
        forward(model, ids)


def test_another_mixture_is_refused_by_name(ids: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="qwen2_moe"), capture(tiny_model("qwen2_moe")):
        pass


def test_a_dense_model_has_no_routes(ids: torch.Tensor) -> None:
    model = tiny_model("qwen3")
    with torch.no_grad(), capture(model) as routes:
        forward(model, ids)
    assert len(routes) == 0
