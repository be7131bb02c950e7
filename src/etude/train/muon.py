"""Muon for the nano's many small matrices, all of one shape in one batched product, beside AdamW for the rest.

Muon (Jordan et al. 2024): the momentum of each matrix is replaced by the nearest orthogonal one, by five Newton-Schulz
steps; the update is scaled to the root mean square that AdamW's has (Moonlight, arXiv 2502.16982, eq. 4). Experts,
which transformers stacks as [experts, out, in], are orthogonalized one by one.

What it does not do: shard, or keep 16-bit weights; reinforcement learning uses `train.optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Callable[[Tensor], Tensor], Sequence[Tensor]], Iterable[Tensor]]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_RMS = 0.2


@torch.no_grad()
def orthogonalize(matrices: Tensor) -> Tensor:
    """[N, rows, columns] -> the same shape, singular values near 1 (0.7 to 1.2)."""
    a, b, c = _COEFFICIENTS
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """For parameters of two or three dimensions. `lr` is comparable to AdamW's."""

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None, *, spread: Map = map) -> None:  # type: ignore[override]
        """`spread` may be that of `train.ranks`: the matrices are then orthogonalized on several cores."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                direction = param.grad.lerp(state["momentum"], group["momentum"])
                rows, columns = param.shape[-2:]
                by_shape.setdefault((rows, columns), []).append((param, direction.view(-1, rows, columns)))
            for (rows, columns), pairs in by_shape.items():
                stack = torch.cat([direction for _, direction in pairs])
                updates = torch.cat(list(spread(orthogonalize, stack.chunk(4))))
                scale = group["lr"] * _RMS * max(rows, columns) ** 0.5
                sizes = [len(direction) for _, direction in pairs]
                for (param, _), update in zip(pairs, updates.split(sizes), strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.add_(update.view_as(param), alpha=-scale)
