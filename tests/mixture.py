"""The shipped nano as a mixture of experts: what it can do stays, and there are routes to record and to replay.

Sparse upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055): every expert begins as the dense block. A little noise
tells the experts apart, so that a wrong route shows in log-probs, and routers are random, so that routes differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig

from etude.models.load import load_model, model_from_config
from etude.models.recipe import SHIPPED

NOISE = 0.02
"""Of an expert's weights, as a share of their spread."""
_ROUTER_SPREAD = 0.5


def write_mixture(folder: Path, *, experts: int = 4, top_k: int = 2) -> Path:
    """A Hugging Face folder with a tokenizer, Qwen3-MoE."""
    dense = load_model("etude-nano")
    config = dense.config.to_dict()
    config |= {"num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    config |= {"moe_intermediate_size": config["intermediate_size"]}
    for name in ("architectures", "model_type"):
        config.pop(name)
    mixture = model_from_config(Qwen3MoeConfig(**config), seed=0)
    given = dense.hub_tensors()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in mixture.hub_tensors().items():
            if name.endswith("mlp.gate.weight"):
                tensor.normal_(0, _ROUTER_SPREAD, generator=random)
            elif ".mlp.experts." in name:
                layer, _, rest = name.partition(".experts.")
                source = given[f"{layer}.{rest.partition('.')[2]}"]
                noise = torch.randn(source.shape, generator=random)
                tensor.copy_(source + noise * (NOISE * source.std()))
            else:
                tensor.copy_(given[name])
    mixture.network.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((SHIPPED["etude-nano"] / "tokenizer.json").read_bytes())
    return folder
