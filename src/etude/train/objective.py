"""The network and what is computed from its hidden states, as one module: the only way in, so that FSDP2 can wrap it.

What it does not do: know the loss (step.py gives it), or shard (sharded.py).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from etude.data.packing import MicroBatch
from etude.models.load import Model
from etude.models.routing import RouteTally
from etude.train.forward import PackedForward, Routing

Head = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(hidden [targets, width], output matrix [vocabulary, width]) -> tensors."""


class Objective(nn.Module):
    """Calls a function of hidden states and output matrix while both are whole."""

    def __init__(self, model: Model, *, fast: bool = True, routing: Routing | None = None) -> None:
        """Errors: ModelError for a model that cannot be trained."""
        super().__init__()
        self.network = model.network
        self._packed = PackedForward(model, fast=fast, routing=routing)
        self.routes: RouteTally = self._packed.routes

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return int(self._packed.head.shape[1])

    def forward(self, micro: MicroBatch, head: Head) -> tuple[Tensor, ...]:
        hidden = self._packed(micro)
        return head(hidden, self._packed.head)
