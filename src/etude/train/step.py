"""One batch, one optimizer step.

    samples --pack--> micro-batches --forward, loss, backward--> gradient --clip, AdamW--> masters --round--> network

Everything that the step depends on is in the batch, the masters, the optimizer's state and the seed, so that a batch
that is replayed after a crash gives bitwise the same weights (on the same machine and number of threads).

Of several ranks each takes its share of the micro-batches, in step: every rank calls the same methods with the same
arguments. What it does not do: publish, save, read batch files (service.py), or keep ranks in step (lead.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from etude.data.packing import MicroBatch, Packed, pack
from etude.errors import RunError
from etude.models.load import Model
from etude.train.agreement import agreement_row, live_tokens
from etude.train.losses import Correction, LossOutput, policy_loss, token_logprobs
from etude.train.objective import Objective
from etude.train.optimizer import Masters
from etude.train.ranks import Ranks
from etude.train.recipe import TrainRecipe
from etude.train.sharded import Sharded
from etude.types import Batch, Sample, Version


class _Tally:
    """What the micro-batches of a step report, and where its seconds went."""

    def __init__(self, micros: Sequence[MicroBatch]) -> None:
        self.loss = torch.zeros((), dtype=torch.float64)
        self._ends = np.cumsum([len(micro.targets) for micro in micros])
        self._columns = torch.zeros(3, int(self._ends[-1]) if micros else 0)
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def add(self, number: int, output: LossOutput) -> None:
        """Of micro-batch `number`."""
        end = int(self._ends[number])
        place = slice(end - len(output.logprobs), end)
        self.loss += output.loss.detach()
        self._columns[:, place] = torch.stack((output.logprobs, output.entropies, output.weights))

    def join(self, ranks: Ranks) -> None:
        """Put together what the ranks have."""
        ranks.add(self.loss)
        ranks.add(self._columns)

    def columns(self) -> np.ndarray:
        """Log-probs, entropies and importance weights of all loss positions: [3, tokens]."""
        return self._columns.numpy()


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
        ranks: Ranks | None = None,
    ) -> None:
        """ranks: more than one shard the model, whose hub tensors are then no longer of use.

        Errors: ModelError for a model that cannot be trained.
        """
        torch.set_num_threads(recipe.threads)  # results depend on it
        self.model = model
        self.step = 0
        self.ranks = ranks or Ranks()
        several = self.ranks.count > 1
        self._objective = Objective(model, fast=not several)
        self._correction = correction
        self._temperature = temperature
        self._max_cost = float(recipe.micro_batch_tokens)
        self._pair_cost = 1.0 / (6 * self._objective.width)
        shards, public, places = None, None, model.hub_places()
        if several:
            public = Model(copy.deepcopy(model.network), model.family) if self.ranks.rank == 0 else None
            shards = Sharded(self.ranks)
            shards.shard(self._objective, model.network.base_model)
            model.release_views()
        self.masters = Masters(model, recipe, publish_dtype, places=places, shards=shards, public=public)

    def train(self, batch: Batch, *, is_current: Callable[[Version], bool] = lambda _: False) -> dict[str, float]:
        """Take the step that `batch` makes; returns its row of numbers.

        is_current: whether a version holds the weights that go in. Errors: RunError for a batch of another step, a
        sample that cannot be trained on, or a gradient that is not finite (the weights are as before).
        """
        if batch.step != self.step + 1:
            raise RunError(f"batch {batch.step} cannot be trained on", cause=f"the trainer is at step {self.step}")
        start = time.perf_counter()
        torch.manual_seed((batch.seed << 20) + batch.step)
        packed = pack(batch.samples, max_cost=self._max_cost, pair_cost=self._pair_cost)
        tally = _Tally(packed.micro_batches)
        tally.seconds["pack"] = time.perf_counter() - start
        self.masters.zero_grad()
        for number, is_mine in self._share(len(packed.micro_batches)):
            self._backward(packed.micro_batches[number], batch.denominator, tally, number if is_mine else None)
        tally.join(self.ranks)
        norm = self.masters.step(batch.rate)
        tally.lap("optimize")
        row = self._row(batch, packed, tally, is_current) | {"grad_norm": norm}
        self.step = batch.step
        seconds = time.perf_counter() - start
        return row | {"step_s": seconds, "trained_tokens_per_s": packed.unshared_tokens / seconds}

    @torch.no_grad()
    def score(self, sample: Sample) -> np.ndarray:
        """[loss positions] float32 log-probs of the sample's own tokens under the weights as they are."""
        packed = pack((sample,), max_cost=self._max_cost, pair_cost=self._pair_cost)
        (micro,) = packed.micro_batches
        targets = torch.from_numpy(micro.targets)

        def head(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (token_logprobs(hidden, weight, targets, self._temperature),)

        (logprobs,) = self._objective(micro, head)
        return np.array(logprobs.numpy())

    def _share(self, total: int) -> Iterator[tuple[int, bool]]:
        """(number, is it this rank's): all ranks compute equally many, one that has too few another's, for nothing."""
        rank, count = self.ranks.rank, self.ranks.count
        for first in range(0, total, count):
            is_mine = first + rank < total
            yield first + rank if is_mine else first, is_mine

    def _backward(self, micro: MicroBatch, denominator: float, tally: _Tally, number: int | None) -> None:
        """Number None: whose micro-batch it is computes it too."""

        def head(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tally.lap("forward")
            output = policy_loss(
                hidden,
                weight,
                torch.from_numpy(micro.targets),
                torch.from_numpy(np.zeros_like(micro.advantages) if number is None else micro.advantages),
                torch.from_numpy(micro.logprobs),
                denominator=denominator,
                correction=self._correction,
                temperature=self._temperature,
            )
            tally.lap("loss")
            return output.loss, output.logprobs, output.entropies, output.weights

        output = LossOutput(*self._objective(micro, head))
        output.loss.backward()
        if number is not None:
            tally.add(number, output)
        tally.lap("backward")

    def _row(
        self, batch: Batch, packed: Packed, tally: _Tally, is_current: Callable[[Version], bool]
    ) -> dict[str, float]:
        micros = packed.micro_batches
        row = {
            "loss": float(tally.loss),
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
        logprobs, entropies, weights = tally.columns()
        behaviour = np.concatenate([micro.logprobs for micro in micros])
        ratios = np.exp(logprobs.astype(np.float64) - behaviour)
        row |= {
            "entropy": float(entropies.mean()),
            "ratio_mean": float(ratios.mean()),
            "ratio_p99": float(np.quantile(ratios, 0.99)),
            "ratio_max": float(ratios.max()),
            "clipped_share": float((weights < ratios * (1 - 1e-6)).mean()),
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
