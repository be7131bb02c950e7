"""Fit a small network to a corpus until the clock says stop: what pretraining and fine-tuning share.

    corpus --batches of documents--> micro-batches, packed --ranks, a core each--> gradients, summed
           --Muon and AdamW, at a rate that the clock sets--> ... --every evaluate_every_s--> measure, checkpoint

The same command continues from the checkpoint. Since the clock ends it, the result depends on the machine's speed;
everything else (order, initial weights, formulas) is fixed by the recipe.

What it does not do: reinforcement learning, several machines, 16-bit weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.data.corpus import FILE, FIX, UNTRAINED, Corpus
from etude.data.packing import Tree
from etude.errors import RunError
from etude.models.load import Model, model_from_config
from etude.protocols import Recorder
from etude.train.forward import PackedForward
from etude.train.muon import Muon
from etude.train.pretrain_recipe import ScheduleSettings
from etude.train.ranks import Ranks, together
from etude.types import FORMAT

Progress = Callable[[float], None]
"""Called with the share that is done."""


@dataclasses.dataclass(kw_only=True)
class State:
    """Where a fit stands; all of it is in the checkpoint."""

    step: int = 0
    tokens: int = 0
    next_document: int = 0
    """Counts on over epochs."""
    elapsed_s: float = 0.0
    format: int = FORMAT


def rate(share: float, schedule: ScheduleSettings) -> float:
    """Factor of the learning rates at `share` of the time: a rise, a plateau, a straight line to 0."""
    rise = share / schedule.warmup_share if schedule.warmup_share else 1.0
    fall = (1.0 - share) / schedule.decay_share if schedule.decay_share else 1.0
    return max(0.0, min(1.0, rise, fall))


def micro_batches(corpus: Corpus, documents: list[int], micro_tokens: int, multiple: int = 1) -> list[list[int]]:
    """Documents of like length together, the longest first.

    All hold about the same number of tokens, at most about `micro_tokens`, and there are a multiple of `multiple` of
    them (where there are as many documents), so that as many ranks end together.
    """
    lengths = {number: int(corpus.starts[number + 1] - corpus.starts[number]) for number in documents}
    ordered = sorted(documents, key=lambda number: -lengths[number])
    total = sum(lengths[number] for number in ordered)
    count = min(len(ordered), multiple * math.ceil(total / (multiple * micro_tokens)))
    rows: list[list[int]] = [[]]
    filled = 0
    for left, number in zip(range(len(ordered), 0, -1), ordered, strict=True):
        missing = count - len(rows)
        if rows[-1] and missing and (filled >= total * len(rows) / count or left == missing):
            rows.append([])
        rows[-1].append(number)
        filled += lengths[number]
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRow:
    """Documents end to end, as one row for `train.forward`."""

    ids: np.ndarray
    """[tokens] int64."""
    positions: np.ndarray
    """[tokens] int64: place in the own document."""
    trees: tuple[Tree, ...]
    """One a document."""
    marks: np.ndarray
    """[tokens] uint8, of the token that the one here predicts; the last of a document predicts none: UNTRAINED."""
    documents: int


def pack(corpus: Corpus, documents: list[int]) -> PackedRow:
    """Documents `documents`, in their order."""
    spans = [slice(int(corpus.starts[number]), int(corpus.starts[number + 1])) for number in documents]
    lengths = [span.stop - span.start for span in spans]
    marks = [np.append(corpus.marks[span][1:], np.uint8(UNTRAINED)) for span in spans]
    starts = [0, *itertools.accumulate(lengths)]
    return PackedRow(
        ids=np.concatenate([corpus.ids[span] for span in spans]).astype(np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        trees=tuple(Tree(start, 0, (length,)) for start, length in zip(starts, lengths, strict=False)),
        marks=np.concatenate(marks),
        documents=len(documents),
    )


def _loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the cross-entropies. hidden [N, D], head [V, D], targets [N], weights [N]."""
    return (F.cross_entropy(hidden @ head.t(), targets, reduction="none") * weights).sum()


