"""The plausibility filter against its definition, expert by expert, and its two ends: never, and the own choice."""

from __future__ import annotations

import pytest
import torch

from etude.models.plausibility import filtered
from etude.models.routers import Router, SigmoidRouter, bias, in_groups, routers, scores
from etude.models.routing import RouteTally, capture, replay
from tiny import MIXTURES, random_ids, tiny_model

TOKENS, EXPERTS, CHOSEN = 400, 8, 3


def router_of(family: str, *, groups: int = 1) -> Router:
    grouped = {"n_routed_experts": EXPERTS, "n_group": groups, "topk_group": max(1, groups // 2)}
    named = {"mixtral": "num_local_experts"}.get(family, "num_experts")
    changes = grouped if family in ("deepseek_v3", "glm4_moe", "kimi_k25") else {named: EXPERTS}
    router = routers(tiny_model(family, **changes, num_experts_per_tok=CHOSEN))[0]
    if (lift := bias(router)) is not None:
        lift.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    return router


def drawn(router: Router) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, random recorded sets, and the router's own."""
    draw = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(TOKENS, EXPERTS, generator=draw)
    forced = torch.rand(TOKENS, EXPERTS, generator=draw).topk(CHOSEN).indices
    ranked = scores(router, logits) + (0 if bias(router) is None else bias(router))
    return logits, forced, in_groups(router, ranked).topk(CHOSEN).indices


def by_definition(router: Router, logits: torch.Tensor, forced: list[int], own: list[int], alpha: float) -> set[int]:
    """One token's set, in plain Python."""
    lift = bias(router)
    biases = [0.0] * EXPERTS if lift is None else lift.tolist()
    plain = logits.sigmoid() if isinstance(router, SigmoidRouter) else logits.softmax(-1)
    ranked = [value + biases[expert] for expert, value in enumerate(plain.tolist())]
    least = min(ranked[expert] for expert in own)
    kept = {e for e in forced if not ranked[e] < least - (1 - alpha) * (least - biases[e])}
    order = in_groups(router, torch.tensor([ranked]))[0].argsort(descending=True).tolist()
    return kept | set([expert for expert in order if expert not in kept][: CHOSEN - len(kept)])


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("family", "groups"), [(name, 1) for name in MIXTURES] + [("deepseek_v3", 4), ("glm4_moe", 2)])
def test_each_token_gets_the_set_of_the_definition(family: str, groups: int, alpha: float) -> None:
    router = router_of(family, groups=groups)
    logits, forced, own = drawn(router)
    result, dropped = filtered(router, logits, forced, own, alpha)
    for token in range(TOKENS):
        wanted = by_definition(router, logits[token], forced[token].tolist(), own[token].tolist(), alpha)
        assert set(result[token].tolist()) == wanted, (token, logits[token])
        assert len(set(result[token].tolist())) == CHOSEN
    assert torch.equal(result[~dropped], forced[~dropped])


@pytest.mark.parametrize("family", MIXTURES)
def test_alpha_0_never_drops_and_alpha_1_gives_the_own_choice(family: str) -> None:
    router = router_of(family)
    logits, forced, own = drawn(router)
    same, dropped = filtered(router, logits, forced, own, 0.0)
    assert torch.equal(same, forced)
    assert not dropped.any()
    result, dropped = filtered(router, logits, forced, own, 1.0)
    assert dropped.float().mean() > 0.3
    assert torch.equal(result.sort().values, own.sort().values)


def test_for_softmax_the_rule_is_a_share_of_the_kth_probability() -> None:
    router = router_of("qwen3_moe")
    logits, forced, own = drawn(router)
    probabilities = logits.softmax(-1)
    least = probabilities.gather(-1, own).amin(-1, keepdim=True)
    _, dropped = filtered(router, logits, forced, own, 0.4)
    assert torch.equal(dropped, probabilities.gather(-1, forced) < 0.4 * least)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_replay_filters_and_counts(family: str) -> None:
    model, ids = tiny_model(family), random_ids(30)[None]
    with torch.no_grad(), capture(model) as routes:
        model.network(ids, use_cache=False)
    own = routes.experts()
    forced, valid = (own + 1) % model.num_experts, torch.arange(30) < 20
    tally = RouteTally()
    with (
        torch.no_grad(),
        replay(model, forced, valid, plausibility=1.0, tally=tally),
        capture(model) as filtered_routes,
    ):
        model.network(ids, use_cache=False)
    used = filtered_routes.experts()
    assert torch.equal(used[:, 0].sort().values, own[:, 0].sort().values)  # the first layer's router saw the same input
    assert 0.3 < tally.row()["replaced_share"] < 1
    assert tally.row()["route_overlap"] == pytest.approx(1 - tally.row()["replaced_share"])
    assert tally.counts[0] == 20 * model.num_moe_layers * model.top_k
