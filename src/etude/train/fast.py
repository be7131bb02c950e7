"""The fast path of training: Llama, Qwen3 and Qwen3-MoE layers with their backward written by hand.

On a processor and at small widths, transformers' modules under autograd spend more time on normalization, rotation,
activations and copies than on matrix products. Here a layer is two functions, attention and experts, each with a
backward that reads and writes every array as few times as it can:

    rotation      the halves that a rotation pairs are laid side by side (rows of the projections are reordered; scores
                  do not depend on the order of features), so that it is one complex product
    scale         folded into the weights that make the query
    experts       tokens sorted by expert, a few hundred at a time, so that activations stay in the processor's cache

It computes what the modules compute, from the same parameters; a test holds results and gradients together to 1e-5.
What it does not do: other families, biases, other activations (`supports` says no, and the modules run instead).

Shapes: T tokens, H query heads, K key-value heads, D head size, E experts, I inner size, S = T * top_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from etude.models.load import Model
from etude.models.packed_attention import Block, attend, attend_backward
from etude.models.routing import RouteTally, checked_routes, replayed

FAMILIES = (LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)
CHUNK_ROWS = 512
"""Rows of one expert that are computed at a time."""


def supports(model: Model) -> bool:
    """Exactly these classes, for a subclass may compute something else."""
    if type(model.network) not in FAMILIES:
        return False
    config: Any = model.config
    biased = config.attention_bias or getattr(config, "mlp_bias", False)
    return config.hidden_act == "silu" and not biased and not getattr(config, "use_sliding_window", False)


@dataclass(frozen=True, slots=True)
class _Shape:
    heads: int
    kv_heads: int
    width: int
    """D."""
    scale: float
    eps: float
    top_k: int
    normalizes: bool


class FastForward:
    """Packed rows through the layers. `supports(model)` must hold."""

    def __init__(self, model: Model, *, plausibility: float = 0.0, tally: RouteTally | None = None) -> None:
        """plausibility and tally as in `models.routing.replay`."""
        config: Any = model.config
        self._model = model
        self._plausibility, self._tally = plausibility, tally
        self._body = cast(Any, model.network.base_model)
        attention = self._body.layers[0].self_attn
        self._shape = _Shape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            width=attention.head_dim,
            scale=attention.scaling,
            eps=config.rms_norm_eps,
            top_k=model.top_k,
            normalizes=bool(getattr(config, "norm_topk_prob", False)),
        )

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        blocks: tuple[Block, ...],
        experts: Tensor | None,
        valid: Tensor,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states after the last norm, of `rows` only: [rows, hidden]; and the routers' mean balance loss: [].

        ids, positions, valid [T]; experts [T, moe_layers, top_k] or None. The balance loss is that of Switch
        Transformers (arXiv 2101.03961, eq. 4) over all top-k choices, 1 when loads and probabilities are even, 0 for a
        dense network. Errors: ModelError if the routes do not fit.
        """
        if experts is not None:
            experts = checked_routes(self._model, experts, valid)
        hidden = functional.embedding(ids, self._body.embed_tokens.weight)
        cos, sin = self._body.rotary_emb(hidden, positions[None])
        half = self._shape.width // 2
        turns = torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        mixtures, balance = 0, hidden.new_zeros(())
        for layer in self._body.layers:
            attention = layer.self_attn
            norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
            hidden = _Attention.apply(
                hidden, layer.input_layernorm.weight, attention.q_proj.weight, attention.k_proj.weight,
                attention.v_proj.weight, attention.o_proj.weight, *norms, turns, blocks, self._shape,
            )  # fmt: skip
            norm, mlp = layer.post_attention_layernorm.weight, layer.mlp
            if isinstance(mlp, Qwen3MoeSparseMoeBlock):
                choose = None if experts is None else partial(
                    replayed, mlp.gate, forced=experts[:, mixtures], valid=valid, plausibility=self._plausibility,
                    tally=self._tally,
                )  # fmt: skip
                mixtures += 1
                hidden, uneven = _Experts.apply(
                    hidden, norm, mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj, choose, self._shape
                )
                balance = balance + uneven
            else:
                normed = _Norm.apply(hidden, norm, self._shape.eps)
                gated = functional.silu(functional.linear(normed, mlp.gate_proj.weight))
                gated = gated * functional.linear(normed, mlp.up_proj.weight)
                hidden = hidden + functional.linear(gated, mlp.down_proj.weight)
        final: Tensor = _Norm.apply(hidden.index_select(0, rows), self._body.norm.weight, self._shape.eps)
        return final, balance / max(1, mixtures)


# RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467): y = x * r * weight, r = 1 / sqrt(mean(x^2) + eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and r [..., 1]; weight broadcasts over the leading dimensions of x."""
    r = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * r).mul_(weight), r


