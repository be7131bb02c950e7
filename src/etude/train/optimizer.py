"""fp32 masters, what is published of them, and AdamW.

Masters are fp32, always. The network holds what engines serve: the masters in the published rounding. For float32 that
is no rounding, and the network's parameters are the masters. For 16 bits the gradient at the rounded weights moves the
masters (straight-through), and the network gets them rounded again after each step. Buffers (a router's bias) and what
a family keeps in fp32 are never rounded, and buffers never trained (docs/semantics.md 1.2, 4.2).

Of several ranks each holds, updates and publishes its shard (sharded.py); a checkpoint is whole, and on rank 0.

What it does not do: schedules (a batch says at which share of the rate it is trained).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from etude.errors import ModelError, RunError
from etude.models.load import HubPlace, Model
from etude.train.recipe import TrainRecipe
from etude.train.sharded import Shards, Whole
from etude.weights.pieces import Stored

_ROUNDINGS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_KINDS = ("master", "exp_avg", "exp_avg_sq")
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
          torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip


def output_scales(model: Model) -> set[str]:
    """Name of the last norm's weights, which scale what the logits are made of.

    Errors: ModelError for a network that ends otherwise.
    """
    weights = (getattr(module, "weight", None) for module in model.network.base_model.children())
    last = {id(weight) for weight in weights if weight is not None and weight.dim() == 1}
    names = {name for name, parameter in model.network.named_parameters() if id(parameter) in last}
    if not names:
        raise ModelError(
            f"{model.family!r} has no last norm",
            cause="train.output_scale_rate is about its weights",
            hint="leave the rate at 1",
        )
    return names


class Masters:
    """The weights that are trained, by the network's own parameter names, with their optimizer."""

    def __init__(
        self, model: Model, recipe: TrainRecipe, publish_dtype: str, *,
        places: Mapping[str, HubPlace] | None = None, shards: Shards | None = None, public: Model | None = None,
    ) -> None:  # fmt: skip
        """places: of the hub tensors, from before the model was sharded. public: where the whole of a sharded model is
        put together, on rank 0.

        Errors: ModelError if the network is not in fp32.
        """
        self._model = model
        self._shards: Shards = shards or Whole()
        self._public = public or model
        self._places = model.hub_places() if places is None else places
        self._clip_norm = recipe.clip_norm
        self._rounding = _ROUNDINGS[publish_dtype]
        self._parameters = dict(model.network.named_parameters())
        for name, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                raise ModelError(
                    f"{name} is {parameter.dtype}",
                    cause="masters are fp32",
                    hint='load the model with dtype = "float32"',
                )
            parameter.requires_grad_(True)
        self._rounded = {name for name in self._parameters if self._is_rounded(name)}
        self.tensors: dict[str, Tensor] = {
            name: local.detach().clone() if name in self._rounded else local
            for name, parameter in self._parameters.items()
            for local in (self._shards.local(parameter),)
        }
        self.round_into_network()
        self._scales = output_scales(model) if recipe.output_scale_rate != 1.0 else set()
        decayed = [tensor for tensor in self.tensors.values() if tensor.dim() >= 2]
        others = [tensor for name, tensor in self.tensors.items() if tensor.dim() < 2 and name not in self._scales]
        groups = [
            {"params": decayed, "weight_decay": recipe.weight_decay, "peak": recipe.lr},
            {"params": others, "weight_decay": 0.0, "peak": recipe.lr},
            {"params": [self.tensors[name] for name in sorted(self._scales)], "weight_decay": 0.0,
             "peak": recipe.lr * recipe.output_scale_rate},
        ]  # fmt: skip
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True
        )

    def _is_rounded(self, name: str) -> bool:
        if self._rounding == torch.float32:
            return False
        network = self._model.network
        kept = [*(network._keep_in_fp32_modules or ()), *(network._keep_in_fp32_modules_strict or ())]
        return not any(pattern in name for pattern in kept)

    def zero_grad(self) -> None:
        for tensor in (*self._parameters.values(), *self.tensors.values()):
            tensor.grad = None

    def step(self, rate: float = 1.0) -> float:
        """One update from the network's gradients, at `rate` times the learning rate; returns their global norm before
        clipping.

        Errors: RunError if it is not finite; nothing has changed then.
        """
        grads = {
            name: torch.zeros_like(self.tensors[name]) if parameter.grad is None else self._shards.local(parameter.grad)
            for name, parameter in self._parameters.items()
        }
        norm = self._norm(grads)
        if not torch.isfinite(norm):
            raise RunError("the gradient is not finite", hint="lower train.lr, or look at the last batch")
        for name, grad in grads.items():
            self.tensors[name].grad = grad.mul_((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        for name in sorted(self._scales):
            self._move_together(name)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak"] * rate
        self._adamw.step()
        self.round_into_network()
        self.zero_grad()
        return float(norm)

    def _move_together(self, name: str) -> None:
        """Leave of a gradient what changes the scale of the weights as a whole: all of them then take the same step."""
        weights, grad = self.tensors[name], self.tensors[name].grad
        assert grad is not None
        products = torch.stack(((grad * weights).sum(), weights.square().sum()))
        self._shards.ranks.add(products)
        grad.copy_(weights * (products[0] / products[1]))

    def _norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Of the whole gradient."""
        norm = nn.utils.get_total_norm(list(grads.values()))
        square = norm.double().square()  # exact, so that alone nothing is rounded
        self._shards.ranks.add(square)
        return square.sqrt().to(norm.dtype)

    @torch.no_grad()
    def round_into_network(self) -> None:
        """Make the network hold the masters in the published rounding."""
        for name in self._rounded:
            self._shards.local(self._parameters[name]).copy_(self.tensors[name].to(self._rounding))

    def published(self) -> dict[str, Stored]:
        """The network's tensors by hub name, as they are published; views where nothing is rounded.

        All ranks call it; on others than rank 0 it gives nothing.
        """
        if self._shards.ranks.count > 1:
            self._gather()
        if self._shards.ranks.rank:
            return {}
        views = self._public.hub_tensors()
        return {name: self._rounded_as(self._places[name].parameter, view) for name, view in views.items()}

    def stretches(self) -> dict[str, Stored]:
        """This rank's part of `published`: of each hub tensor the elements that lie in its shard, if any.

        What is not cut (buffers; on one rank everything) is rank 0's.
        """
        if self._shards.ranks.count == 1:
            return self.published()
        found = {}
        for name, place in self._places.items():
            if place.parameter is None:
                if self._shards.ranks.rank == 0:
                    found[name] = to_stored(self._public.hub_tensors()[name])
                continue
            parameter = self._parameters[place.parameter]
            shard, start = self._shards.local(parameter).reshape(-1), self._shards.start(parameter)
            first = max(start, place.start)
            last = min(start + shard.numel(), place.start + math.prod(place.shape))
            if first < last:
                stored = self._rounded_as(place.parameter, shard[first - start : last - start])
                found[name] = Stored(stored.dtype, stored.array, shape=place.shape, offset=first - place.start)
        return found

    def _rounded_as(self, parameter: str | None, values: Tensor) -> Stored:
        return to_stored(values.to(self._rounding) if parameter in self._rounded else values)

    @torch.no_grad()
    def _gather(self) -> None:
        """Put the whole network together on rank 0. Buffers are the same everywhere, and never trained."""
        wholes = dict(self._public.network.named_parameters())
        for name, parameter in self._parameters.items():
            whole = self._shards.whole(parameter, self._shards.local(parameter))
            if self._shards.ranks.rank == 0:
                wholes[name].copy_(whole)

    def state(self) -> dict[str, np.ndarray]:
        """Masters and optimizer state, by name: `master/...`, `exp_avg/...`, `exp_avg_sq/...`, `updates`. Copies.

        All ranks call it; others than rank 0 keep nothing of it.
        """
        arrays: dict[str, np.ndarray] = {}
        updates = 0
        for name, tensor in self.tensors.items():
            moments = self._adamw.state.get(tensor)
            for kind in _KINDS:
                part = tensor if kind == "master" else moments[kind] if moments else torch.zeros_like(tensor)
                whole = self._shards.whole(self._parameters[name], part.detach())
                if self._shards.ranks.rank == 0:
                    arrays[f"{kind}/{name}"] = whole.detach().numpy().copy()
            updates = int(moments["step"]) if moments else 0
        arrays["updates"] = np.array(updates, np.int64)
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Exactly the state that `state` gave. Errors: ModelError, nothing changed, if it belongs to another model."""
        self._check(arrays)
        updates = torch.tensor(float(arrays["updates"]))
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                parts = {
                    kind: self._shards.part(self._parameters[name], torch.from_numpy(arrays[f"{kind}/{name}"].copy()))
                    for kind in _KINDS
                }
                tensor.copy_(parts.pop("master"))
                self._adamw.state[tensor] = {"step": updates.clone(), **parts}
        self.round_into_network()

    def _check(self, arrays: Mapping[str, np.ndarray]) -> None:
        wanted = {f"{kind}/{name}": tuple(p.shape) for kind in _KINDS for name, p in self._parameters.items()}
        wanted["updates"] = ()
        found = {name: array.shape for name, array in arrays.items()}
        if odd := sorted(wanted.items() ^ found.items()):
            raise ModelError(
                "the checkpoint belongs to another model",
                cause=f"{odd[0][0]} is {found.get(odd[0][0], 'missing')}, expected {wanted.get(odd[0][0], 'nothing')}",
                hint="resume with the model that the run was started with",
            )


def to_stored(tensor: Tensor) -> Stored:
    """As the weight store holds it: bfloat16 as its bits. Shares memory where it can."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype not in _NAMES:
        raise ModelError(f"a tensor of {tensor.dtype} cannot be published")
    name = _NAMES[tensor.dtype]
    if tensor.dtype == torch.bfloat16:
        return Stored(name, tensor.view(torch.int16).numpy().view(np.uint16))
    return Stored(name, tensor.numpy())


def from_stored(stored: Stored) -> Tensor:
    """The inverse of `to_stored`; shares the array's memory."""
    if stored.dtype == "BF16":
        return torch.from_numpy(stored.array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored.array)
