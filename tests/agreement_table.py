"""The table of docs/support.md: how far trainer and engine are apart on the same tokens.

    python tests/agreement_table.py            # all models; the tiny ones and the nano take seconds

The engine samples replies to random prompts, in one batch; the trainer scores the same tokens with the routes that the
engine recorded (forced) and with those that it would choose itself (free). In float32, on one machine.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine_driver import START, Reply, reply, serving
from etude.models.load import Model, load_model
from etude.train.corrections import Correction
from etude.train.recipe import TrainRecipe
from etude.train.step import Trainer
from etude.types import KVEpoch, Origin, Run, Sample
from mixture import write_mixture
from smollm2 import smollm2_folder
from tiny import ALL, tiny_model

HEADER = (
    "| model | parameters | tokens | forced: largest | mean | free: largest | mean |\n|---|---|---|---|---|---|---|"
)
_REPLIES, _TOKENS = 24, 32


@dataclass(frozen=True)
class Agreement:
    """|log-prob of the trainer - log-prob of the engine|, over all sampled tokens."""

    name: str
    parameters: int
    forced: np.ndarray
    free: np.ndarray | None
    """None for a model without routes."""

    def row(self) -> str:
        free = "no routes | " if self.free is None else f"{self.free.max():.1e} | {self.free.mean():.1e}"
        return (
            f"| {self.name} | {self.parameters:,} | {self.forced.size} | {self.forced.max():.1e} "
            f"| {self.forced.mean():.1e} | {free} |"
        )


def measure(name: str, load: Callable[[], Model]) -> Agreement:
    """`load` is called twice: engine and trainer own a model each."""
    replies = asyncio.run(_sampled(load()))
    trainer = Trainer(load(), TrainRecipe(), publish_dtype="float32", correction=Correction())
    samples = [_sample(number, one) for number, one in enumerate(replies)]
    free = None
    if trainer.model.num_moe_layers:
        free = _differences(trainer, [msgspec.structs.replace(sample, routes=None) for sample in samples])
    parameters = sum(parameter.numel() for parameter in trainer.model.network.parameters())
    return Agreement(name, parameters, _differences(trainer, samples), free)


async def _sampled(model: Model) -> list[Reply]:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, model.vocab_size, draw.integers(4, 60)).astype(np.int32) for _ in range(_REPLIES)]
    async with serving(model, max_concurrent=_REPLIES) as engine:
        return list(
            await asyncio.gather(
                *(reply(engine, ids, context=f"c{n}", tokens=_TOKENS) for n, ids in enumerate(prompts))
            )
        )


def _sample(number: int, one: Reply) -> Sample:
    first = len(one.window) - len(one.ids)
    mask = np.arange(len(one.window)) >= first
    versions = (Run(start=0, version=START),)
    return Sample(
        ids=one.window,
        mask=mask,
        logprobs=np.concatenate([np.zeros(first, np.float32), one.logprobs]),
        advantage=0.0,
        versions=versions,
        kv_epochs=(KVEpoch(first=first, runs=versions),),
        routes=one.last.routes,
        origin=Origin(key=str(number), member=0, context=0),
    )


def _differences(trainer: Trainer, samples: list[Sample]) -> np.ndarray:
    return np.concatenate([np.abs(trainer.score(sample) - sample.logprobs[sample.mask]) for sample in samples])


def rows() -> Iterator[Agreement]:
    for family in ALL:
        yield measure(f"{family}, tiny", lambda family=family: tiny_model(family))  # type: ignore[misc]
    yield measure("etude-nano", lambda: load_model("etude-nano"))
    with tempfile.TemporaryDirectory() as folder:
        mixture = str(write_mixture(Path(folder)))
        yield measure("etude-nano, upcycled to four experts", lambda: load_model(mixture))
    yield measure("SmolLM2-135M", lambda: load_model(str(smollm2_folder())))


def main() -> None:
    torch.set_num_threads(2)
    print(HEADER)
    for agreement in rows():
        print(agreement.row())
        sys.stdout.flush()


if __name__ == "__main__":
    main()
