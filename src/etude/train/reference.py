"""A version that stays as it is, and the log-probs that it gives to the tokens of a batch.

The reference is rounded as it was published, and replays the recorded routes as they are: what the policy's router
finds implausible by now says nothing of the reference. The version is pinned in the store, so that a resumed run goes
on with the same. What it does not do: know what its log-probs are for (kl.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from etude.data.packing import MicroBatch
from etude.errors import RunError
from etude.models.load import Model
from etude.train.forward import Routing
from etude.train.losses import token_logprobs
from etude.train.objective import Objective
from etude.train.optimizer import from_stored
from etude.train.ranks import Ranks
from etude.train.sharded import Sharded
from etude.weights.manifests import head, named_version, pin, pins
from etude.weights.pieces import Stored
from etude.weights.replica import dtypes, fetch
from etude.weights.store import Store

_PIN = "reference"


def pinned_reference(store: Store, name: str) -> dict[str, Stored]:
    """The tensors of the version that `name` says, pinned: `start`, the store's newest when it is asked for first, or
    the name of one. Errors: StoreError, MissingError."""
    pinned = [one.version.name for one in pins(store) if one.name == _PIN]
    wanted = (pinned or [""])[0] if name == "start" else name
    manifest = named_version(store, wanted) if wanted else head(store)
    assert manifest is not None, "a trainer publishes its start first"
    if manifest.version.name not in pinned:
        pin(store, _PIN, manifest.version, "rl.kl.reference")
    kinds = dtypes(manifest)
    return {name: Stored(kinds[name], array) for name, array in fetch(store, manifest).items()}


class Reference:
    """A second network of the same architecture; on several ranks it is sharded like the first."""

    def __init__(self, model: Model, ranks: Ranks, routing: Routing) -> None:
        """`model` is copied, and must not be sharded yet."""
        self._model = Model(copy.deepcopy(model.network), model.family)
        self._ranks, self._routing = ranks, Routing(replays=routing.replays)
        self._objective: Objective | None = None

    def load(self, tensors: Mapping[str, Stored]) -> None:
        """The version's tensors by hub name; once. Errors: ModelError if they do not fit the model."""
        views = self._model.hub_tensors()
        given = {name: from_stored(Stored(stored.dtype, stored.array.copy())) for name, stored in tensors.items()}
        self._model.assign(
            {name: tensor.to(views[name].dtype) if name in views else tensor for name, tensor in given.items()}
        )
        several = self._ranks.count > 1
        self._objective = Objective(self._model, fast=not several, routing=self._routing)
        if several:
            Sharded(self._ranks).shard(self._objective, self._model.network.base_model)
            self._model.release_views()

    @property
    def objective(self) -> Objective:
        """Errors: RunError before `load`."""
        if self._objective is None:
            raise RunError("the reference of rl.kl is not loaded")
        return self._objective


@torch.no_grad()
def logprobs_of(
    objective: Objective, micros: Sequence[MicroBatch], ranks: Ranks, temperature: float
) -> Iterator[np.ndarray]:
    """Of each micro-batch [targets] float32, on every rank. All ranks call it with the same arguments."""
    found = [torch.zeros(len(micro.targets)) for micro in micros]
    for number, is_mine in ranks.turns(len(micros)):
        targets = torch.from_numpy(micros[number].targets)

        def head(
            hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor = targets
        ) -> tuple[torch.Tensor, ...]:
            return (token_logprobs(hidden, weight, targets, temperature),)

        (logprobs,) = objective(micros[number], head)
        if is_mine:
            found[number] = logprobs
    for logprobs in found:
        ranks.add(logprobs)
        yield logprobs.numpy()
