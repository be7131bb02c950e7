"""The fast path: Llama, Qwen3 and Qwen3-MoE networks in as few operations as their arithmetic needs.

At the sizes that run on a processor, a decoding step of transformers' modules spends most of its time between the
operations. This computes the same in fewer of them: the projections of a layer are laid side by side; a norm divides by
the length of its rows; a rotation is one complex product, for which the two halves of a head's keys and queries lie
interleaved (in the KV too: only their products matter). `tests` hold it to the plain path. Float32 only, where rounding
cannot tell the two apart.

What it does not do: training, scoring, other families: `forward` falls back to the modules.

Shapes: T tokens, H query heads, K key-value heads, D head size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from etude.inference.attention import Plan, attend_over_kv
from etude.models.load import Model

FAMILIES = (LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)


def supports(model: Model) -> bool:
    """Exactly these classes: a subclass may compute something else."""
    config: Any = model.config
    plain = config.hidden_act == "silu" and not getattr(config, "mlp_bias", False)
    return type(model.network) in FAMILIES and plain and not config.attention_bias and _dtype(model) == {torch.float32}


def _dtype(model: Model) -> set[torch.dtype]:
    return {tensor.dtype for tensor in model.hub_tensors().values()}


@dataclass(slots=True)
class _Layer:
    """Parameters of one layer, by views."""

    norm: torch.Tensor
    """[hidden]; a copy, times the root of its length, as the other norms' (see `FastForward.refresh`)."""
    qkv: torch.Tensor
    """[(H + 2K) * D, hidden]; a copy."""
    qk_norm: torch.Tensor | None
    """[H + K, D]: the weights of both norms, head by head, those of queries times the scale of their products."""
    out: torch.Tensor
    """[H * D, hidden]."""
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """[2 * inner, hidden]; of a mixture [E, hidden, 2 * inner]."""
    down: torch.Tensor
    """[inner, hidden]; of a mixture [E, inner, hidden]."""
    router: torch.Tensor | None
    """[E, hidden]."""


