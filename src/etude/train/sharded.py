"""Weights in shards: FSDP2 over 1 to n ranks, and how to get from a shard to the whole and back.

    one rank    Whole      a tensor is its own shard
    n ranks     Sharded    each parameter is cut along its first dimension; a layer is gathered when it computes

Masters and optimizer state live in shards; what leaves (a version, a checkpoint) is whole, so that the number of ranks
may change between two starts. Source: PyTorch's `fully_shard` (FSDP2), per-parameter sharding by DTensor.

What it does not do: start processes (ranks.py), or make a model larger than one machine's memory load in pieces.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from etude.errors import ModelError
from etude.train.ranks import Ranks


class Shards(Protocol):
    """Between the whole of a tensor and what this rank holds of it."""

    ranks: Ranks

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or its gradient; shares its memory."""
        ...

    def whole(self, parameter: Tensor, part: Tensor) -> Tensor:
        """The whole, on every rank, of what is cut like `parameter`. All ranks call it in the same order."""
        ...

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of a whole."""
        ...

    def start(self, parameter: Tensor) -> int:
        """Elements of the whole, flat, that lie before this rank's part."""
        ...


class Whole:
    """One rank: nothing is cut."""

    def __init__(self) -> None:
        self.ranks = Ranks()

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def whole(self, parameter: Tensor, part: Tensor) -> Tensor:
        return part

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        return whole

    def start(self, parameter: Tensor) -> int:
        return 0


class Sharded:
    """Several ranks. Parameters are DTensors from `shard` on."""

    def __init__(self, ranks: Ranks) -> None:
        """Inside `torchrun`, or after `ranks.together`: the process group is there."""
        self.ranks = ranks
        self._mesh = init_device_mesh("cpu", (ranks.count,))

    def shard(self, objective: nn.Module, network: nn.Module) -> None:
        """Cut `network`'s layers one by one, the rest with `objective`, whose forward must be the only way in.

        Gradients are sums over ranks: the loss's denominator is global. Errors: ModelError for one without layers.
        """
        layers = getattr(network, "layers", None)
        if layers is None:
            raise ModelError(f"{type(network).__name__} cannot be sharded", cause="it has no list of layers")
        for module in (*layers, objective):
            fully_shard(module, mesh=self._mesh)
        for module in objective.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide on the way
                module.set_gradient_divide_factor(1.0)

    def local(self, tensor: Tensor) -> Tensor:
        return _dtensor(tensor.detach()).to_local()

    def whole(self, parameter: Tensor, part: Tensor) -> Tensor:
        like = _dtensor(parameter)
        cut = DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return cut.full_tensor()

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        parts = torch.chunk(whole, self.ranks.count, dim=0)
        return parts[self.ranks.rank].clone() if self.ranks.rank < len(parts) else whole[:0]

    def start(self, parameter: Tensor) -> int:
        rows = -(-parameter.shape[0] // self.ranks.count)  # as torch.chunk cuts
        return min(rows * self.ranks.rank, parameter.shape[0]) * (parameter.numel() // parameter.shape[0])


def _dtensor(tensor: Any) -> DTensor:
    assert isinstance(tensor, DTensor), "shard() comes first"
    return tensor
