"""How each family's router ranks and weighs its experts, as formulas on its logits.

    softmax    Qwen3-MoE, Mixtral, OLMoE         c_e = p_e;             gates: p over the set
    sigmoid    DeepSeek-V3, Kimi-K2, GLM-4-MoE   c_e = s(z_e) + b_e;    gates: s(z) over the set, without the bias

c_e is what a router ranks by. A sigmoid router then masks all but its best groups of experts; its bias only chooses,
and stays as it is in reinforcement learning. Gates are renormalised over the set where the family does so, and scaled.
The same formulas as in transformers, of which a test compares every one. What it does not do: hooks (routing.py).

Shapes: T tokens, E experts, k = top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from etude.errors import ModelError
from etude.models.hub import moe_layers
from etude.models.load import Model

SigmoidRouter = DeepseekV3TopkRouter | Glm4MoeTopkRouter
SoftmaxRouter = Qwen3MoeTopKRouter | MixtralTopKRouter | OlmoeTopKRouter
Router = SoftmaxRouter | SigmoidRouter


def routers(model: Model) -> list[Router]:
    """The routers in order of depth; empty for a dense model. Errors: ModelError for an unsupported family."""
    found: list[Router] = []
    for name in moe_layers(model.network):
        router = getattr(model.network.get_submodule(name), "gate", None)
        if not isinstance(router, Router):
            raise ModelError(
                f"routes of {model.family!r} models are not supported",
                cause=f"{name} routes with {type(router).__name__}",
                hint="set rl.replay = false, or use a family of docs/support.md",
            )
        found.append(router)
    return found


def scores(router: Router, logits: Tensor) -> Tensor:
    """[T, E] float32: softmax probabilities, or sigmoids without the bias. logits [T, E]."""
    if isinstance(router, SigmoidRouter):
        return logits.float().sigmoid()
    return torch.softmax(logits, dim=-1, dtype=torch.float32)


def bias(router: Router) -> Tensor | None:
    """[E], added to the scores for the choice; None for a softmax router."""
    return router.e_score_correction_bias if isinstance(router, SigmoidRouter) else None


def in_groups(router: Router, ranked: Tensor) -> Tensor:
    """`ranked` [T, E] with -inf at the experts of groups that the router would not choose from."""
    if not isinstance(router, SigmoidRouter) or router.num_group == router.topk_group:
        return ranked
    groups = ranked.view(len(ranked), int(router.num_group or 1), -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(int(router.topk_group or 1), dim=-1).indices
    outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, False)
    return groups.masked_fill(outside[..., None], -torch.inf).view(ranked.shape)


def gate_values(router: Router, logits: Tensor, chosen: Tensor) -> Tensor:
    """[T, k]: what the family's formula gives for a set of experts. logits [T, E]; chosen [T, k], distinct in a row."""
    values = scores(router, logits).gather(-1, chosen)
    if isinstance(router, SigmoidRouter):
        if router.norm_topk_prob:
            values = values / (values.sum(dim=-1, keepdim=True) + 1e-20)
        return values * router.routed_scaling_factor
    if getattr(router, "norm_topk_prob", True):  # Mixtral always does
        values = values / values.sum(dim=-1, keepdim=True)
    return values if isinstance(router, MixtralTopKRouter) else values.to(logits.dtype)
