"""A packed micro-batch through the network, to the hidden states that predict its targets.

The network is transformers' own, with attention by blocks (`models.packed_attention`) and recorded routes replayed
(`models.routing`); families that `fast` knows take that path. At the start a small packed forward is compared with the
network's plain one, so that a family that does something of its own between hidden states and logits, or bends
attention, is refused and not trained wrongly.

What it does not do: logits (the loss makes them, where they matter), or anything across micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from etude.data.packing import MicroBatch, Tree
from etude.errors import ModelError
from etude.models.load import Model
from etude.models.packed_attention import Block, enable
from etude.models.routing import RouteTally, replay
from etude.train.fast import FastForward, supports

QUERY_BLOCK = 128
"""Queries in one block: within a block half of the causal scores are thrown away, between blocks none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What becomes of recorded routes."""

    replays: bool = True
    """Whether they are forced; else every router chooses for itself."""
    plausibility: float = 0.0
    """alpha of the filter (models/plausibility.py), 0 for none."""


class PackedForward:
    """The model, ready for packed rows."""

    def __init__(self, model: Model, *, fast: bool = True, routing: Routing | None = None) -> None:
        """`fast`: take the fast path where there is one; without, the network refuses plain calls from then on.

        Errors: ModelError if a packed forward of this family would not give what its plain one does.
        """
        self.model = model
        head = model.network.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ModelError(f"{model.family!r} cannot be trained", cause="its output layer is not one plain matrix")
        self._head: nn.Linear = head
        self._routing: Routing = routing or Routing()
        self.routes: RouteTally = RouteTally()
        """Of all replays so far."""
        self._fast: FastForward | None = None
        if fast and supports(model):
            self._fast = FastForward(model, plausibility=self._routing.plausibility, tally=self.routes)
        self._check()

    @property
    def head(self) -> Tensor:
        """[vocabulary, width]: logits = hidden @ head.T."""
        return self._head.weight

    def __call__(self, micro: MicroBatch) -> Tensor:
        """[targets, width] hidden states. Errors: ModelError if the routes do not fit the model."""
        return self.hidden(
            micro.ids, micro.positions, micro.trees, micro.sources, experts=micro.experts, valid=micro.valid
        )[0]

    def hidden(
        self,
        ids: np.ndarray,
        positions: np.ndarray,
        trees: Sequence[Tree],
        sources: np.ndarray,
        *,
        experts: np.ndarray | None = None,
        valid: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[sources, width] hidden states, and the experts' balance loss: [], 0 off the fast path.

        ids, positions, sources, valid and experts as in MicroBatch. Errors: ModelError if the routes do not fit.
        """
        row, places, rows = torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(sources)
        routes = None if experts is None or not self._routing.replays else torch.from_numpy(experts)
        known = torch.zeros(len(ids), dtype=torch.bool) if valid is None else torch.from_numpy(valid)
        if self._fast is not None:
            return self._fast(row, places, blocks(trees), routes, known, rows)
        forced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if routes is not None:
            forced = replay(self.model, routes, known, plausibility=self._routing.plausibility, tally=self.routes)
        with forced:
            output = self.model.network.base_model(
                input_ids=row[None], position_ids=places[None], blocks=blocks(trees), use_cache=False
            )
        hidden: Tensor = output.last_hidden_state[0].index_select(0, rows)
        return hidden, hidden.new_zeros(())

    @torch.no_grad()
    def _check(self) -> None:
        """Compare a small packed forward with the network's own."""
        ids = np.random.default_rng(0).integers(0, self.model.vocab_size, size=13)
        first, second = ids[:9], np.concatenate([ids[:5], ids[9:]])
        plain = [self.model.network(input_ids=torch.from_numpy(row)[None]).logits[0] for row in (first, second)]
        if self._fast is None:
            enable(self.model)
        nothing = np.zeros(0, np.int64)
        micro = MicroBatch(
            ids=ids, positions=np.concatenate([np.arange(9), np.arange(5, 9)]), trees=(Tree(0, 5, (4, 4)),),
            experts=None, valid=np.zeros(13, bool), sources=np.arange(13), targets=nothing, advantages=nothing,
            logprobs=nothing, samples=nothing, places=nothing,
        )  # fmt: skip
        packed = self(micro) @ self.head.t()
        wanted = torch.cat([plain[0], plain[1][5:]])
        if not torch.allclose(packed, wanted, atol=1e-3, rtol=1e-3):
            gap = float((packed - wanted).abs().max())
            raise ModelError(
                f"{self.model.family!r} cannot be trained",
                cause=f"its packed forward differs from its own by {gap:.2g} in a logit",
                hint="docs/support.md lists the families",
            )


def blocks(trees: Sequence[Tree]) -> tuple[Block, ...]:
    """What each query of a packed row sees: its prompt, and its own sample up to itself."""
    found = []
    for tree in trees:
        end = tree.start + tree.prompt
        spans = [(tree.start, tree.start, end)]
        at = end
        for length in tree.members:
            spans.append((end, at, at + length))
            at += length
        for prefix_end, start, stop in spans:
            for first in range(start, stop, QUERY_BLOCK):
                found.append(Block(first, min(first + QUERY_BLOCK, stop), tree.start, prefix_end, start))
    return tuple(found)
