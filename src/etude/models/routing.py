"""Which experts a forward chose, and making another forward choose the same.

The engine captures routes while it samples; the trainer replays them, so that both compute the same function
(docs/semantics.md, routes). A replayed router keeps its own logits: gate values follow the family's formula on the
forced set (routers.py), so gradients reach the router. Experts of the set that the router would hardly rank itself can
be replaced (plausibility.py). How much was is counted in a RouteTally.

Supported: the families of routers.py. Another mixture of experts is refused by name; a dense model has no routes.
What it does not do: decide which positions are trusted (`valid` says).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from etude.errors import ModelError
from etude.models.load import Model
from etude.models.plausibility import filtered
from etude.models.routers import Router, gate_values, routers

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(logits [tokens, experts], gate values [tokens, top_k], chosen [tokens, top_k])."""


class RouteTally:
    """What replays did, summed over tokens and layers. `counts` [3] float64: recorded choices, those of them that the
    router would have made itself, those that were replaced as implausible."""

    def __init__(self) -> None:
        self.counts = torch.zeros(3, dtype=torch.float64)

    def add(self, forced: torch.Tensor, own: torch.Tensor, valid: torch.Tensor, dropped: torch.Tensor | None) -> None:
        """forced, own, dropped [tokens, top_k]; valid [tokens]."""
        forced, own = forced[valid], own[valid]
        shared = sum((forced == own[:, place, None]).sum() for place in range(own.shape[1]))
        self.counts[0] += forced.numel()
        self.counts[1] += shared
        if dropped is not None:
            self.counts[2] += dropped[valid].sum()

    def row(self) -> dict[str, float]:
        """Shares of the recorded choices; empty if there were none."""
        recorded, shared, replaced = self.counts.tolist()
        if not recorded:
            return {}
        return {"route_overlap": shared / recorded, "replaced_share": replaced / recorded}


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
def replay(
    model: Model,
    experts: torch.Tensor,
    valid: torch.Tensor,
    *,
    plausibility: float = 0.0,
    tally: RouteTally | None = None,
) -> Iterator[None]:
    """Force the experts of every forward inside the block.

    experts: [tokens, moe_layers, top_k], distinct along top_k where valid; tokens in the order of the flattened input.
    valid: [tokens] bool; elsewhere the router's own choice stands. plausibility: alpha of the filter, 0 for none.
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
            assert isinstance(router, Router)
            chosen = replayed(router, logits, own, forced, valid, plausibility, tally)
            return logits, gate_values(router, logits, chosen), chosen

        handles.append(router.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def replayed(
    router: Router,
    logits: torch.Tensor,
    own: torch.Tensor,
    forced: torch.Tensor,
    valid: torch.Tensor,
    plausibility: float,
    tally: RouteTally | None,
) -> torch.Tensor:
    """The set that one layer uses, [tokens, top_k]. Arguments as in `replay` and `plausibility.filtered`."""
    chosen, dropped = torch.where(valid[:, None], forced, own), None
    if plausibility:
        chosen, dropped = filtered(router, logits, chosen, own, plausibility)
    if tally is not None:
        tally.add(forced, own, valid, dropped)
    return chosen


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
