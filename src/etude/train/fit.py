"""Fit a small network to a corpus until the clock says stop: what pretraining and fine-tuning share.

    corpus --batches of documents--> micro-batches, rows of like length --threads, a core each--> gradients, summed
           --Muon and AdamW, at a rate that the clock sets--> ... --every evaluate_every_s--> measure, checkpoint

The same command continues from the checkpoint. Since the clock ends it, the result depends on the machine's speed;
everything else (order, initial weights, formulas) is fixed by the recipe.

What it does not do: reinforcement learning, several processes, 16-bit weights.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.data.corpus import FILE, FIX, UNTRAINED, Corpus
from etude.errors import RunError
from etude.models.load import Model
from etude.protocols import Recorder
from etude.train.muon import Muon
from etude.train.nano_forward import NanoForward
from etude.train.pretrain_recipe import ScheduleSettings
from etude.types import FORMAT

Progress = Callable[[float, str], None]
"""(share done, what is known now)."""


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


def micro_batches(corpus: Corpus, documents: list[int], micro_tokens: int) -> Iterator[list[int]]:
    """Documents of like length together, so that little is padded; the largest first, so that threads end together."""
    lengths = np.diff(corpus.starts)
    ordered = sorted(documents, key=lambda number: -lengths[number])
    row: list[int] = []
    for number in ordered:
        longest = lengths[row[0]] if row else lengths[number]
        if row and (len(row) + 1) * longest > micro_tokens:
            yield row
            row = []
        row.append(number)
    if row:
        yield row


def padded(corpus: Corpus, documents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(ids [rows, length] int64, marks [rows, length] uint8); padding is id 0, marked UNTRAINED."""
    spans = [(int(corpus.starts[number]), int(corpus.starts[number + 1])) for number in documents]
    longest = max(stop - start for start, stop in spans)
    ids = np.zeros((len(spans), longest), np.int64)
    marks = np.full((len(spans), longest), UNTRAINED, np.uint8)
    for row, (start, stop) in enumerate(spans):
        ids[row, : stop - start] = corpus.ids[start:stop]
        marks[row, : stop - start] = corpus.marks[start:stop]
    return ids, marks


