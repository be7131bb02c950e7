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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    blocks: Sequence[Block],
    **bent: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, width]; key and value [1, kv_heads, tokens, width]; result [1, tokens, heads, width]."""
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if bent.get(name) is not None:
            raise ModelError(f"packed attention does not support {name}", hint="docs/support.md lists the families")
    assert query.shape[0] == 1, "a packed micro-batch is one row"
    assert dropout == 0.0, "the network is in eval mode"
    assert attention_mask is None, "the blocks are the mask"
    mixed = _PackedAttention.apply(query[0], key[0], value[0], scaling, tuple(blocks))
    return mixed.transpose(0, 1).unsqueeze(0), None


class _PackedAttention(torch.autograd.Function):
    """Softmax attention by blocks; the backward by hand, over the probabilities that the forward kept."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, blocks: tuple[Block, ...]
    ) -> torch.Tensor:
        heads, _, width = query.shape
        kv_heads = key.shape[0]
        shared = heads // kv_heads
        scaled = query * scaling
        out = torch.empty(heads, query.shape[1], value.shape[2], dtype=query.dtype)
        kept = []
        for block in blocks:
            n = block.end - block.start
            q = scaled[:, block.start : block.end].reshape(kv_heads, shared * n, width)
            scores = torch.bmm(q, _keys(key, block).transpose(1, 2))
            scores.view(kv_heads, shared, n, -1)[..., -n:].add_(_causal(n))
            probs = torch.softmax(scores, dim=-1)
            kept.append(probs)
            out[:, block.start : block.end] = torch.bmm(probs, _keys(value, block)).view(heads, n, -1)
        ctx.save_for_backward(scaled, key, value, *kept)
        ctx.scaling, ctx.blocks = scaling, blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        scaled, key, value, *kept = ctx.saved_tensors
        heads, _, width = scaled.shape
        kv_heads = key.shape[0]
        shared = heads // kv_heads
        grad_query = torch.empty_like(scaled)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for block, probs in zip(ctx.blocks, kept, strict=True):
            n = block.end - block.start
            g = grad[:, block.start : block.end].reshape(kv_heads, shared * n, -1)
            q = scaled[:, block.start : block.end].reshape(kv_heads, shared * n, width)
            _add(grad_value, block, torch.bmm(probs.transpose(1, 2), g))
            slopes = torch.bmm(g, _keys(value, block).transpose(1, 2))
            slopes = torch._softmax_backward_data(slopes, probs, -1, probs.dtype)
            _add(grad_key, block, torch.bmm(slopes.transpose(1, 2), q))
            grad_query[:, block.start : block.end] = torch.bmm(slopes, _keys(key, block)).view(heads, n, width)
        return grad_query.mul_(ctx.scaling), grad_key, grad_value, None, None


def _keys(rows: torch.Tensor, block: Block) -> torch.Tensor:
    """The rows that a block sees."""
    own = rows[:, block.own_start : block.end]
    if block.prefix_start == block.prefix_end:
        return own
    if block.prefix_end == block.own_start:
        return rows[:, block.prefix_start : block.end]
    return torch.cat((rows[:, block.prefix_start : block.prefix_end], own), dim=1)


def _add(total: torch.Tensor, block: Block, part: torch.Tensor) -> None:
    prefix = block.prefix_end - block.prefix_start
    total[:, block.prefix_start : block.prefix_end] += part[:, :prefix]
    total[:, block.own_start : block.end] += part[:, prefix:]


_TRIANGLES: dict[int, torch.Tensor] = {}


def _causal(n: int) -> torch.Tensor:
    """[n, n]: 0 on and below the diagonal, -inf above."""
    if n not in _TRIANGLES:
        _TRIANGLES[n] = torch.full((n, n), -torch.inf).triu(1)
    return _TRIANGLES[n]
