"""The trainer's process: takes the path of a durable batch, steps, and publishes by itself.

    step(batch_path)  ->  row of numbers     then, in the background: publish; every N steps publish and checkpoint
    state()           ->  step, version, checkpoint step
    finish()          ->  state, once the newest step is public and saved

A start takes a new incarnation, resumes from the newest checkpoint if there is one, and publishes its weights at once:
engines leave the versions that a crash cut off, and a fresh run has a step 0. The caller then sees from `state` which
stored batches it must replay.

What it does not do: choose batches. One step at a time, in one thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from etude.errors import MissingError
from etude.frames import Handler, convert, read_file
from etude.killpoints import reach
from etude.train.checkpoint import Checkpoints
from etude.train.client import Scored, TrainerState
from etude.train.lead import Lead
from etude.train.reference import pinned_reference
from etude.train.step import Trainer
from etude.types import Batch, Manifest, Sample, Version
from etude.weights.background import Background, Then
from etude.weights.gc import Collector
from etude.weights.manifests import pin, read_manifest
from etude.weights.publish import Peers, Publisher, take_incarnation
from etude.weights.recipe import WeightsRecipe
from etude.weights.store import Store


def open_trainer(
    trainer: Trainer,
    *,
    store: Store,
    checkpoints: Path,
    checkpoint_every: int,
    weights: WeightsRecipe,
    peers: Peers | None = None,
    reference: str = "",
    thread: ThreadPoolExecutor | None = None,
) -> TrainerService:
    """`trainer`, resumed, and its starting version public. Its other ranks follow (lead.py), and publish as `peers`.
    reference: `rl.kl.reference`, where there is a KL. thread: where steps are taken, best the one that made `trainer`.

    Errors: ModelError for a model that is not the checkpoint's; RunError, StoreError for a damaged run; LostRaceError
    if another trainer starts at the same time and later.
    """
    lead = Lead(trainer)
    saved = Checkpoints(checkpoints, store)
    name = saved.resume_from()
    parent = None
    if name is not None:
        loaded = saved.load(name)
        lead.restore(loaded.state.step, loaded.tensors)
        parent = loaded.state.version
        torch.set_rng_state(torch.from_numpy(loaded.state.random.copy()))
    record = take_incarnation(store, parent=parent, checkpoint=name)
    saved.sweep()
    publisher = Publisher(
        store, record, parent=_manifest(store, parent), anchor_every=weights.anchor_every, threads=weights.threads,
        peers=peers,
    )  # fmt: skip
    collector = Collector(store, keep_anchors=weights.keep_anchors, grace_s=weights.grace_s)
    service = TrainerService(
        lead, Background(publisher, collector), saved, checkpoint_every, pins=weights.pins, thread=thread
    )
    service.start()
    if reference:
        lead.set_reference(pinned_reference(store, reference))
    return service


def _manifest(store: Store, version: Version | None) -> Manifest | None:
    if version is None:
        return None
    try:
        return read_manifest(store, version.incarnation, version.n)
    except MissingError:
        return None  # nothing to use again: all is uploaded


class TrainerService:
    """What the process serves. Made by `open_trainer`."""

    def __init__(
        self, trainer: Lead, background: Background, checkpoints: Checkpoints, checkpoint_every: int,
        *, pins: Sequence[int] = (), thread: ThreadPoolExecutor | None = None,
    ) -> None:  # fmt: skip
        """pins: steps whose versions stay for good. thread: of one worker, where steps are taken."""
        self._pins = frozenset(pins)
        self._overtaken: tuple[int, ...] = ()
        self._trainer = trainer
        self._background = background
        self._checkpoints = checkpoints
        self._every = checkpoint_every
        self._start_step = trainer.step
        self._checkpoint_step = trainer.step
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    def start(self) -> None:
        """Publish the starting weights and wait for it. Errors: StoreError, LostRaceError."""
        self._publish()
        self._background.wait()

    def handlers(self) -> dict[str, Handler]:
        """By method name, for `frames.Server`. One after the other: a score waits for the step that is running."""
        return {"step": self._step, "state": self._get_state, "score": self._score, "finish": self._finish}

    def step(self, batch: Batch) -> dict[str, float]:
        """Train, and hand the new weights to the publisher. Errors: of `Trainer.train`, and of `Background.check`."""
        self._background.check()
        row = self._trainer.train(batch, is_current=self._is_current)
        reach("trained")
        self._publish(checkpoint=self._trainer.step % self._every == 0)
        return row | self._publishing()

    def _publishing(self) -> dict[str, float]:
        """Numbers of the newest committed version, and counts since the start."""
        last = self._background.last
        assert last is not None, "start() comes first"
        return {
            "skipped_publishes": float(self._background.skipped),
            "aborted_publishes": float(self._background.aborted),
            "published_step": float(last.manifest.version.step),
            "published_bytes": float(last.change_bytes),
            "anchor_bytes": float(last.whole_bytes),
            "publish_s": last.seconds,
        }

    def state(self) -> TrainerState:
        head = self._background.head
        assert head is not None, "start() comes first"
        return TrainerState(step=self._trainer.step, version=head.version, checkpoint_step=self._checkpoint_step)

    def finish(self) -> TrainerState:
        """Publish and save the newest step, and wait for it. Errors: StoreError, LostRaceError."""
        self._background.wait()
        if self._checkpoint_step != self._trainer.step:
            self._publish(checkpoint=True)
            self._background.wait()
        return self.state()

    def close(self) -> None:
        """Publish what waits, then end the threads. Errors: StoreError, LostRaceError."""
        self._thread.shutdown()
        self._background.close()
        self._background.publisher.end()
        self._trainer.close()

    def _is_current(self, version: Version) -> bool:
        """Whether `version` holds the weights as they are: ours of this step, or the one that we resumed from."""
        record = self._background.publisher.record
        ours = version.incarnation == record.incarnation and version.step == self._trainer.step
        return ours or (self._trainer.step == self._start_step and version == record.parent)

    def _publish(self, *, checkpoint: bool = False) -> None:
        step, jobs = self._trainer.step, []
        if checkpoint:
            jobs.append(self._saving())
        if step in self._pins:
            jobs.append(self._pin)

        def then(manifest: Manifest) -> None:
            for job in jobs:
                job(manifest)

        tensors = self._trainer.stretches(self._overtaken)
        self._overtaken = self._background.submit(step, tensors, then=then if jobs else None)

    def _pin(self, manifest: Manifest) -> None:
        version = manifest.version
        pin(self._background.publisher.store, f"step-{version.step}", version, "weights.pins names its step")

    def _saving(self) -> Then:
        """What writes the checkpoint of the weights as they are now, once their version is committed."""
        step, tensors = self._trainer.step, self._trainer.state()
        random = torch.get_rng_state().numpy().copy()

        def save(manifest: Manifest) -> None:
            fence = self._background.publisher.check_incarnation
            self._checkpoints.save(step=step, manifest=manifest, random=random, tensors=tensors, fence=fence)
            self._checkpoint_step = step

        return save

    async def _step(self, args: dict[str, Any]) -> AsyncIterator[dict[str, float]]:
        batch = await asyncio.to_thread(read_file, Path(args["batch_path"]), Batch)
        yield await asyncio.get_running_loop().run_in_executor(self._thread, self.step, batch)

    async def _get_state(self, args: dict[str, Any]) -> AsyncIterator[TrainerState]:
        yield self.state()

    async def _score(self, args: Any) -> AsyncIterator[Scored]:
        sample = convert(args, Sample)

        def score() -> Scored:
            return Scored(step=self._trainer.step, logprobs=self._trainer.score(sample))

        yield await asyncio.get_running_loop().run_in_executor(self._thread, score)

    async def _finish(self, args: dict[str, Any]) -> AsyncIterator[TrainerState]:
        yield await asyncio.get_running_loop().run_in_executor(self._thread, self.finish)
