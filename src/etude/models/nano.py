"""The nano's shape: a small Qwen3 of transformers, or with `experts` a small Qwen3-MoE.

`train.pretrain` makes it from random weights; afterwards it is a Hugging Face folder like any other (`models.load`).
What it does not do: hold weights, or load transformers before `nano_config` is called (recipes name shapes).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from etude.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NanoShape:
    """Sizes of a new network."""

    hidden: int = 128
    """Width of the residual stream."""
    layers: int = 6
    """Number of blocks."""
    heads: int = 4
    """Attention heads, each with its own keys and values."""
    head_dim: int = 32
    """Width of a head."""
    experts: int = 0
    """Experts in each block; 0 makes the blocks dense."""
    top_k: int = 2
    """Experts that a token is sent to. Not used by dense blocks."""
    intermediate: int = 256
    """Inner width of an expert, or of a dense block."""
    context_tokens: int = 1024
    """Longest window."""
    vocab_size: int = 2048
    """Tokens of the tokenizer, control tokens included."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "head_dim", "top_k", "intermediate", "context_tokens", "vocab_size"):
            if getattr(self, name) < 1:
                raise RecipeError(f"shape.{name} = {getattr(self, name)} must be at least 1")
        if self.head_dim % 2:
            raise RecipeError(f"shape.head_dim = {self.head_dim} must be even", cause="rotary positions turn pairs")
        if self.experts and not self.top_k <= self.experts:
            raise RecipeError(f"shape.top_k = {self.top_k} exceeds shape.experts = {self.experts}")


def nano_config(shape: NanoShape, *, pad_id: int, begin_id: int, end_id: int) -> PreTrainedConfig:
    """The transformers config of a nano of this shape."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_tokens,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "pad_token_id": pad_id,
        "bos_token_id": begin_id,
        "eos_token_id": end_id,
        "initializer_range": 0.02,
    }
    if not shape.experts:
        return Qwen3Config(intermediate_size=shape.intermediate, **common)
    return Qwen3MoeConfig(
        intermediate_size=shape.intermediate,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        **common,
    )
