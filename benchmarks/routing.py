"""What replaying recorded routes costs a training step, with and without the plausibility filter.

    python benchmarks/routing.py --json FILE

Shapes: `nano`, a mixture of the shipped nano's size (8 experts, 2 a token), on the fast path; `wide`, the routing of
Qwen3-MoE's large models (128 experts, 8 a token) at a width that a processor can train, on the fast path and on
transformers' modules; `sigmoid`, DeepSeek-V3's router with the same 128 experts in 8 groups, 4 of them open. A step is
a forward, loss, backward and update of 32 samples of 256 tokens. Routes are recorded by a network whose routers differ
a little, as a stale engine's do. Every arm takes the same batch; a ratio is one of the same round.

Goal: at most 1.1 of the step without replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from measuring import Row, arguments, in_turn, ratio, report
from transformers import DeepseekV3Config, Qwen3MoeConfig

from etude.models.load import Model, model_from_config
from etude.models.routing import capture
from etude.train import objective
from etude.train.corrections import Correction
from etude.train.forward import PackedForward, Routing
from etude.train.recipe import TrainRecipe
from etude.train.step import Trainer
from etude.types import Batch, Origin, Routes, Run, Sample, Version

SAMPLES, LENGTH, PROMPT = 32, 256, 128
STALE = 0.05
"""Noise on the routers that recorded the routes, as a share of their weights' spread."""
START = Version(incarnation=1, n=1, step=0)
SHAPE = {"vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 4, "max_position_embeddings": 512, "num_experts_per_tok": 8,
         "moe_intermediate_size": 64, "intermediate_size": 512}  # fmt: skip
ALPHA = 0.3


def model_of(shape: str) -> Model:
    if shape == "nano":
        small = {"hidden_size": 128, "num_hidden_layers": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        config = Qwen3MoeConfig(**{**SHAPE, **small, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True})
    elif shape == "sigmoid":
        latent = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                  "v_head_dim": 32, "num_key_value_heads": 8, "first_k_dense_replace": 0}  # fmt: skip
        config = DeepseekV3Config(**{**SHAPE, **latent, "n_routed_experts": 128, "n_group": 8, "topk_group": 4})
    else:
        config = Qwen3MoeConfig(**SHAPE, num_experts=128, head_dim=32, norm_topk_prob=True)
    return model_from_config(config, seed=0)


@torch.no_grad()
def batch_of(shape: str) -> Batch:
    """Samples whose routes a stale network took."""
    model, draw = model_of(shape), torch.Generator().manual_seed(0)
    for name, tensor in model.hub_tensors().items():
        if name.endswith("mlp.gate.weight"):
            tensor.add_(torch.randn(tensor.shape, generator=draw), alpha=STALE * float(tensor.std()))
    samples = []
    rng = np.random.default_rng(0)
    for number in range(SAMPLES):
        ids = rng.integers(10, model.vocab_size, LENGTH).astype(np.int32)
        with capture(model) as routes:
            model.network(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
        mask = np.arange(LENGTH) >= PROMPT
        experts = routes.experts()[:-1].numpy().astype(np.uint8)
        samples.append(
            Sample(ids=ids, mask=mask, logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                   advantage=float(number % 2) - 0.5, versions=(Run(start=PROMPT, version=START),), kv_epochs=(),
                   routes=Routes(experts=experts, valid=np.ones(len(experts), bool)),
                   origin=Origin(key=str(number), member=0, context=0))
        )  # fmt: skip
    return Batch(step=1, samples=tuple(samples), denominator=float(SAMPLES * (LENGTH - PROMPT)), seed=0)


def trainer_of(shape: str, routing: Routing, *, fast: bool) -> Trainer:
    torch.set_num_threads(2)
    if not fast:  # what ranks of several processes use
        objective.PackedForward = partial(PackedForward, fast=False)  # type: ignore[misc, assignment]
    try:
        recipe = TrainRecipe(lr=1e-6, threads=2)
        return Trainer(
            model_of(shape), recipe, publish_dtype="float32", correction=Correction(kind="none"), routing=routing
        )
    finally:
        objective.PackedForward = PackedForward  # type: ignore[misc]


def arm(trainer: Trainer, batch: Batch) -> Callable[[], Mapping[str, float]]:
    """One step; what it took, and what it replaced."""

    def measure() -> Mapping[str, float]:
        trainer.step = 0
        start = time.perf_counter()
        row = trainer.train(batch)
        seconds = time.perf_counter() - start
        return {"s": seconds, **{name: row[name] for name in ("route_overlap", "replaced_share") if name in row}}

    return measure


def main() -> None:
    chosen = arguments(__doc__, repeats=7).parse_args()
    rows: list[Row] = []
    values: dict[str, float] = {}
    for label, shape, fast in (("nano", "nano", True), ("wide", "wide", True), ("wide_modules", "wide", False),
                               ("sigmoid", "sigmoid", False)):  # fmt: skip
        batch = batch_of(shape)
        ways = {"free": Routing(replays=False), "replay": Routing(), "filter": Routing(plausibility=ALPHA)}
        arms = {f"{label} {way}": arm(trainer_of(shape, routing, fast=fast), batch) for way, routing in ways.items()}
        for measure in arms.values():
            measure()  # the first step makes buffers
        found = in_turn(arms, repeats=chosen.repeats)
        for way in ("replay", "filter"):
            values[f"{label}_{way}"] = ratio(found, f"{label} {way}", f"{label} free", "s")
        rows += found
    report("routing", rows, values, chosen.json)


if __name__ == "__main__":
    main()
