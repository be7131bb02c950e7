"""Attention over a packed row: every token sees its prompt and its own earlier tokens, nothing else.

A row is cut into blocks of queries. A block sees two ranges of keys, `prefix` and `own`, the last keys of `own` being
the block itself, causally: no score is computed that a mask would throw away, beyond half a block. On a CPU that beats
one masked matrix by the sparsity, and torch's fused attention by its slow backward on short sequences.

Used through transformers' attention interface, so that every family whose attention is plain softmax attention works
unchanged; what bends it (windows, caps, sinks, biases, dropout) is refused by name.
What it does not do: build the layout (`Block`s come from the caller), or reuse keys and values of earlier forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from etude.errors import ModelError
from etude.models.load import Model

NAME = "etude_packed"


class Block(NamedTuple):
    """Queries [start, end) see keys [prefix_start, prefix_end) and [own_start, end), the latter causally."""

    start: int
    end: int
    prefix_start: int
    prefix_end: int
    own_start: int


def enable(model: Model) -> None:
    """From now on the model's forward wants `blocks=`. Errors: ModelError if the family cannot."""
    AttentionInterface.register(NAME, _forward)
    try:
        model.network.set_attn_implementation(NAME)
    except (ValueError, ImportError) as error:
        raise ModelError(f"{model.family!r} cannot be trained", cause=str(error).splitlines()[0]) from error


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    blocks: Sequence[Block],
    **bent: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, width]; key and value [1, kv_heads, tokens, width]; result [1, tokens, heads, width]."""
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if bent.get(name) is not None:
            raise ModelError(f"packed attention does not support {name}", hint="docs/support.md lists the families")
    assert query.shape[0] == 1, "a packed micro-batch is one row"
    assert dropout == 0.0, "the network is in eval mode"
    assert attention_mask is None, "the blocks are the mask"
    mixed = _PackedAttention.apply(query[0] * scaling, key[0], value[0], tuple(blocks))
    return mixed.transpose(0, 1).unsqueeze(0), None


class _PackedAttention(torch.autograd.Function):
    """`attend` with its backward, for autograd."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[2])
        kept = attend(query, key, value, blocks, out=out)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        into = (torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value))
        attend_backward(grad, query, key, value, ctx.blocks, kept, into=into)
        return *into, None


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], *, out: Tensor) -> list[Tensor]:
    """Softmax attention by blocks, written to `out`; returns the probabilities of each block for the backward.

    query [heads, tokens, width], scaled already; key [kv_heads, tokens, width], value and out alike; any strides.
    """
    heads, kv_heads, width = query.shape[0], key.shape[0], query.shape[2]
    shared = heads // kv_heads
    kept = []
    for block in blocks:
        n = block.end - block.start
        q = query[:, block.start : block.end].reshape(kv_heads, shared * n, width)
        scores = torch.bmm(q, _keys(key, block).transpose(1, 2))
        scores.view(kv_heads, shared, n, -1)[..., -n:].add_(_causal(n))
        probs = torch.softmax(scores, dim=-1)
        kept.append(probs)
        out[:, block.start : block.end] = torch.bmm(probs, _keys(value, block)).view(heads, n, -1)
    return kept


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[Block],
    kept: Sequence[Tensor],
    *,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The gradients of query (written), key and value (added to what is there), from that of `attend`'s output."""
    heads, kv_heads, width = query.shape[0], key.shape[0], query.shape[2]
    shared = heads // kv_heads
    grad_query, grad_key, grad_value = into
    for block, probs in zip(blocks, kept, strict=True):
        n = block.end - block.start
        g = grad[:, block.start : block.end].reshape(kv_heads, shared * n, -1)
        q = query[:, block.start : block.end].reshape(kv_heads, shared * n, width)
        _add_product(grad_value, block, probs, g)
        slopes = torch.bmm(g, _keys(value, block).transpose(1, 2))
        slopes = torch._softmax_backward_data(slopes, probs, -1, probs.dtype)
        _add_product(grad_key, block, slopes, q)
        grad_query[:, block.start : block.end] = torch.bmm(slopes, _keys(key, block)).view(heads, n, width)


def _keys(rows: Tensor, block: Block) -> Tensor:
    """The rows that a block sees."""
    own = rows[:, block.own_start : block.end]
    if block.prefix_start == block.prefix_end:
        return own
    if block.prefix_end == block.own_start:
        return rows[:, block.prefix_start : block.end]
    return torch.cat((rows[:, block.prefix_start : block.prefix_end], own), dim=1)


def _add_product(total: Tensor, block: Block, left: Tensor, right: Tensor) -> None:
    """total[:, keys of the block] += left transposed @ right."""
    prefix = block.prefix_end - block.prefix_start
    if prefix:
        total[:, block.prefix_start : block.prefix_end].baddbmm_(left[..., :prefix].transpose(1, 2), right)
    total[:, block.own_start : block.end].baddbmm_(left[..., prefix:].transpose(1, 2), right)


_TRIANGLES: dict[int, Tensor] = {}


def _causal(n: int) -> Tensor:
    """[n, n]: 0 on and below the diagonal, -inf above."""
    if n not in _TRIANGLES:
        _TRIANGLES[n] = torch.full((n, n), -torch.inf).triu(1)
    return _TRIANGLES[n]
