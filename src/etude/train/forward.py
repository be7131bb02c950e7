"""A packed micro-batch through the network, to the hidden states that predict its targets.

The network is transformers' own; attention runs by blocks (`models.packed_attention`), recorded routes are replayed
(`models.routing`). At the start a small packed forward is compared with the network's plain one, so that a family that
does something of its own between hidden states and logits, or bends attention, is refused and not trained wrongly.

What it does not do: logits (the loss makes them, where they matter), or anything across micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from etude.data.packing import MicroBatch, Tree
from etude.errors import ModelError
from etude.models.load import Model
from etude.models.packed_attention import Block, enable
from etude.models.routing import replay

QUERY_BLOCK = 128
"""Queries in one block: within a block half of the causal scores are thrown away, between blocks none."""


class PackedForward:
    """The model, ready for packed rows. Makes the network refuse plain calls from then on."""

    def __init__(self, model: Model) -> None:
        """Errors: ModelError if a packed forward of this family would not give what its plain one does."""
        self.model = model
        self._base: nn.Module = model.network.base_model
        head = model.network.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ModelError(f"{model.family!r} cannot be trained", cause="its output layer is not one plain matrix")
        self._head = head
        self._check()

    @property
    def head(self) -> Tensor:
        """[vocabulary, width]: logits = hidden @ head.T."""
        return self._head.weight

    def __call__(self, micro: MicroBatch) -> Tensor:
        """[targets, width] hidden states. Errors: ModelError if the routes do not fit the model."""
        forced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if micro.experts is not None:
            forced = replay(self.model, torch.from_numpy(micro.experts), torch.from_numpy(micro.valid))
        with forced:
            hidden = self._row(micro.ids, micro.positions, micro.trees)
        return hidden.index_select(0, torch.from_numpy(micro.sources))

    def _row(self, ids: np.ndarray, positions: np.ndarray, trees: Sequence[Tree]) -> Tensor:
        """[tokens, width]"""
        output = self._base(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(positions)[None],
            blocks=blocks(trees),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def _check(self) -> None:
        ids = np.random.default_rng(0).integers(0, self.model.vocab_size, size=13)
        first, second = ids[:9], np.concatenate([ids[:5], ids[9:]])
        plain = [self.model.network(input_ids=torch.from_numpy(row)[None]).logits[0] for row in (first, second)]
        enable(self.model)
        positions = np.concatenate([np.arange(9), np.arange(5, 9)])
        packed = self._head(self._row(ids, positions, [Tree(0, 5, (4, 4))]))
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
