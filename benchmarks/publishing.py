"""What publishing every step costs training: the time of a step with a version being published beside it, and without.

    python benchmarks/publishing.py --json FILE [--pairs 40]

The trainer's thread is pinned to one core, everything that publishes to another. Steps come in pairs: one with nothing
going on beside it, and one that hands its snapshot over first (training waits for that copy) and runs while the version
is coded, uploaded and committed; which comes first alternates. The ratio is that of the pair. Models: the nano, and a
dense network of 25 million parameters published in bfloat16; 8 samples of 256 tokens a step.

Goal: at most 1.02, with the 95% interval of the mean ratio beside it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measuring import Row, arguments, report
from rl_step import model_of

from etude.train.corrections import Correction
from etude.train.recipe import TrainRecipe
from etude.train.step import Trainer
from etude.types import Batch, Origin, Run, Sample, Version
from etude.weights.background import Background
from etude.weights.publish import Publisher, take_incarnation
from etude.weights.store import open_store

SAMPLES, LENGTH, PROMPT = 8, 256, 64
START = Version(incarnation=1, n=1, step=0)


def batch_of(vocab: int, step: int) -> Batch:
    rng = np.random.default_rng(step)
    mask = np.arange(LENGTH) >= PROMPT
    samples = tuple(
        Sample(ids=rng.integers(10, vocab - 10, LENGTH).astype(np.int32), mask=mask,
               logprobs=np.where(mask, -1.0, 0.0).astype(np.float32), advantage=float(number % 2) - 0.5,
               versions=(Run(start=PROMPT, version=START),), kv_epochs=(), routes=None,
               origin=Origin(key=str(number), member=0, context=0))
        for number in range(SAMPLES)
    )  # fmt: skip
    return Batch(step=step, samples=samples, denominator=float(SAMPLES * (LENGTH - PROMPT)), seed=0)


class Arm:
    """A trainer on one core, a publisher on the other."""

    def __init__(self, name: str, dtype: str, folder: Path, rate: float) -> None:
        cores = sorted(os.sched_getaffinity(0))
        recipe = TrainRecipe(lr=rate, threads=1, micro_batch_tokens=4000)
        self.trainer = Trainer(model_of(name), recipe, publish_dtype=dtype, correction=Correction(kind="none"))
        self._vocab = self.trainer.model.vocab_size
        store = open_store(f"file://{folder}")
        os.sched_setaffinity(0, cores[1:2] or cores)  # threads that are made now, and those that they make, stay there
        self._background = Background(Publisher(store, take_incarnation(store), anchor_every=1000))
        os.sched_setaffinity(0, cores[:1])
        self.publish_s: list[float] = []

    def step(self, *, publishes: bool) -> float:
        """Seconds of one step; what it began to publish is public when this returns."""
        batch = batch_of(self._vocab, self.trainer.step + 1)
        start = time.perf_counter()
        if publishes:
            self._background.submit(self.trainer.step, self.trainer.masters.published())
        self.trainer.train(batch)
        seconds = time.perf_counter() - start
        self._background.wait()
        if publishes:
            assert self._background.last is not None
            self.publish_s.append(self._background.last.seconds)
        return seconds

    def close(self) -> None:
        self._background.close()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    chosen = parser.parse_args()
    cores = os.sched_getaffinity(0)
    rows: list[Row] = []
    values: dict[str, float] = {}
    for name, dtype, rate in (("nano", "float32", 2e-4), ("25M", "bfloat16", 3e-6)):
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            arm = Arm(name, dtype, Path(folder), rate)
            for _ in range(3):  # the first version is an anchor; the first steps make buffers
                arm.step(publishes=True)
            arm.publish_s.clear()
            with_, without = [], []
            for pair in range(chosen.pairs):
                for publishes in (True, False) if pair % 2 else (False, True):
                    (with_ if publishes else without).append(arm.step(publishes=publishes))
            arm.close()
        os.sched_setaffinity(0, cores)
        ratios = np.array(with_) / np.array(without)
        half = 1.96 * ratios.std(ddof=1) / len(ratios) ** 0.5
        values[name] = float(np.median(ratios))
        print(f"{name}: mean ratio {ratios.mean():.4f} ({ratios.mean() - half:.4f} to {ratios.mean() + half:.4f})")
        for label, raw in (("with", with_), ("without", without), ("publishing", arm.publish_s)):
            rows.append({"arm": f"{name} {label}", "quantity": "s", "median": float(np.median(raw)), "min": min(raw),
                         "max": max(raw), "raw": raw})  # fmt: skip
    report("publishing", rows, values, chosen.json)


if __name__ == "__main__":
    main()
