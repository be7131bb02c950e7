"""A new version's tensors, made ready to be copied in: checked whole before anything of the old one is touched.

What it does not do: download (the injected `fetch` does), or commit (`torch_engine`, between two steps).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from etude.errors import EngineError, ModelError
from etude.models.load import Model
from etude.types import Version


@dataclass(slots=True)
class PendingSwap:
    """A staged version that waits for the end of the running step, or of requests pinned to the version before it."""

    version: Version
    tensors: dict[str, torch.Tensor]
    done: asyncio.Future[None]
    deadline_s: float = 0.0
    """On the monotonic clock: when pinned requests fail instead of delaying it further."""


def stage(model: Model, tensors: Mapping[str, np.ndarray | torch.Tensor], version: Version) -> dict[str, torch.Tensor]:
    """Hub name -> tensor, fit for `model.assign`. 16-bit floats may come as their bits in 16-bit integers.

    Errors: EngineError naming the first tensor that does not fit.
    """
    targets = model.hub_tensors()
    staged = {name: _as_tensor(tensor, targets.get(name)) for name, tensor in tensors.items()}
    try:
        model.check(staged)
    except ModelError as error:
        raise EngineError(
            f"version {version.name} cannot be served: {error.message}",
            cause=error.cause,
            hint="it was published for another model, or in another dtype",
        ) from error
    return staged


def _as_tensor(value: np.ndarray | torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    array = value if value.flags.writeable else value.copy()  # torch takes no memory that it may not write
    if target is not None and target.dtype.itemsize == 2 and array.dtype.kind in "iu" and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(target.dtype)
    return torch.from_numpy(array)
