"""Low precision, emulated: tensors that hold only what int8 or NVFP4 could hold, in the dtype that they came in.

    int8     a scale a row, 255 steps, symmetric
    nvfp4    blocks of 16 numbers in E2M1, a scale in E4M3 for each block, and a float32 scale a row (a row of
             activations is a token, so that no token's result depends on the others of its batch)

`emulate` makes a network compute as an engine of that precision would: weights are rounded once; what goes into
attention's projections and into the experts is rounded at every call. Norms, routers, embeddings and logits stay as
they are, as engines leave them. It says what such an engine would answer, not how fast. Source of the format: NVIDIA's
NVFP4 (E2M1 with E4M3 block scales); a scale a token instead of one a tensor: Composer 2 report, section 6.1.

What it does not do: backward passes, or what happens between two products of one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from etude.errors import ModelError
from etude.models.hub import moe_layers
from etude.models.load import Model

BLOCK = 16
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MAX_E2M1, _MAX_E4M3 = 6.0, 448.0
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def round_int8(x: Tensor) -> Tensor:
    """Of each row (last dimension) the nearest of 255 evenly spaced numbers."""
    scale = (x.abs().amax(dim=-1, keepdim=True) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (x / scale).round().clamp_(-127, 127) * scale


def round_nvfp4(x: Tensor) -> Tensor:
    """Of each number the nearest that its block and row can hold. The last dimension is a multiple of 16."""
    if x.shape[-1] % BLOCK:
        raise ModelError(f"rows of {x.shape[-1]} numbers have no NVFP4 blocks", hint=f"multiples of {BLOCK}")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    peaks = blocks.abs().amax(dim=-1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    row = (peaks.amax(dim=-2, keepdim=True) / (_MAX_E2M1 * _MAX_E4M3)).clamp_(min=tiny)
    scale = (peaks / (_MAX_E2M1 * row)).to(torch.float8_e4m3fn).float() * row
    units = torch.where(scale > 0, blocks / scale.clamp(min=tiny), 0.0)
    grid = _E2M1.to(x.device)
    edges = (grid[1:] + grid[:-1]) / 2
    found = grid[torch.bucketize(units.abs(), edges)].copysign(units) * scale
    return found.flatten(-2).to(x.dtype)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"int8": round_int8, "nvfp4": round_nvfp4}


@torch.no_grad()
def emulate(model: Model, precision: str) -> None:
    """Change `model` for good: `int8` or `nvfp4`. Errors: ModelError for shapes that the format does not have."""
    round_ = ROUNDINGS[precision]

    def rounds_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (round_(inputs[0]), *inputs[1:])

    for name, module in model.network.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in _ATTENTION:
            module.weight.copy_(round_(module.weight))
            module.register_forward_pre_hook(rounds_input)
    for name in moe_layers(model.network):
        experts = model.network.get_submodule(f"{name}.experts")
        for parameter in experts.parameters(recurse=False):
            parameter.copy_(round_(parameter))
        experts.register_forward_pre_hook(rounds_input)
