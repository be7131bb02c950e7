"""A quick forward of Qwen3 and Qwen3-MoE networks for training from scratch on a CPU.

Same parameters, same numbers as transformers' own forward (a test holds them together); rows are padded on the right,
so causal attention needs no other mask. What makes it quicker: plain matmul attention, one block compiled for all
layers where a C++ compiler is at hand, and tokens sorted by expert, one matrix product an expert, with gathers whose
backward is a gather too.

What it does not do: caches, cross-document packing, other families (`etude.models` runs those).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.errors import RunError

BlockWeights = tuple[Tensor, ...]


def rotary(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [length, head_dim], halves repeated as transformers does."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attention(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, norm: Tensor, q_w: Tensor, k_w: Tensor, v_w: Tensor,
              o_w: Tensor, q_norm: Tensor, k_norm: Tensor, post_norm: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [B, T, D] -> x after the attention's residual, and its normalized form for the feed-forward part."""
    batch, length, width = x.shape
    head_dim = q_norm.shape[0]
    heads = q_w.shape[0] // head_dim
    normed = _norm(x, norm).view(-1, width)

    def heads_of(w: Tensor) -> Tensor:
        return (normed @ w.t()).view(batch, length, heads, head_dim)

    q = _rotate(_norm(heads_of(q_w), q_norm).transpose(1, 2), cos, sin) * head_dim**-0.5
    k = _rotate(_norm(heads_of(k_w), k_norm).transpose(1, 2), cos, sin)
    v = heads_of(v_w).transpose(1, 2)
    weights = torch.softmax(q @ k.transpose(-1, -2) + mask, dim=-1)
    out = (weights @ v).transpose(1, 2).reshape(-1, heads * head_dim) @ o_w.t()
    x = x + out.view(batch, length, width)
    return x, _norm(x, post_norm)


def swiglu(both: Tensor) -> Tensor:
    """[tokens, 2 x inner] -> [tokens, inner]: silu of the first half times the second."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class _Spread(torch.autograd.Function):
    """x [N, D] -> rows in expert order [N * k, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse).view(-1, ctx.top_k, grads[0].shape[-1]).sum(1), None, None, None


class _Reorder(torch.autograd.Function):
    """Rows of y in another order; `back` is the inverse of `order`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return y.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _Experts(torch.autograd.Function):
    """One matrix product an expert: x [S, I] sorted by expert, weight [E, O, I], counts [E] -> [S, O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            torch.mm(x[start : start + count], weight[expert].t(), out=out[start : start + count])
            start += count
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        start = 0
        for expert, count in enumerate(ctx.counts):
            rows = slice(start, start + count)
            torch.mm(grad[rows], weight[expert], out=grad_x[rows])
            torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
            start += count
        return grad_x, grad_weight, None


class NanoForward:
    """Hidden states and the router's auxiliary loss of a Qwen3 or Qwen3-MoE network."""

    def __init__(self, network: torch.nn.Module, *, compiled: bool) -> None:
        """Errors: RunError for a network that this forward would compute wrongly."""
        config: Any = network.config
        if config.model_type not in ("qwen3", "qwen3_moe") or config.num_key_value_heads != config.num_attention_heads:
            raise RunError(
                f"a {config.model_type} network cannot be trained from scratch here",
                cause="only Qwen3 and Qwen3-MoE with one key head a query head can",
                hint="use the model of stage pretrain",
            )
        self.network: Any = network
        self.top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        self.num_experts = int(getattr(config, "num_experts", 0) or 0)
        self._cos, self._sin = rotary(
            config.max_position_embeddings, config.head_dim, config.rope_parameters["rope_theta"]
        )
        length = config.max_position_embeddings
        self._mask = torch.full((length, length), float("-inf")).triu(1)
        wrap: Callable[[Any], Any] = (lambda f: torch.compile(f, dynamic=True)) if compiled else (lambda f: f)
        self._attention, self._swiglu, self._route = wrap(attention), wrap(swiglu), wrap(self._choose)
        self._layers = [self._weights(layer) for layer in cast(Any, self.network.model).layers]

    @staticmethod
    def _weights(layer: Any) -> BlockWeights:
        a = layer.self_attn
        return (
            layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.o_proj.weight,
            a.q_norm.weight, a.k_norm.weight, layer.post_attention_layernorm.weight,
        )  # fmt: skip

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> hidden states [B, T, D] after the last norm, and the mean load-balancing loss (1 if even)."""
        length = ids.shape[1]
        cos, sin, mask = self._cos[:length], self._sin[:length], self._mask[:length, :length]
        x = F.embedding(ids, self.network.model.embed_tokens.weight, padding_idx=self.network.config.pad_token_id)
        balance = x.new_zeros(())
        for layer, weights in zip(self.network.model.layers, self._layers, strict=True):
            x, normed = self._attention(x, cos, sin, mask, *weights)
            flat = normed.view(-1, normed.shape[-1])
            if self.num_experts:
                out, aux = self._mixture(layer.mlp, flat)
                balance = balance + aux
            else:
                out = self._dense(layer.mlp, flat)
            x = x + out.view_as(x)
        return _norm(x, self.network.model.norm.weight), balance / max(1, len(self._layers))

    def _dense(self, mlp: Any, x: Tensor) -> Tensor:
        both = x @ torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).t()
        return self._swiglu(both) @ mlp.down_proj.weight.t()

    def _choose(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = torch.softmax(x @ router.t(), dim=-1)
        values, chosen = probs.topk(self.top_k, dim=-1)
        return values / values.sum(-1, keepdim=True), chosen, probs.mean(0)

    def _mixture(self, mlp: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, chosen, mean_probs = self._route(x, mlp.gate.weight)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        counts = torch.bincount(flat, minlength=self.num_experts)
        # Switch Transformers, eq. 4, over top-k choices: 1 when both loads and probabilities are even.
        aux = self.num_experts * (mean_probs * (counts / flat.numel())).sum()
        sizes = counts.tolist()
        spread = _Spread.apply(x, order, inverse, self.top_k)
        inner = self._swiglu(_Experts.apply(spread, mlp.experts.gate_up_proj, sizes))
        out = _Reorder.apply(_Experts.apply(inner, mlp.experts.down_proj, sizes), inverse, order)
        return torch.einsum("nkd,nk->nd", out.view(-1, self.top_k, x.shape[-1]), values), aux