class Fit:
    """One network on its way through one corpus."""

    def __init__(
        self, model: Model, corpus: Corpus, schedule: ScheduleSettings, checkpoint: Path, ranks: Ranks | None = None
    ) -> None:
        """Takes the checkpoint up if there is one. Of several ranks, all start with the weights of the first.

        Errors: RunError if the checkpoint is damaged or of another shape.
        """
        if not len(corpus):
            raise RunError(f"{corpus.name or 'the corpus'} holds no documents", hint="build it again")
        self.model, self.corpus, self.schedule = model, corpus, schedule
        self.state = State()
        self._lengths = np.diff(corpus.starts)
        self._ranks = ranks or Ranks()
        self._checkpoint = checkpoint
        network: Any = model.network
        self._forward = PackedForward(model)
        self._head = self._forward.head
        self.params = [p for p in network.parameters()]
        is_matrix = {id(p): p.dim() >= 2 and p is not self._head and not name.endswith("gate.weight")
                     for name, p in network.named_parameters()}  # fmt: skip
        self._muon = Muon([p for p in self.params if is_matrix[id(p)]], lr=0.0, weight_decay=schedule.weight_decay)
        self._adamw = torch.optim.AdamW([p for p in self.params if not is_matrix[id(p)]], lr=0.0, betas=(0.9, 0.95),
                                        weight_decay=0.0, fused=True)  # fmt: skip
        self._weights = np.ones(FIX + 1, np.float32)
        self._weights[UNTRAINED], self._weights[FIX] = 0.0, schedule.fix_weight
        if checkpoint.exists():
            self._resume()
        self._ranks.copy_first([param.data for param in self.params])

    def run(self, probes: Corpus, recorder: Recorder, progress: Progress) -> dict[str, float]:
        """Until the time is up; the last measurement. Rows `fit` (a step in ten) and `probe` go to the recorder."""
        schedule, state = self.schedule, self.state
        began = time.monotonic() - state.elapsed_s
        measured_s = state.elapsed_s
        measured: dict[str, float] = {}
        while self._ranks.of_first(state.elapsed_s) < schedule.wall_s:
            row = self._step()
            state.elapsed_s = time.monotonic() - began
            if state.step % 10 == 0:
                recorder.record("fit", row)
            share = min(1.0, state.elapsed_s / schedule.wall_s)
            progress(share)
            if state.elapsed_s - measured_s > schedule.evaluate_every_s or share == 1.0:
                measured = self._measure(probes)
                recorder.record("probe", measured)
                measured_s = state.elapsed_s = time.monotonic() - began
                self.save()
        return measured or self._measure(probes)

    def follow(self) -> None:
        """What the ranks after the first do meanwhile."""
        while True:
            self.state.elapsed_s = self._ranks.of_first(0.0)
            if self.state.elapsed_s >= self.schedule.wall_s:
                return
            self._step()

    def _step(self) -> dict[str, float]:
        schedule, state = self.schedule, self.state
        documents, size = [], 0
        while size < schedule.batch_tokens:
            number = state.next_document % len(self.corpus)
            documents.append(number)
            size += int(self._lengths[number])
            state.next_document += 1
        norm, losses = self._backward(documents)
        factor = rate(state.elapsed_s / schedule.wall_s, schedule)
        for optimizer, peak in ((self._muon, schedule.matrix_lr), (self._adamw, schedule.lr)):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        self._muon.step(spread=self._ranks.spread)
        self._adamw.step()
        state.step += 1
        state.tokens += size
        return {"step": state.step, "tokens": state.tokens, "elapsed_s": state.elapsed_s, "loss": losses[0],
                "balance": losses[1], "grad_norm": norm, "rate": factor}  # fmt: skip

    def _backward(self, documents: list[int]) -> tuple[float, list[float]]:
        """Leave the clipped gradient of the batch in the parameters; (norm before, [loss, balance loss])."""
        schedule, ranks = self.schedule, self._ranks
        rng = np.random.default_rng((schedule.seed, self.state.step))
        drawn = {number: rng.random(self._lengths[number], np.float32) for number in documents}
        jobs = []
        for row in micro_batches(self.corpus, documents, schedule.micro_tokens, ranks.count):
            packed = pack(self.corpus, row)
            draws = np.concatenate([drawn[number] for number in row])
            left_out = (packed.marks == FILE) & (draws >= schedule.file_share)
            jobs.append((packed, self._weights[np.where(left_out, UNTRAINED, packed.marks)]))
        total_weight = float(sum(weights.sum() for _, weights in jobs))
        sizes = [param.numel() for param in self.params]
        flat = torch.zeros(sum(sizes) + 2)
        for packed, weights in jobs[ranks.rank :: ranks.count]:
            grads, losses = self._gradients(packed, weights / total_weight, packed.documents / len(documents))
            flat += torch.cat([*(grad.reshape(-1) for grad in grads), losses])
        ranks.add(flat)
        *parts, losses = flat.split([*sizes, 2])
        for param, grad in zip(self.params, parts, strict=True):
            param.grad = grad.view_as(param)
        norm = float(torch.nn.utils.clip_grad_norm_(self.params, schedule.clip_norm))
        if not math.isfinite(norm):
            raise RunError(
                f"the gradient of step {self.state.step} is not finite", hint="lower schedule.lr and matrix_lr"
            )
        return norm, losses.tolist()

    def _gradients(self, packed: PackedRow, weights: np.ndarray, share: float) -> tuple[Sequence[Tensor], Tensor]:
        """(gradients, [loss, balance loss]: [2]) of one micro-batch, which is `share` of the batch's documents."""
        sources = np.flatnonzero(weights)
        hidden, balance = self._forward.hidden(packed.ids, packed.positions, packed.trees, sources)
        targets = torch.from_numpy(packed.ids[sources + 1])
        loss = _loss(hidden, self._head, targets, torch.from_numpy(weights[sources]))
        whole = loss + self.schedule.balance_coef * share * balance
        grads = torch.autograd.grad(whole, self.params)
        return grads, torch.stack([loss, share * balance]).detach()

    def _measure(self, probes: Corpus) -> dict[str, float]:
        rows = micro_batches(probes, list(range(len(probes))), self.schedule.micro_tokens)
        parts = [self._probe(probes, row) for row in rows]
        exact, file_nll, fix_nll = (np.concatenate([part[k] for part in parts]) for k in range(3))
        return {
            "step": self.state.step, "tokens": self.state.tokens, "elapsed_s": self.state.elapsed_s,
            "exact": float(exact.mean()), "fix_nll": float(fix_nll.mean()), "file_nll": float(file_nll.mean()),
            "n": len(exact),
        }  # fmt: skip

    @torch.no_grad()
    def _probe(self, probes: Corpus, documents: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per document: whether greedy decoding gives the very repair; nats per token of the file and of the repair.

        Greedy decoding equals the repair if and only if each of its tokens is the likeliest after the ones before. The
        last token of all, which ends the reply, is not asked for: after one repair a document may go on to the next.
        """
        packed = pack(probes, documents)
        sources = np.flatnonzero(packed.marks != UNTRAINED)
        hidden, _ = self._forward.hidden(packed.ids, packed.positions, packed.trees, sources)
        logits = hidden @ self._head.t()
        targets = torch.from_numpy(packed.ids[sources + 1])
        nll = F.cross_entropy(logits, targets, reduction="none").numpy()
        right = (logits.argmax(-1) == targets).numpy()
        document = np.searchsorted([tree.start for tree in packed.trees], sources, side="right") - 1
        is_fix = packed.marks[sources] == FIX
        is_last = np.append(document[1:] != document[:-1], True)

        def mean(which: np.ndarray) -> np.ndarray:
            count = np.bincount(document[which], minlength=len(documents))
            return np.bincount(document[which], nll[which], minlength=len(documents)) / np.maximum(1, count)

        wrong = np.bincount(document, is_fix & ~is_last & ~right, minlength=len(documents))
        return wrong == 0, mean(~is_fix), mean(is_fix)

    def save(self) -> None:
        """Whole or not at all."""
        temporary = self._checkpoint.with_suffix(".tmp")
        network = self.model.network.state_dict()
        torch.save({"state": dataclasses.asdict(self.state), "network": network, "muon": self._muon.state_dict(),
                    "adamw": self._adamw.state_dict()}, temporary)  # fmt: skip
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(self._checkpoint)

    def _resume(self) -> None:
        try:
            saved = torch.load(self._checkpoint, weights_only=True)
            self.model.network.load_state_dict(saved["network"])
            self._muon.load_state_dict(saved["muon"])
            self._adamw.load_state_dict(saved["adamw"])
            self.state = State(**saved["state"])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise RunError(f"cannot continue from {self._checkpoint}", cause=str(error).splitlines()[0],
                           hint="remove it to start again") from error  # fmt: skip


def fit(model: Model, corpus: Corpus, schedule: ScheduleSettings, checkpoint: Path, probes: Corpus, recorder: Recorder,
        progress: Progress) -> dict[str, float]:  # fmt: skip
    """Fit `model` in `schedule.ranks` processes, this one among them; the last measurement. Errors: RunError."""
    torch.set_num_threads(1)  # a core each
    with together(schedule.ranks, _follow, model.config, corpus, schedule, checkpoint) as ranks:
        return Fit(model, corpus, schedule, checkpoint, ranks).run(probes, recorder, progress)


def _follow(ranks: Ranks, config: Any, corpus: Corpus, schedule: ScheduleSettings, checkpoint: Path) -> None:
    Fit(model_from_config(config, seed=schedule.seed), corpus, schedule, checkpoint, ranks).follow()
