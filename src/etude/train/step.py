"""One batch, one optimizer step.

    samples --pack--> micro-batches --forward, loss, backward--> gradient --clip, AdamW--> masters --round--> network

Everything that the step depends on is in the batch, the masters, the optimizer's state and the seed, so that a batch
that is replayed after a crash gives bitwise the same weights (on the same machine and number of threads).

What it does not do: publish, save, or read batch files (service.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from etude.data.packing import MicroBatch, Packed, pack
from etude.errors import RunError
from etude.models.load import Model
from etude.train.agreement import agreement_row, live_tokens
from etude.train.forward import PackedForward
from etude.train.losses import Correction, LossOutput, policy_loss, token_logprobs
from etude.train.optimizer import Masters
from etude.train.recipe import TrainRecipe
from etude.types import Batch, Sample, Version


@dataclass(slots=True)
class _Tally:
    """What the micro-batches of a step report, and where its seconds went."""

    loss: float = 0.0
    logprobs: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray] = field(default_factory=list)
    weights: list[np.ndarray] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def add(self, output: LossOutput) -> None:
        self.loss += float(output.loss.detach())
        self.logprobs.append(output.logprobs.numpy())
        self.entropies.append(output.entropies.numpy())
        self.weights.append(output.weights.numpy())


class Trainer:
    """The weights and all that changes them. `step` counts optimizer steps in the weights' lineage."""

    def __init__(
        self,
        model: Model,
        recipe: TrainRecipe,
        *,
        publish_dtype: str,
        correction: Correction,
        temperature: float = 1.0,
    ) -> None:
        """Errors: ModelError for a model that cannot be trained."""
        torch.set_num_threads(recipe.threads)  # results depend on it
        self.model = model
        self.step = 0
        self.masters = Masters(model, recipe, publish_dtype)
        self._forward = PackedForward(model)
        self._correction = correction
        self._temperature = temperature
        self._max_cost = float(recipe.micro_batch_tokens)
        self._pair_cost = 1.0 / (6 * self._forward.head.shape[1])

    def train(self, batch: Batch, *, is_current: Callable[[Version], bool] = lambda _: False) -> dict[str, float]:
        """Take the step that `batch` makes; returns its row of numbers.

        is_current: whether a version holds the weights that go in. Errors: RunError for a batch of another step, a
        sample that cannot be trained on, or a gradient that is not finite (the weights are as before).
        """
        if batch.step != self.step + 1:
            raise RunError(f"batch {batch.step} cannot be trained on", cause=f"the trainer is at step {self.step}")
        start = time.perf_counter()
        torch.manual_seed((batch.seed << 20) + batch.step)
        tally = _Tally()
        packed = pack(batch.samples, max_cost=self._max_cost, pair_cost=self._pair_cost)
        tally.lap("pack")
        self.masters.zero_grad()
        for micro in packed.micro_batches:
            self._backward(micro, batch.denominator, tally)
        norm = self.masters.step(batch.rate)
        tally.lap("optimize")
        row = self._row(batch, packed, tally, is_current) | {"grad_norm": norm}
        self.step = batch.step
        seconds = time.perf_counter() - start
        return row | {"step_s": seconds, "tokens_per_s": packed.unshared_tokens / seconds}

    @torch.no_grad()
    def score(self, sample: Sample) -> np.ndarray:
        """[loss positions] float32 log-probs of the sample's own tokens under the weights as they are."""
        packed = pack((sample,), max_cost=self._max_cost, pair_cost=self._pair_cost)
        (micro,) = packed.micro_batches
        targets = torch.from_numpy(micro.targets)
        logprobs = token_logprobs(self._forward(micro), self._forward.head, targets, self._temperature)
        return logprobs.numpy()

    def _backward(self, micro: MicroBatch, denominator: float, tally: _Tally) -> None:
        hidden = self._forward(micro)
        tally.lap("forward")
        output = policy_loss(
            hidden,
            self._forward.head,
            torch.from_numpy(micro.targets),
            torch.from_numpy(micro.advantages),
            torch.from_numpy(micro.logprobs),
            denominator=denominator,
            correction=self._correction,
            temperature=self._temperature,
        )
        tally.lap("loss")
        output.loss.backward()
        tally.add(output)
        tally.lap("backward")

    def _row(
        self, batch: Batch, packed: Packed, tally: _Tally, is_current: Callable[[Version], bool]
    ) -> dict[str, float]:
        micros = packed.micro_batches
        row = {
            "loss": tally.loss,
            "rate": batch.rate,
            "samples": float(len(batch.samples)),
            "tokens": float(packed.unshared_tokens),
            "forward_tokens": float(packed.tokens),
            "loss_tokens": float(sum(len(micro.targets) for micro in micros)),
            "split_groups": float(packed.split_groups),
            "micro_batches": float(len(micros)),
        }
        if self.model.num_moe_layers:
            row["missing_route_rows"] = float(sum(int((~micro.valid).sum()) for micro in micros))
        row |= {f"{phase}_s": seconds for phase, seconds in tally.seconds.items()}
        if not micros:
            return row
        logprobs, behaviour = np.concatenate(tally.logprobs), np.concatenate([micro.logprobs for micro in micros])
        ratios = np.exp(logprobs.astype(np.float64) - behaviour)
        row |= {
            "entropy": float(np.concatenate(tally.entropies).mean()),
            "ratio_mean": float(ratios.mean()),
            "ratio_p99": float(np.quantile(ratios, 0.99)),
            "ratio_max": float(ratios.max()),
            "clipped_share": float((np.concatenate(tally.weights) < ratios * (1 - 1e-6)).mean()),
        }
        if self._correction.kind == "none":
            row["clipped_share"] = 0.0
        return row | agreement_row(logprobs, behaviour, _live(batch.samples, micros, is_current))


def _live(
    samples: tuple[Sample, ...], micros: tuple[MicroBatch, ...], is_current: Callable[[Version], bool]
) -> np.ndarray:
    """`live_tokens` of all loss positions, in the order of the micro-batches."""
    by_sample = [live_tokens(sample, is_current) for sample in samples]
    starts = np.cumsum([0, *(len(flags) for flags in by_sample)])
    flat = np.concatenate(by_sample)
    return np.concatenate([flat[starts[micro.samples] + micro.places] for micro in micros])
