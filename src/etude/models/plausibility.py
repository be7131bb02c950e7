"""The plausibility filter: a replayed expert that the trainer's own router would hardly rank is replaced.

Routes are recorded by older or coarser weights than those that train. Where the trainer's router has turned away from
an expert, forcing it makes the two forwards differ most: the tail of the mismatch. An expert e of the recorded set is
dropped if

    c_e < c_(k) - (1 - alpha) (c_(k) - b_e)

where c is what the router ranks by before any mask of groups (routers.py), c_(k) its k-th best in the router's own
order, and b_e the bias, 0 for softmax: alpha times the score that e itself would need. alpha = 0 never drops; alpha =
1, without groups, gives the router's own choice up to ties. The set is filled again from the router's own order. For
softmax the rule reads p_e < alpha p_(k). The same alpha bites softmax and sigmoid routers differently: sigmoids lie
close together.

Source: the Composer 2 report (section 6.2) names the filter and that its threshold derives from the router's top-k; the
formula is ours (docs/semantics.md, routes). Pure, float32; gradients do not pass through a choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.models.routers import Router, bias, in_groups, scores


@torch.no_grad()
def filtered(router: Router, logits: Tensor, forced: Tensor, own: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """(the set to use [T, k], which of `forced` were replaced [T, k] bool).

    logits [T, E]; forced and own [T, k]: the recorded set and the router's choice, each distinct in a row.
    """
    ranked, lift = scores(router, logits), bias(router)
    own_bias: Tensor | float = 0.0
    if lift is not None:
        ranked = ranked + lift
        own_bias = lift[forced]
    least = ranked.gather(-1, own).amin(dim=-1, keepdim=True)
    dropped = ranked.gather(-1, forced) < least - (1 - alpha) * (least - own_bias)
    if not bool(dropped.any()):
        return forced, dropped
    rows = dropped.any(dim=-1)
    result = forced.clone()
    result[rows] = _refilled(in_groups(router, ranked[rows]), forced[rows], dropped[rows])
    return result, dropped


def _refilled(order: Tensor, forced: Tensor, dropped: Tensor) -> Tensor:
    """`forced` with the dropped ones replaced by the best of `order` [T, E] that are not in the set."""
    kept = torch.zeros_like(order, dtype=torch.bool).scatter_(-1, forced, ~dropped)
    best = order.masked_fill(kept, -torch.inf).topk(forced.shape[-1], dim=-1).indices
    place = (dropped.long().cumsum(dim=-1) - 1).clamp_(min=0)
    return torch.where(dropped, best.gather(-1, place), forced)
