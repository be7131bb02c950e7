"""Seconds of a reinforcement-learning step on fixed completions, beside TRL's GRPOTrainer.

    python benchmarks/rl_step.py --json FILE --trl PYTHON [--models nano 25M] [--completions 64 256 400]

A step: GROUPS groups of 8 completions of one 400-token prompt each, one gradient, one AdamW update; generation is not
part of it. TRL runs in a Python of its own (trl, accelerate, datasets), fed the same ids and rewards through its
`rollout_func`, with the same loss (loss_type dr_grpo, no scaling of rewards, beta 0, one iteration, no recomputation),
and the micro-batch that is fastest for it of those tried. Both gradients' norms are compared before anything is timed.

Bound: what sharing the prompt in one forward can save over plain packing, in tokens: 8 (400 + c) / (400 + 8 c), that is
5.4x, 2.1x and 1.8x for completions c of 64, 256 and 400. The goal is to be ahead of TRL by 80% of that bound or more.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Row, arguments, report
from transformers import Qwen3Config

from etude.models.load import Model, load_model, model_from_config
from etude.train.corrections import Correction
from etude.train.recipe import TrainRecipe
from etude.train.step import Trainer
from etude.types import Batch, Origin, Run, Sample, Version

GROUPS, SIZE, PROMPT = 4, 8, 400
THREADS = 2
START = Version(incarnation=1, n=1, step=0)


def model_of(name: str) -> Model:
    """The shipped nano, or a dense network of 25 million parameters with random weights."""
    if name == "nano":
        return load_model("etude-nano")
    config = Qwen3Config(
        vocab_size=8192, hidden_size=448, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=56, intermediate_size=1344, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    return model_from_config(config, seed=0)


def work_of(vocab: int, completion: int) -> dict[str, Any]:
    """Prompts [GROUPS][PROMPT], completions [GROUPS * SIZE][completion], rewards [GROUPS * SIZE]."""
    rng = np.random.default_rng(completion)
    return {
        "prompts": rng.integers(10, vocab - 10, (GROUPS, PROMPT)).tolist(),
        "completions": rng.integers(10, vocab - 10, (GROUPS * SIZE, completion)).tolist(),
        "rewards": rng.integers(0, 2, GROUPS * SIZE).astype(float).tolist(),
    }


def batch_of(work: Mapping[str, Any], step: int) -> Batch:
    """The work as a batch of Etude's. Advantages are rewards less their group's mean."""
    completion = len(work["completions"][0])
    samples = []
    for number, ids in enumerate(work["completions"]):
        group = number // SIZE
        rewards = work["rewards"][group * SIZE : (group + 1) * SIZE]
        mask = np.arange(PROMPT + completion) >= PROMPT
        samples.append(
            Sample(
                ids=np.array([*work["prompts"][group], *ids], np.int32),
                mask=mask,
                logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),  # not used: the correction is off
                advantage=work["rewards"][number] - sum(rewards) / SIZE,
                versions=(Run(start=PROMPT, version=START),),
                kv_epochs=(),
                routes=None,
                origin=Origin(key=str(group), member=number % SIZE, context=0),
            )
        )
    return Batch(step=step, samples=tuple(samples), denominator=float(GROUPS * SIZE * completion), seed=0)


class Etude:
    """A trainer that takes the same step again and again."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(THREADS)
        recipe = TrainRecipe(lr=1e-6, threads=THREADS)
        self.trainer = Trainer(model_of(name), recipe, publish_dtype="float32", correction=Correction(kind="none"))

    def step(self, work: Mapping[str, Any]) -> tuple[float, float]:
        """(seconds, norm of the gradient)."""
        batch = batch_of(work, self.trainer.step + 1)
        start = time.perf_counter()
        row = self.trainer.train(batch)
        return time.perf_counter() - start, row["grad_norm"]


def trl_steps(python: str, name: str, work: Mapping[str, Any], steps: int, rows: int) -> list[tuple[float, float]]:
    """(seconds, norm of the gradient) of each step, the first one left out; `rows` sequences go through at once."""
    with tempfile.TemporaryDirectory() as folder:
        model_of(name).network.save_pretrained(folder)
        given = {"model": folder, "work": work, "steps": steps, "rows": rows, "threads": THREADS, "size": SIZE}
        path = Path(folder) / "work.json"
        path.write_text(json.dumps(given))
        program = str(Path(__file__).with_name("trl_peer.py"))
        done = subprocess.run([python, program, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"TRL failed: {done.stderr[-3000:]}")
    return [(seconds, norm) for seconds, norm in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["nano", "25M"], choices=["nano", "25M"])
    parser.add_argument("--completions", nargs="+", type=int, default=[64, 256, 400])
    parser.add_argument("--trl", required=True, help="Python of a virtual environment that has trl")
    chosen = parser.parse_args()
    rows: list[Row] = []
    values: dict[str, float] = {}
    for name in chosen.models:
        ours = Etude(name)
        for completion in chosen.completions:
            label = f"{name}_{completion}"
            work = work_of(ours.trainer.model.vocab_size, completion)
            best = min((8, 16, 32), key=lambda at_once: min(trl_steps(chosen.trl, name, work, 2, at_once))[0])
            ours.step(work)
            mine, theirs = [], []
            for _ in range(chosen.repeats):
                mine.append(ours.step(work))
                theirs += trl_steps(chosen.trl, name, work, 1, best)
            if abs(mine[0][1] - theirs[0][1]) > 0.02 * theirs[0][1]:
                raise SystemExit(f"{label}: the norms of the gradients differ: {mine[0][1]} and {theirs[0][1]}")
            for arm, found in (("etude", mine), (f"trl, {best} at once", theirs)):
                raw = [seconds for seconds, _ in found]
                rows.append({"work": label, "arm": arm, "quantity": f"{label} s", "median": float(np.median(raw)),
                             "min": min(raw), "max": max(raw), "raw": raw})  # fmt: skip
            bound = SIZE * (PROMPT + completion) / (PROMPT + SIZE * completion)
            ahead = float(np.median([t / m for (m, _), (t, _) in zip(mine, theirs, strict=True)]))
            values[label] = ahead / bound
            print(f"{label}: {ahead:.2f}x TRL, bound {bound:.2f}x, gradient norms {mine[0][1]:.4f} {theirs[0][1]:.4f}")
    missing = {f"{name}_{completion}": float("nan") for name in ("nano", "25M") for completion in (64, 256, 400)}
    report("rl_step", rows, missing | values, chosen.json)


if __name__ == "__main__":
    main()
