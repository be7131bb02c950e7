"""Which experts a forward chose, and making another forward choose the same.

The engine captures routes while it samples; the trainer replays them, so that both compute the same function
(docs/semantics.md, routes). A replayed router keeps its own logits: gate values follow the family's formula on the
forced set, so gradients reach the router.

Supported: Qwen3-MoE, and DeepSeek-V3 with what maps to it (Kimi-K2, Kimi-K2.5). Another mixture of experts is
refused by name; a dense model has no routes.

What it does not do: repair implausible routes, or decide which positions are trusted (`valid` says).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from etude.errors import ModelError
from etude.models.hub import moe_layers
from etude.models.load import Model

Router = Qwen3MoeTopKRouter | DeepseekV3TopkRouter
RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(logits [tokens, experts], gate values [tokens, top_k], chosen [tokens, top_k])."""


def routers(model: Model) -> list[Router]:
    """The routers in order of depth; empty for a dense model. Errors: ModelError for an unsupported family."""
    found: list[Router] = []
    for name in moe_layers(model.network):
        block = model.network.get_submodule(name)
        router = getattr(block, "gate", None)
        if not isinstance(router, Router):
            raise ModelError(
                f"routes of {model.family!r} models are not supported",
                cause=f"{name} routes with {type(router).__name__}",
                hint="use a Qwen3-MoE, DeepSeek-V3 or dense model (docs/support.md lists the families)",
            )
        found.append(router)
    return found


def gate_values(router: Router, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What the family's formula gives for a set of experts.

    logits: [tokens, experts]; chosen and the result: [tokens, top_k]. As in transformers: Qwen3-MoE takes a softmax
    over all experts in fp32, DeepSeek-V3 a sigmoid of each (the correction bias only chooses); both are renormalised
    over the set if `norm_topk_prob`, and DeepSeek-V3 scales the result.
    """
    if isinstance(router, DeepseekV3TopkRouter):
        values = logits.sigmoid().gather(-1, chosen)
        if router.norm_topk_prob:
            values = values / (values.sum(dim=-1, keepdim=True) + 1e-20)
        return values * router.routed_scaling_factor
    values = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    if router.norm_topk_prob:
        values = values / values.sum(dim=-1, keepdim=True)
    return values.to(logits.dtype)


class Captured:
    """The chosen experts of each forward since `capture` began."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def add(self, layer: int, chosen: torch.Tensor) -> None:
        self._layers[layer].append(chosen.detach())

    def __len__(self) -> int:
        """Number of forwards."""
        return len(self._layers[0]) if self._layers else 0

    def experts(self, forward: int = -1) -> torch.Tensor:
        """[tokens, moe_layers, top_k] of one forward, int64; tokens in the order of the flattened input."""
        return torch.stack([chosen[forward] for chosen in self._layers], dim=1)


@contextmanager
def capture(model: Model) -> Iterator[Captured]:
    """Collect the experts that every forward inside the block chooses; inside `replay`, those that were forced.

    Errors: ModelError for an unsupported family.
    """
    found = routers(model)
    captured = Captured(len(found))
    handles = []
    for layer, router in enumerate(found):

        def hook(_: nn.Module, __: object, output: RouterOutput, layer: int = layer) -> None:
            captured.add(layer, output[2])

        handles.append(router.register_forward_hook(hook))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay(model: Model, experts: torch.Tensor, valid: torch.Tensor) -> Iterator[None]:
    """Force the experts of every forward inside the block.

    experts: [tokens, moe_layers, top_k], distinct along top_k where valid; tokens in the order of the flattened input.
    valid: [tokens] bool; elsewhere the router's own choice stands.
    Errors: ModelError for an unsupported family, a shape that is not the model's, or an unknown or repeated expert.
    """
    found = routers(model)
    valid = valid.bool()
    experts = checked_routes(model, experts, valid)
    handles = []
    for layer, router in enumerate(found):

        def hook(
            router: nn.Module, __: object, output: RouterOutput, forced: torch.Tensor = experts[:, layer]
        ) -> RouterOutput:
            logits, _, own = output
            if len(forced) != len(own):
                raise ModelError("the routes do not fit the input", cause=f"{len(forced)} rows for {len(own)} tokens")
            chosen = torch.where(valid[:, None], forced, own)
            assert isinstance(router, Router)
            return logits, gate_values(router, logits, chosen), chosen

        handles.append(router.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def checked_routes(model: Model, experts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`experts` as int64 with rows that are not valid set to 0. Errors: ModelError."""
    expected = (len(valid), model.num_moe_layers, model.top_k)
    if valid.dim() != 1 or tuple(experts.shape) != expected:
        raise ModelError("the routes do not fit the model", cause=f"shape {tuple(experts.shape)}, expected {expected}")
    experts = torch.where(valid[:, None, None], experts.long(), 0)
    if experts.numel() and (int(experts.min()) < 0 or int(experts.max()) >= model.num_experts):
        raise ModelError("the routes name an unknown expert", cause=f"the model has {model.num_experts}")
    ordered = experts.sort(dim=-1).values
    if model.top_k > 1 and bool(((ordered[..., 1:] == ordered[..., :-1]).any(-1).any(-1) & valid).any()):
        raise ModelError("the routes choose one expert twice for a token")
    return experts