def _loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the cross-entropies. hidden [N, D], head [V, D], targets [N], weights [N]."""
    return (F.cross_entropy(hidden @ head.t(), targets, reduction="none") * weights).sum()


class Fit:
    """One network on its way through one corpus."""

    def __init__(self, model: Model, corpus: Corpus, schedule: ScheduleSettings, checkpoint: Path) -> None:
        """Takes the checkpoint up if there is one. Errors: RunError if it is damaged or of another shape."""
        if not len(corpus):
            raise RunError(f"{corpus.name or 'the corpus'} holds no documents", hint="build it again")
        self.model, self.corpus, self.schedule = model, corpus, schedule
        self.state = State()
        self._checkpoint = checkpoint
        network: Any = model.network
        self._head = network.model.embed_tokens.weight
        self.params = [p for p in network.parameters()]
        is_matrix = {id(p): p.dim() >= 2 and p is not self._head and not name.endswith("gate.weight")
                     for name, p in network.named_parameters()}  # fmt: skip
        self._muon = Muon([p for p in self.params if is_matrix[id(p)]], lr=0.0, weight_decay=schedule.weight_decay)
        self._adamw = torch.optim.AdamW([p for p in self.params if not is_matrix[id(p)]], lr=0.0, betas=(0.9, 0.95),
                                        weight_decay=0.0, fused=True)  # fmt: skip
        self._forward = NanoForward(network, compiled=schedule.compiled)
        self._loss = torch.compile(_loss, dynamic=True) if schedule.compiled else _loss
        self._weights = np.ones(FIX + 1, np.float32)
        self._weights[UNTRAINED], self._weights[FIX] = 0.0, schedule.fix_weight
        if checkpoint.exists():
            self._resume()

    def run(self, probes: Corpus, recorder: Recorder, progress: Progress) -> dict[str, float]:
        """Until the time is up; the last measurement. Rows `fit` (a step in ten) and `probe` go to the recorder."""
        schedule, state = self.schedule, self.state
        self._forward(torch.zeros((2, 16), dtype=torch.int64))  # compiled before threads meet in it
        began = time.monotonic() - state.elapsed_s
        measured_s = state.elapsed_s
        measured: dict[str, float] = {}
        with ThreadPoolExecutor(schedule.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            while state.elapsed_s < schedule.wall_s:
                row = self._step(pool)
                state.elapsed_s = time.monotonic() - began
                if state.step % 10 == 0:
                    recorder.record("fit", row)
                share = min(1.0, state.elapsed_s / schedule.wall_s)
                speed = f"{state.tokens / state.elapsed_s:,.0f} tokens/s"
                progress(share, f"step {state.step}, {state.tokens / 1e6:.1f}M tokens, {speed}, loss {row['loss']:.3f}")
                if state.elapsed_s - measured_s > schedule.evaluate_every_s or share == 1.0:
                    measured = self._measure(pool, probes)
                    recorder.record("probe", measured)
                    measured_s = state.elapsed_s = time.monotonic() - began
                    self.save()
            return measured or self._measure(pool, probes)

    def _step(self, pool: ThreadPoolExecutor) -> dict[str, float]:
        schedule, state = self.schedule, self.state
        documents, size = [], 0
        while size < schedule.batch_tokens:
            number = state.next_document % len(self.corpus)
            documents.append(number)
            size += int(self.corpus.starts[number + 1] - self.corpus.starts[number])
            state.next_document += 1
        rng = np.random.default_rng((schedule.seed, state.step))
        rows = [padded(self.corpus, row) for row in micro_batches(self.corpus, documents, schedule.micro_tokens)]
        for _, marks in rows:
            marks[(marks == FILE) & (rng.random(marks.shape, np.float32) >= schedule.file_share)] = UNTRAINED
        total_weight = float(sum(self._weights[marks[:, 1:]].sum() for _, marks in rows))
        jobs = [(ids, marks, total_weight, len(ids) / len(documents)) for ids, marks in rows]
        total: list[Tensor] = []
        losses = np.zeros(2)
        for grads, values in pool.map(self._gradients, jobs):
            losses += values
            if total:
                torch._foreach_add_(total, grads)
            else:
                total = grads
        for param, grad in zip(self.params, total, strict=True):
            param.grad = grad
        norm = float(torch.nn.utils.clip_grad_norm_(self.params, schedule.clip_norm))
        if not math.isfinite(norm):
            raise RunError(f"the gradient of step {state.step} is not finite", hint="lower schedule.lr and matrix_lr")
        factor = rate(state.elapsed_s / schedule.wall_s, schedule)
        for optimizer, peak in ((self._muon, schedule.matrix_lr), (self._adamw, schedule.lr)):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        self._muon.step(spread=pool.map)
        self._adamw.step()
        state.step += 1
        state.tokens += size
        return {"step": state.step, "tokens": state.tokens, "elapsed_s": state.elapsed_s, "loss": float(losses[0]),
                "balance": float(losses[1]), "grad_norm": norm, "rate": factor}  # fmt: skip

    def _gradients(self, job: tuple[np.ndarray, np.ndarray, float, float]) -> tuple[list[Tensor], np.ndarray]:
        ids, marks, total_weight, share = job
        tokens = torch.from_numpy(ids)
        weights = self._weights[marks[:, 1:]].reshape(-1) / total_weight
        places = torch.from_numpy(np.flatnonzero(weights))
        hidden, balance = self._forward(tokens)
        flat = hidden[:, :-1].reshape(-1, hidden.shape[-1]).index_select(0, places)
        targets = tokens[:, 1:].reshape(-1).index_select(0, places)
        loss = self._loss(flat, self._head, targets, torch.from_numpy(weights).index_select(0, places))
        whole = loss + self.schedule.balance_coef * share * balance
        grads = torch.autograd.grad(whole, self.params)
        return list(grads), np.array([loss.item(), share * balance.item()])

    def _measure(self, pool: ThreadPoolExecutor, probes: Corpus) -> dict[str, float]:
        rows = list(micro_batches(probes, list(range(len(probes))), self.schedule.micro_tokens))
        parts = list(pool.map(lambda row: self._probe(probes, row), rows))
        exact, file_nll, fix_nll = (np.concatenate([part[k] for part in parts]) for k in range(3))
        return {
            "step": self.state.step, "tokens": self.state.tokens, "elapsed_s": self.state.elapsed_s,
            "exact": float(exact.mean()), "fix_nll": float(fix_nll.mean()), "file_nll": float(file_nll.mean()),
            "n": len(exact),
        }  # fmt: skip

    @torch.no_grad()
    def _probe(self, probes: Corpus, documents: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per document: whether greedy decoding gives the very repair; nats per token of the file and of the repair.

        Greedy decoding equals the repair if and only if each of its tokens is the likeliest after the ones before.
        """
        ids, marks = padded(probes, documents)
        tokens = torch.from_numpy(ids)
        hidden, _ = self._forward(tokens)
        logits = hidden[:, :-1] @ self._head.t()
        targets = tokens[:, 1:]
        nll = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").numpy()
        right = (logits.argmax(-1) == targets).numpy()
        fix = marks[:, 1:] == FIX
        file = (marks[:, 1:] != FIX) & (marks[:, 1:] != UNTRAINED)
        per = [(nll * which).sum(1) / np.maximum(1, which.sum(1)) for which in (file, fix)]
        return (right | ~fix).all(1), per[0], per[1]

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
