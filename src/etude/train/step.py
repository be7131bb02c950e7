"""One batch, one optimizer step.

    samples --pack--> micro-batches --forward, loss, backward--> gradient --clip, AdamW--> masters --round--> network
                          +-- look first, where what a token weighs depends on others (KL, ratios of sequences)

Everything that the step depends on is in the batch, the masters, the optimizer's state and the seed, so that a batch
that is replayed after a crash gives bitwise the same weights (on the same machine and number of threads).

Of several ranks each takes its share of the micro-batches, in step: every rank calls the same methods with the same
arguments. What it does not do: publish, save, read batch files (service.py), or keep ranks in step (lead.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etude.data.packing import MicroBatch, Packed, pack
from etude.errors import RunError
from etude.models.load import Model
from etude.train.agreement import agreement_row, live_tokens
from etude.train.corrections import Correction, sequence_weights
from etude.train.forward import Routing
from etude.train.kl import KL, kl_row, penalties
from etude.train.losses import LossOutput, policy_loss
from etude.train.objective import Objective
from etude.train.optimizer import Masters
from etude.train.ranks import Ranks
from etude.train.recipe import TrainRecipe
from etude.train.reference import Reference, logprobs_of
from etude.train.sharded import Sharded
from etude.types import Batch, Sample, Version
from etude.weights.pieces import Stored


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

    def join(self, ranks: Ranks, routes: torch.Tensor) -> None:
        """Put together what the ranks have. routes: `RouteTally.counts`."""
        for values in (self.loss, self._columns, routes):
            ranks.add(values)

    def columns(self) -> np.ndarray:
        """Log-probs, entropies and importance weights of all loss positions: [3, tokens]."""
        return self._columns.numpy()


@dataclass(frozen=True, slots=True)
class _Terms:
    """What the tokens of a micro-batch weigh. All [targets] float32."""

    advantages: np.ndarray
    weights: np.ndarray | None = None
    """Importance weights; None: the correction tells them from each token alone."""


class Trainer:
    """The weights and all that changes them. `step` counts optimizer steps in the weights' lineage."""

    def __init__(
        self,
        model: Model,
        recipe: TrainRecipe,
        *,
        publish_dtype: str,
        correction: Correction,
        kl: KL | None = None,
        routing: Routing | None = None,
        temperature: float = 1.0,
        ranks: Ranks | None = None,
    ) -> None:
        """kl: with a coefficient, `set_reference` comes before the first step. ranks: more than one shard the model,
        whose hub tensors are then no longer of use.

        Errors: ModelError for a model that cannot be trained.
        """
        torch.set_num_threads(recipe.threads)  # results depend on it
        self.model = model
        self.step = 0
        self.ranks = ranks or Ranks()
        several = self.ranks.count > 1
        routing = routing or Routing()
        self._kl = kl or KL()
        self._reference = Reference(model, self.ranks, routing) if self._kl.coef else None
        self._objective = Objective(model, fast=not several, routing=routing)
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

    def set_reference(self, tensors: Mapping[str, Stored]) -> None:
        """What the KL is measured from: a published version, by hub name. Errors: ModelError if it does not fit."""
        if self._reference is not None:
            self._reference.load(tensors)

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
        terms, seen = self._look(batch, packed.micro_batches)
        tally.lap("look")
        routes = self._objective.routes.counts
        routes.zero_()  # what a look replayed is replayed again
        self.masters.zero_grad()
        for number, is_mine in self.ranks.turns(len(packed.micro_batches)):
            micro, weighs, counted = packed.micro_batches[number], terms[number], routes.clone()
            self._backward(micro, weighs, batch.denominator, tally, number if is_mine else None)
            if not is_mine:
                routes.copy_(counted)
        tally.join(self.ranks, routes)
        norm = self.masters.step(batch.rate)
        tally.lap("optimize")
        row = self._row(batch, packed, tally, is_current) | seen | {"grad_norm": norm}
        self.step = batch.step
        seconds = time.perf_counter() - start
        return row | {"step_s": seconds, "trained_tokens_per_s": packed.unshared_tokens / seconds}

    @torch.no_grad()
    def score(self, sample: Sample) -> np.ndarray:
        """[loss positions] float32 log-probs of the sample's own tokens under the weights as they are."""
        packed = pack((sample,), max_cost=self._max_cost, pair_cost=self._pair_cost)
        (logprobs,) = logprobs_of(self._objective, packed.micro_batches, Ranks(), self._temperature)
        return logprobs

    def _look(self, batch: Batch, micros: Sequence[MicroBatch]) -> tuple[list[_Terms], dict[str, float]]:
        """What each micro-batch's tokens weigh, and numbers for the row; without a forward where none is needed.

        Errors: RunError for a sample that several versions sampled, where sequences are weighed.
        """
        by_sequence = self._correction.needs_sequences
        if self._reference is None and not by_sequence:
            return [_Terms(micro.advantages) for micro in micros], {}
        policy = list(logprobs_of(self._objective, micros, self.ranks, self._temperature))
        advantages, row = [micro.advantages for micro in micros], dict[str, float]()
        if self._reference is not None:
            fixed = logprobs_of(self._reference.objective, micros, self.ranks, self._temperature)
            gaps = [ours.astype(np.float64) - other for ours, other in zip(policy, fixed, strict=True)]
            advantages, row = self._less_kl(batch, micros, gaps)
        weights: list[np.ndarray | None] = [None] * len(micros)
        if by_sequence:
            _refuse_mixed(batch.samples)
            weights = [
                sequence_weights(ours, micro.logprobs, micro.samples, self._correction)
                for ours, micro in zip(policy, micros, strict=True)
            ]
        return [_Terms(*pair) for pair in zip(advantages, weights, strict=True)], row

    def _less_kl(
        self, batch: Batch, micros: Sequence[MicroBatch], gaps: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """The micro-batches' advantages less what the KL takes, and its row."""
        if not micros:
            return [], {}
        flat = np.concatenate(gaps)
        samples, places = (np.concatenate([getattr(micro, name) for micro in micros]) for name in ("samples", "places"))
        taken = self._kl.coef * penalties(self._kl.kind, flat, samples, places, batch.samples)
        parts = np.split(taken, np.cumsum([len(gap) for gap in gaps])[:-1])
        less = [(micro.advantages - part).astype(np.float32) for micro, part in zip(micros, parts, strict=True)]
        return less, kl_row(flat)

    def _backward(
        self, micro: MicroBatch, terms: _Terms, denominator: float, tally: _Tally, number: int | None
    ) -> None:
        """Number None: whose micro-batch it is computes it too."""
        advantages = np.zeros_like(terms.advantages) if number is None else terms.advantages
        weights = None if terms.weights is None else torch.from_numpy(terms.weights)

        def head(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tally.lap("forward")
            output = policy_loss(
                hidden,
                weight,
                torch.from_numpy(micro.targets),
                torch.from_numpy(advantages),
                torch.from_numpy(micro.logprobs),
                denominator=denominator,
                correction=self._correction,
                weights=weights,
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
            row |= self._objective.routes.row()
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
        }
        if self._correction.kind in ("truncated", "masked"):
            row["clipped_share"] = float((weights < ratios * (1 - 1e-6)).mean())
        return row | agreement_row(logprobs, behaviour, _live(batch.samples, micros, is_current))


def _refuse_mixed(samples: Sequence[Sample]) -> None:
    for sample in samples:
        if len({run.version for run in sample.versions}) > 1:
            raise RunError(
                f"sample {sample.origin.key}/{sample.origin.member} cannot be weighed as a sequence",
                cause="several versions sampled it",
                hint='set rl.max_staleness = 0, or rl.correction = "truncated"',
            )


def _live(
    samples: tuple[Sample, ...], micros: tuple[MicroBatch, ...], is_current: Callable[[Version], bool]
) -> np.ndarray:
    """`live_tokens` of all loss positions, in the order of the micro-batches."""
    by_sample = [live_tokens(sample, is_current) for sample in samples]
    starts = np.cumsum([0, *(len(flags) for flags in by_sample)])
    flat = np.concatenate(by_sample)
    return np.concatenate([flat[starts[micro.samples] + micro.places] for micro in micros])