def _norm_backward(grad: Tensor, x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight. All in two dimensions: [rows, features], r [rows, 1], weight [features]."""
    product = grad * x
    grad_weight = torch.mv(product.t(), r[:, 0])
    pull = torch.mv(product, weight)[:, None].mul_(r * r * r).div_(x.shape[1])
    return (grad * weight).mul_(r).addcmul_(x, pull, value=-1), grad_weight


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, r = _norm(x, weight, eps)
        ctx.save_for_backward(x, r, weight)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *_norm_backward(grad, *ctx.saved_tensors), None


# Attention: y = x + out(attend(rotate(norm(q)), rotate(norm(k)), v)) of the normed x


def _paired(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection [heads * D, ...], reordered so that the two that a rotation mixes are neighbours."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _unpaired(weight: Tensor, heads: int) -> Tensor:
    """The inverse of `_paired`."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _rotate(rows: Tensor, turns: Tensor) -> Tensor:
    """rows [T, heads, D] in pairs, times turns [T, D / 2]."""
    pairs = torch.view_as_complex(rows.view(*rows.shape[:2], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).view(rows.shape)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, q_norm: Tensor | None,
        k_norm: Tensor | None, turns: Tensor, blocks: tuple[Block, ...], shape: _Shape,
    ) -> Tensor:  # fmt: skip
        tokens, heads, kv_heads, width = len(x), shape.heads, shape.kv_heads, shape.width
        normed, r = _norm(x, norm, shape.eps)
        queries = _paired(wq, heads)
        weight = torch.cat((queries if q_norm is not None else queries * shape.scale, _paired(wk, kv_heads), wv))
        projected = torch.mm(normed, weight.t()).view(tokens, heads + 2 * kv_heads, width)
        turned = projected[:, : heads + kv_heads]
        head_norm = head_r = None
        if q_norm is not None and k_norm is not None:
            scaled = (_paired(q_norm, 1) * shape.scale).expand(heads, -1)
            head_norm = torch.cat((scaled, _paired(k_norm, 1).expand(kv_heads, -1)))
            turned, head_r = _norm(turned, head_norm, shape.eps)
        turned = _rotate(turned.contiguous(), turns)
        query, key, value = _views(turned, projected, heads, kv_heads)
        mixed = x.new_empty(tokens, heads, width)
        kept = attend(query, key, value, blocks, out=mixed.transpose(0, 1))
        ctx.save_for_backward(x, norm, r, normed, weight, wo, projected, head_norm, head_r, turned, mixed, turns, *kept)
        ctx.blocks, ctx.shape = blocks, shape
        return torch.addmm(x, mixed.view(tokens, -1), wo.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        x, norm, r, normed, weight, wo, projected, head_norm, head_r, turned, mixed, turns = saved[:12]
        shape: _Shape = ctx.shape
        tokens, heads, kv_heads = len(x), shape.heads, shape.kv_heads
        both = heads + kv_heads
        grad_out = torch.mm(grad.t(), mixed.view(tokens, -1))
        grad_mixed = torch.mm(grad, wo).view(mixed.shape)
        grad_turned, grad_projected = torch.empty_like(turned), torch.empty_like(projected)
        grad_turned[:, heads:], grad_projected[:, both:] = 0, 0
        attend_backward(
            grad_mixed.transpose(0, 1), *_views(turned, projected, heads, kv_heads), ctx.blocks, saved[12:],
            into=_views(grad_turned, grad_projected, heads, kv_heads),
        )  # fmt: skip
        grad_turned = _rotate(grad_turned, turns.conj())
        grad_q_norm = grad_k_norm = None
        if head_norm is not None:
            grad_turned, grad_head = _heads_backward(grad_turned, projected[:, :both], head_r, head_norm)
            grad_q_norm = _unpaired(grad_head[:heads].sum(0), 1) * shape.scale
            grad_k_norm = _unpaired(grad_head[heads:].sum(0), 1)
        grad_projected[:, :both] = grad_turned
        flat = grad_projected.view(tokens, -1)
        grad_wq, grad_wk, grad_wv = torch.mm(flat.t(), normed).split(
            [heads * shape.width, kv_heads * shape.width, kv_heads * shape.width]
        )
        grad_wq = _unpaired(grad_wq, heads)
        if head_norm is None:
            grad_wq = grad_wq * shape.scale
        grad_x, grad_norm = _norm_backward(torch.mm(flat, weight), x, r, norm)
        return (
            grad_x.add_(grad), grad_norm, grad_wq, _unpaired(grad_wk, kv_heads), grad_wv, grad_out, grad_q_norm,
            grad_k_norm, None, None, None,
        )  # fmt: skip


def _views(turned: Tensor, projected: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value as [heads, T, D]."""
    query, key, value = turned[:, :heads], turned[:, heads:], projected[:, heads + kv_heads :]
    return query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)


def _heads_backward(grad: Tensor, x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`_norm_backward` for [T, heads, D] with weight [heads, D]."""
    unit = x * r
    grad_weight = (grad * unit).sum(0)
    pushed = grad * weight
    pull = (pushed * unit).mean(-1, keepdim=True)
    return pushed.addcmul_(unit, pull, value=-1).mul_(r), grad_weight


# Experts: y = x + sum over chosen e of gate_e * down_e(silu(gate part) * up part) of the normed x; and the balance loss


def _chunks(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, rows) of the sorted tokens."""
    start = 0
    for expert, count in enumerate(counts):
        for first in range(start, start + count, CHUNK_ROWS):
            yield expert, slice(first, min(first + CHUNK_ROWS, start + count))
        start += count


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm: Tensor, router: Tensor, gate_up: Tensor, down: Tensor,
        choose: Callable[[Tensor, Tensor], Tensor] | None, shape: _Shape,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """choose: from logits [T, E] and the own choice [T, top_k] to the set that is used; None: the own choice."""
        normed, r = _norm(x, norm, shape.eps)
        logits = torch.mm(normed, router.t())
        probs = torch.softmax(logits, dim=-1)
        chosen = probs.topk(shape.top_k, dim=-1).indices
        if choose is not None:
            chosen = choose(logits, chosen)
        gates = probs.gather(-1, chosen)
        total = gates.sum(-1, keepdim=True) if shape.normalizes else torch.ones_like(gates[:, :1])
        gates = gates / total
        order = chosen.view(-1).argsort(stable=True)
        tokens = order.div(shape.top_k, rounding_mode="floor")
        loads = chosen.view(-1).bincount(minlength=len(router))
        counts = loads.tolist()
        sorted_gates = gates.view(-1).index_select(0, order)[:, None]
        inner = down.shape[2]
        projected = x.new_empty(len(order), 2 * inner)
        out = x.clone()
        for expert, rows in _chunks(counts):
            z = torch.mm(normed.index_select(0, tokens[rows]), gate_up[expert].t(), out=projected[rows])
            hidden = functional.silu(z[:, :inner]).mul_(z[:, inner:]).mul_(sorted_gates[rows])
            out.index_add_(0, tokens[rows], torch.mm(hidden, down[expert].t()))
        pull = loads * (len(router) / (loads.sum() * len(x)))  # of each probability on the balance loss
        ctx.save_for_backward(
            x, norm, r, normed, router, gate_up, down, probs, chosen, gates, total, order, tokens, sorted_gates,
            projected, pull,
        )  # fmt: skip
        ctx.counts, ctx.normalizes = counts, shape.normalizes
        return out, torch.mv(probs, pull).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_balance: Tensor) -> Any:
        (x, norm, r, normed, router, gate_up, down, probs, chosen, gates, total, order, tokens, sorted_gates,
         projected, pull) = ctx.saved_tensors  # fmt: skip
        inner = down.shape[2]
        grad_normed = torch.zeros_like(normed)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        grad_sorted = sorted_gates.new_empty(len(order))
        for expert, rows in _chunks(ctx.counts):
            g = grad.index_select(0, tokens[rows])
            gate, up = projected[rows, :inner], projected[rows, inner:]
            activated = functional.silu(gate)
            hidden = activated * up
            slope = torch.mm(g, down[expert])
            torch.sum(slope * hidden, dim=-1, out=grad_sorted[rows])
            grad_down[expert].addmm_(g.t(), hidden.mul_(sorted_gates[rows]))
            slope.mul_(sorted_gates[rows])
            z = torch.empty_like(projected[rows])
            torch.mul(slope, activated, out=z[:, inner:])
            z[:, :inner] = torch.ops.aten.silu_backward(slope.mul_(up), gate)
            grad_gate_up[expert].addmm_(z.t(), normed.index_select(0, tokens[rows]))
            grad_normed.index_add_(0, tokens[rows], torch.mm(z, gate_up[expert]))
        grad_gates = torch.empty_like(grad_sorted).index_copy_(0, order, grad_sorted).view(gates.shape)
        if ctx.normalizes:
            grad_gates = grad_gates - (grad_gates * gates).sum(-1, keepdim=True)
        slopes = (grad_balance * pull).expand_as(probs).scatter_add(-1, chosen, grad_gates / total)
        slopes = torch._softmax_backward_data(slopes, probs, -1, probs.dtype)
        grad_normed.addmm_(slopes, router)
        grad_x, grad_norm = _norm_backward(grad_normed, x, r, norm)
        return grad_x.add_(grad), grad_norm, torch.mm(slopes.t(), normed), grad_gate_up, grad_down, None, None
