"""Hub layout <-> module layout: the names and shapes under which a version is published.

transformers fuses the experts of a layer into two 3-D parameters; the hub checkpoint holds three matrices an expert.
Everything that leaves a network (published weights, exports) goes by hub names, and every hub tensor is a view of the
network's own memory, so that reading needs no copy and writing changes the network in place.

What it does not do: read files (`load`), convert values (quantized checkpoints are refused), or guess: a family whose
conversion is not the one below is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from etude.errors import ModelError

_FUSED = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


@dataclass(frozen=True, slots=True)
class _Names:
    """What a family's hub checkpoint calls a block of experts and the three matrices of each."""

    block: str = ".mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


_NAMES = {"mixtral": _Names(block=".block_sparse_moe.", gate="w1", up="w3", down="w2")}
"""By model_type; others use the names that transformers has in memory."""


def hub_views(network: PreTrainedModel, prefix: str = "") -> dict[str, torch.Tensor]:
    """Hub name -> view of the network's memory, in the order of the network's own state.

    prefix: what the names begin with, where the network is one part of its checkpoint.
    Tied weights appear once, under the name of the tensor that the others follow. Non-persistent buffers are no part of
    a version. Errors: ModelError for a family whose hub layout is not known here.
    """
    names = _NAMES.get(network.config.model_type, _Names())
    views: dict[str, torch.Tensor] = {}
    for inside, tensor in _owned_state(network).items():
        fused, name = _FUSED.match(inside), inside.replace(".mlp.", names.block)
        if fused is None:
            views[name] = tensor
            continue
        experts = fused["experts"].replace(".mlp.", names.block)
        for expert, matrix in enumerate(tensor):
            if fused["kind"] == "down_proj":
                views[f"{experts}.{expert}.{names.down}.weight"] = matrix
            else:
                gate, up = matrix.chunk(2, dim=0)
                views[f"{experts}.{expert}.{names.gate}.weight"] = gate
                views[f"{experts}.{expert}.{names.up}.weight"] = up
    _check_against_transformers(network, views, prefix)
    return {prefix + name: view for name, view in views.items()}


def _owned_state(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers without the followers of tied weights, detached, sharing memory."""
    followers = getattr(network, "all_tied_weights_keys", None) or {}
    return {name: tensor.detach() for name, tensor in network.state_dict().items() if name not in followers}


def _check_against_transformers(network: PreTrainedModel, views: dict[str, torch.Tensor], prefix: str) -> None:
    """transformers knows how it would save this family; on the meta device that costs nothing to ask.

    A part remembers its prefix if it was loaded, and has none if it is new.
    """
    hollow = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in _owned_state(network).items()
    }
    reverted = revert_weight_conversion(network, hollow)
    saved = {name.removeprefix(prefix): tuple(tensor.shape) for name, tensor in reverted.items()}
    ours = {name: tuple(tensor.shape) for name, tensor in views.items()}
    if saved != ours:
        odd = sorted(saved.items() ^ ours.items())[0][0]
        raise ModelError(
            f"the checkpoint layout of {network.config.model_type!r} is not supported",
            cause=f"{odd!r} is named or shaped otherwise in its hub checkpoint than in memory",
            hint="use a Llama, Qwen or DeepSeek style checkpoint (docs/support.md lists the families)",
        )


def moe_layers(network: nn.Module) -> list[str]:
    """Names of the blocks that route tokens to experts, in order of depth."""
    return [
        name.removesuffix(".experts")
        for name, module in network.named_modules()
        if name.endswith(".experts") and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    ]
