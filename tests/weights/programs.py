"""A trainer and an engine as processes of their own, around one store: `python programs.py trainer|engine ...`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from etude.inference.recipe import EngineRecipe
from etude.inference.torch_engine import TorchEngine
from etude.models.load import Model
from etude.protocols import GenerateRequest
from etude.train.corrections import Correction
from etude.train.optimizer import to_stored
from etude.train.recipe import TrainRecipe
from etude.train.service import open_trainer
from etude.train.step import Trainer
from etude.types import Manifest
from etude.weights.manifests import digest_bytes
from etude.weights.recipe import WeightsRecipe
from etude.weights.replica import Replica
from etude.weights.store import open_store
from etude.weights.subscribe import Subscriber
from tiny import tiny_model
from train.batches import make_batch

FAMILY = "qwen3_moe"


def digest_of(model: Model) -> str:
    tensors = model.hub_tensors()
    return digest_bytes(b"".join(to_stored(tensors[name]).array.tobytes() for name in sorted(tensors)))


def train(url: str, folder: Path, steps: int, pause_s: float) -> None:
    """Every step is published; every third is saved. Prints the digest of what engines must hold in the end."""
    recipe = TrainRecipe(lr=1e-5, micro_batch_tokens=200)
    trainer = Trainer(tiny_model(FAMILY), recipe, publish_dtype="bfloat16", correction=Correction())
    service = open_trainer(
        trainer, store=open_store(url), checkpoints=folder / "checkpoints", checkpoint_every=3,
        weights=WeightsRecipe(publish_dtype="bfloat16", anchor_every=25),
    )  # fmt: skip
    for step in range(service.state().step + 1, steps + 1):
        service.step(make_batch(tiny_model(FAMILY), step))
        service._background.wait()
        time.sleep(pause_s)
    state = service.finish()
    held = trainer.masters.published()
    digest = digest_bytes(b"".join(held[name].array.tobytes() for name in sorted(held)))
    service.close()
    print(json.dumps({"version": state.version.name, "step": state.step, "digest": digest}), flush=True)


async def serve(url: str, name: str, steps: int, at_once: int) -> None:
    """Follow the store and answer requests without pause, until `steps` is served. Prints what happened."""
    torch.set_num_threads(1)
    model = tiny_model(FAMILY, dtype="bfloat16")
    store = open_store(url)
    replica = Replica(store, threads=1)

    async def fetch(manifest: Manifest) -> object:
        return await asyncio.to_thread(replica.fetch, manifest)

    engine = TorchEngine(model, EngineRecipe(max_concurrent=at_once, threads=1), fetch=fetch)  # type: ignore[arg-type]
    found = {"requests": 0, "failed": 0, "spanning": 0, "swaps": 0, "restarts": 0, "pause_ms": 0.0}
    is_over = asyncio.Event()

    async def ask(number: int) -> None:
        while not is_over.is_set():
            request = GenerateRequest(
                request_id=f"{name}-{number}-{found['requests']}", context_id=f"{name}-{number}",
                ids=np.arange(10, 20, dtype=np.int32), max_new_tokens=100, stop_ids=(), keep_context=False,
            )  # fmt: skip
            try:
                chunks = [chunk async for chunk in engine.generate(request)]
            except Exception as error:
                print(repr(error), file=sys.stderr, flush=True)
                found["failed"] += 1
                continue
            found["requests"] += 1
            found["spanning"] += len({run.version for chunk in chunks for run in chunk.versions}) > 1

    asking: list[asyncio.Task[None]] = []
    async for manifest in Subscriber(store, holder=name, poll_s=0.05).manifests():
        await engine.load(manifest)
        asking = asking or [asyncio.create_task(ask(number)) for number in range(at_once)]
        print(f"{name} serves {manifest.version.name}", file=sys.stderr, flush=True)
        if manifest.version.step == steps:
            await asyncio.sleep(1.0)
            break
    is_over.set()
    await asyncio.gather(*asking)
    stats = await engine.stats()
    await engine.close()
    found |= {"swaps": stats.swaps, "pause_ms": 1e3 * stats.swap_pause_s / max(stats.swaps, 1),
              "restarts": replica.restarts, "bytes": replica.nbytes}  # fmt: skip
    print(json.dumps(found | {"digest": digest_of(model), "version": stats.version.name if stats.version else ""}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["trainer", "engine"])
    parser.add_argument("url")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--name", default="engine-0")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pause", type=float, default=0.3)
    parser.add_argument("--at-once", type=int, default=8)
    chosen = parser.parse_args()
    if chosen.role == "trainer":
        train(chosen.url, chosen.folder, chosen.steps, chosen.pause)
    else:
        asyncio.run(serve(chosen.url, chosen.name, chosen.steps, chosen.at_once))


if __name__ == "__main__":
    main()