class FastForward:
    """Steps over a plan, as `Forward.step` of the plain path computes them."""

    def __init__(self, model: Model) -> None:
        """Lays the projections side by side. `supports(model)` must hold."""
        config: Any = model.config
        body: Any = model.network.base_model
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._scale, dim = body.layers[0].self_attn.scaling, body.layers[0].self_attn.head_dim
        least = torch.tensor(config.rms_norm_eps).mul(torch.tensor([config.hidden_size, dim])).sqrt()
        self._least, self._least_of_head = least[0], least[1]
        self._top_k = model.top_k
        self._experts = torch.arange(model.num_experts)
        self._normalizes = bool(getattr(config, "norm_topk_prob", False))
        self._pairs = torch.arange(dim).view(2, -1).t().reshape(-1)
        self._layers = [self._layer(layer) for layer in body.layers]
        self._norm = torch.empty(config.hidden_size)
        self._body = body
        self._head = model.network.get_output_embeddings().weight
        model.renew_views()
        self.refresh()

    def refresh(self) -> None:
        """After the parameters changed: what is kept as a copy."""
        for layer, module in zip(self._layers, self._body.layers, strict=True):
            attention = module.self_attn
            _scaled_norm(module.input_layernorm.weight, layer.norm)
            _scaled_norm(module.post_attention_layernorm.weight, layer.mlp_norm)
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            for part, target in zip(parts, self._split(layer.qkv), strict=True):
                heads = part.weight.data.view(-1, len(self._pairs), target.shape[-1])
                source = heads if part is attention.v_proj else heads[:, self._pairs]
                target.copy_(source.reshape(target.shape))
            if layer.qk_norm is not None:
                root = len(self._pairs) ** 0.5
                layer.qk_norm[: self._heads] = attention.q_norm.weight.data[self._pairs] * (root * self._scale)
                layer.qk_norm[self._heads :] = attention.k_norm.weight.data[self._pairs] * root
        _scaled_norm(self._body.norm.weight, self._norm)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows of queries, keys and values."""
        dim = len(self._pairs)
        return qkv.split([self._heads * dim, self._kv_heads * dim, self._kv_heads * dim])

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, plan: Plan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids, positions: [T]; ends: rows whose logits are wanted.

        Returns logits [ends, vocabulary] and chosen experts [T, moe_layers, top_k].
        """
        hidden = functional.embedding(ids, self._body.embed_tokens.weight)
        cos, sin = (
            table[0, :, None, : len(self._pairs) // 2] for table in self._body.rotary_emb(hidden, positions[None])
        )
        turn = torch.complex(cos, sin)  # [T, 1, D / 2]
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            hidden = self._attend(hidden, layer, index, turn, plan)
            normed = _rms_norm(hidden, layer.mlp_norm, self._least)
            if layer.router is None:
                gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
                hidden = torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down)
            else:
                chosen.append(self._mix(hidden, normed, layer))
        hidden = _rms_norm(hidden[ends], self._norm, self._least)
        return functional.linear(hidden, self._head), torch.stack(chosen, dim=1) if chosen else None

    def _attend(self, hidden: torch.Tensor, layer: _Layer, index: int, turn: torch.Tensor, plan: Plan) -> torch.Tensor:
        """[T, hidden] with the attention's output added. turn: [T, 1, D / 2] complex."""
        tokens, both = hidden.shape[0], self._heads + self._kv_heads
        normed = _rms_norm(hidden, layer.norm, self._least)
        projected = functional.linear(normed, layer.qkv).view(tokens, both + self._kv_heads, -1)
        turned, scale = projected[:, :both], self._scale
        if layer.qk_norm is not None:
            turned, scale = _rms_norm(turned, layer.qk_norm, self._least_of_head), 1.0
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turn).flatten(-2)
        query, key, value = turned[:, : self._heads], turned[:, self._heads :], projected[:, both:]
        mixed = attend_over_kv(query, key, value, layer=index, scale=scale, plan=plan)
        return torch.addmm(hidden, mixed.reshape(tokens, -1), layer.out)

    def _mix(self, hidden: torch.Tensor, normed: torch.Tensor, layer: _Layer) -> torch.Tensor:
        """Add the chosen experts' output to `hidden`. Returns the choice, [T, top_k]."""
        assert layer.router is not None
        probabilities = functional.linear(normed, layer.router).softmax(dim=-1)
        values, chosen = probabilities.topk(self._top_k, dim=-1)
        if self._normalizes:
            values /= values.sum(dim=-1, keepdim=True)
        experts, order = chosen.view(-1).sort()
        tokens = order.div(self._top_k, rounding_mode="floor")
        ends = torch.searchsorted(experts, self._experts, right=True, out_int32=True)
        gate, up = functional.grouped_mm(normed[tokens], layer.gate_up, offs=ends).chunk(2, dim=-1)
        inner = functional.silu(gate).mul_(up).mul_(values.view(-1)[order, None])
        hidden.index_add_(0, tokens, functional.grouped_mm(inner, layer.down, offs=ends))
        return chosen

    def _layer(self, module: Any) -> _Layer:
        attention = module.self_attn
        has_norms = hasattr(attention, "q_norm")
        if isinstance(module.mlp, Qwen3MoeSparseMoeBlock):
            experts = module.mlp.experts
            gate_up, down = experts.gate_up_proj.data.transpose(1, 2), experts.down_proj.data.transpose(1, 2)
            router = module.mlp.gate.weight.data
        else:
            gate_up = _side_by_side(module.mlp.gate_proj, module.mlp.up_proj)
            down, router = module.mlp.down_proj.weight.data.t(), None
        rows = (self._heads + 2 * self._kv_heads) * attention.head_dim
        hidden = attention.q_proj.in_features
        return _Layer(
            norm=torch.empty(hidden),
            qkv=torch.empty(rows, hidden),
            qk_norm=torch.empty(self._heads + self._kv_heads, attention.head_dim) if has_norms else None,
            out=attention.o_proj.weight.data.t(),
            mlp_norm=torch.empty(hidden),
            gate_up=gate_up,
            down=down,
            router=router,
        )


def _rms_norm(rows: torch.Tensor, weight: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, of n numbers. weight: times the root of n; least: the root of n * eps.

    x / sqrt(mean(x * x) + eps) is x * sqrt(n) / hypot(length of x, sqrt(n * eps)).
    """
    return (rows / torch.hypot(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), least)).mul_(weight)


def _scaled_norm(weight: torch.Tensor, target: torch.Tensor) -> None:
    torch.mul(weight.data, len(weight) ** 0.5, out=target)


def _side_by_side(*modules: nn.Linear) -> torch.Tensor:
    """One matrix of the modules' weights, of which they keep views."""
    joined = torch.cat([module.weight.data for module in modules])
    for module, part in zip(modules, joined.split([module.out_features for module in modules]), strict=True):
        module.weight.data = part
    return joined
