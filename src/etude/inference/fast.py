"""The fast path: Llama, Qwen3 and Qwen3-MoE networks in as few operations as their arithmetic needs.

At the sizes that run on a processor, a decoding step of transformers' modules spends most of its time between the
operations. This computes the same from the same parameters (the projections of a layer are laid side by side in memory,
and the modules keep views of them, so a swap needs nothing extra); `tests` hold it to the plain path. Float32 only,
where rounding cannot tell the two apart.

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
    qkv: torch.Tensor
    """[(H + 2K) * D, hidden]."""
    qk_norm: torch.Tensor | None
    """[H + K, D]: the weights of both norms, head by head; a copy (see `FastForward.refresh`)."""
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
        self._scale = body.layers[0].self_attn.scaling
        self._eps = config.rms_norm_eps
        self._top_k = model.top_k
        self._experts = torch.arange(model.num_experts)
        self._normalizes = bool(getattr(config, "norm_topk_prob", False))
        self._attentions = [layer.self_attn for layer in body.layers]
        self._layers = [self._layer(layer) for layer in body.layers]
        self._body = body
        self._head = model.network.get_output_embeddings().weight
        model.renew_views()
        self.refresh()

    def refresh(self) -> None:
        """After the parameters changed: what is kept as a copy."""
        for layer, attention in zip(self._layers, self._attentions, strict=True):
            if layer.qk_norm is not None:
                layer.qk_norm[: self._heads] = attention.q_norm.weight.data
                layer.qk_norm[self._heads :] = attention.k_norm.weight.data

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor, plan: Plan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids, positions: [T]; ends: rows whose logits are wanted.

        Returns logits [ends, vocabulary] and chosen experts [T, moe_layers, top_k].
        """
        hidden = functional.embedding(ids, self._body.embed_tokens.weight)
        cos, sin = (table.transpose(0, 1) for table in self._body.rotary_emb(hidden, positions[None]))  # [T, 1, D]
        chosen: list[torch.Tensor] = []
        for index, layer in enumerate(self._layers):
            hidden = self._attend(hidden, layer, index, cos, sin, plan)
            normed = _rms_norm(hidden, layer.mlp_norm, self._eps)
            if layer.router is None:
                gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
                hidden = torch.addmm(hidden, functional.silu(gate).mul_(up), layer.down)
            else:
                chosen.append(self._mix(hidden, normed, layer))
        hidden = _rms_norm(hidden[ends], self._body.norm.weight, self._eps)
        return functional.linear(hidden, self._head), torch.stack(chosen, dim=1) if chosen else None

    def _attend(
        self, hidden: torch.Tensor, layer: _Layer, index: int, cos: torch.Tensor, sin: torch.Tensor, plan: Plan
    ) -> torch.Tensor:
        """[T, hidden] with the attention's output added."""
        tokens, both = hidden.shape[0], self._heads + self._kv_heads
        normed = _rms_norm(hidden, layer.norm, self._eps)
        projected = functional.linear(normed, layer.qkv).view(tokens, both + self._kv_heads, -1)
        turned = projected[:, :both]
        if layer.qk_norm is not None:
            turned = _rms_norm(turned, layer.qk_norm, self._eps)
        first, second = turned.chunk(2, dim=-1)
        turned = torch.addcmul(turned * cos, torch.cat((-second, first), dim=-1), sin)
        query, key, value = turned[:, : self._heads], turned[:, self._heads :], projected[:, both:]
        mixed = attend_over_kv(query, key, value, layer=index, scale=self._scale, plan=plan)
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
        return _Layer(
            norm=module.input_layernorm.weight.data,
            qkv=_side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
            qk_norm=torch.empty(self._heads + self._kv_heads, attention.head_dim) if has_norms else None,
            out=attention.o_proj.weight.data.t(),
            mlp_norm=module.post_attention_layernorm.weight.data,
            gate_up=gate_up,
            down=down,
            router=router,
        )


def _rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in the order of operations of the modules."""
    inverse = (rows * rows).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return (rows * inverse).mul_(weight)


def _side_by_side(*modules: nn.Linear) -> torch.Tensor:
    """One matrix of the modules' weights, of which they keep views."""
    joined = torch.cat([module.weight.data for module in modules])
    for module, part in zip(modules, joined.split([module.out_features for module in modules]), strict=True):
        module.weight.data = part
    return joined
