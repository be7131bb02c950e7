"""Small random batches for a tiny model, as the engine and the loop would make them."""

from __future__ import annotations

import numpy as np
import torch

from etude.models.load import Model
from etude.models.routing import capture
from etude.types import Batch, KVEpoch, Origin, Routes, Run, Sample, Version

START = Version(incarnation=1, n=0, step=0)


@torch.no_grad()
def score(model: Model, ids: np.ndarray) -> tuple[np.ndarray, Routes | None]:
    """Log-probs of ids under a model that was never made ready for packed rows, and the routes that it took."""
    row = torch.from_numpy(ids.astype(np.int64))[None]
    if not model.num_moe_layers:
        logits, routes = model.network(input_ids=row).logits[0], None
    else:
        with capture(model) as captured:
            logits = model.network(input_ids=row).logits[0]
        experts = captured.experts()[:-1].numpy().astype(np.uint8)
        routes = Routes(experts=experts, valid=np.ones(len(experts), bool))
    logs = torch.log_softmax(logits, -1)[:-1].gather(-1, row[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], logs.numpy()]).astype(np.float32), routes


def make_batch(
    model: Model,
    step: int,
    *,
    groups: int = 3,
    size: int = 3,
    seed: int = 0,
    version: Version = START,
    stale: float = 0.0,
) -> Batch:
    """Groups of `size` samples with a shared prompt, several sampled spans each; mu is the model's own, shifted by up
    to `stale`."""
    random = np.random.default_rng(100 * seed + step)
    samples = []
    for group in range(groups):
        prompt = random.integers(0, model.vocab_size, random.integers(3, 9))
        rewards = random.normal(size=size)
        for member in range(size):
            ids = np.concatenate([prompt, random.integers(0, model.vocab_size, random.integers(4, 12))]).astype(
                np.int32
            )
            mask = np.zeros(len(ids), bool)
            mask[len(prompt) :] = random.random(len(ids) - len(prompt)) < 0.7
            mask[len(prompt)] = True
            logprobs, routes = score(model, ids)
            logprobs = logprobs + stale * random.normal(size=len(ids)).astype(np.float32)
            samples.append(
                Sample(
                    ids=ids, mask=mask, logprobs=np.where(mask, logprobs, 0).astype(np.float32),
                    advantage=float(rewards[member] - rewards.mean()), versions=(Run(start=0, version=version),),
                    kv_epochs=(KVEpoch(first=0, runs=(Run(start=0, version=version),)),), routes=routes,
                    origin=Origin(key=f"{step}-{group}", member=member, context=0),
                )
            )  # fmt: skip
    return Batch(step=step, samples=tuple(samples), denominator=float(groups * size * 8), seed=seed)
