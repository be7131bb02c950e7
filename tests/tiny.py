"""Tiny random models of the families that the tests run on: seconds to nothing to make, and real in every part."""

from __future__ import annotations

import torch
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    Kimi_K25Config,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from etude.models.load import Model, model_from_config

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_hidden_layers": 3}
FAMILIES = ("llama", "qwen3", "qwen3_moe")
"""With a fast path of their own."""
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "kimi_k25")
ALL = ("llama", "qwen3", *MIXTURES)


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    """A config of `family` (one of ALL, or qwen2_moe) a few tens of thousands of parameters large."""
    if family == "llama":
        return LlamaConfig(**{**COMMON, **changes})
    if family == "qwen3":
        return Qwen3Config(**{**COMMON, "head_dim": 8, "tie_word_embeddings": True, **changes})
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**{**COMMON, **MOE, "head_dim": 8, "num_experts": 4, "norm_topk_prob": True, **changes})
    if family == "mixtral":
        return MixtralConfig(**{**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, **changes})
    if family == "olmoe":
        return OlmoeConfig(**{**COMMON, "num_experts": 4, "num_experts_per_tok": 2, **changes})
    if family == "qwen2_moe":
        shared = {"num_experts": 4, "shared_expert_intermediate_size": 24}
        return Qwen2MoeConfig(**{**COMMON, **MOE, **shared, **changes})
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    if family == "glm4_moe":
        return Glm4MoeConfig(**{**COMMON, **MOE, **groups, "head_dim": 8, **changes})
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
    text = DeepseekV3Config(**{**COMMON, **MOE, **latent, **groups, **changes})
    if family == "deepseek_v3":
        return text
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False)


def tiny_model(family: str, *, seed: int = 0, dtype: str = "float32", **changes: object) -> Model:
    """A model whose weights are large enough that its choices are sharp, as those of a trained one."""
    return model_from_config(tiny_config(family, **changes), seed=seed, dtype=dtype)


def random_ids(count: int, *, vocab: int = 97, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))
