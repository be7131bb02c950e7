"""Follow what the engines serve: the step that admission counts from, and a probe of every version that can be had.

Versions of a trainer that died do not count. Polling costs one small frame; an engine learns of versions from the
store, not from here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from etude.errors import EngineError
from etude.protocols import Engine, Recorder
from etude.rl.probe import Scorer, mismatch
from etude.types import Sample, Version

POLL_S = 0.03
LAST_PROBE_S = 10.0
"""Ample for an engine to take up the last version and to score one sample."""


class WatchedTrainer(Scorer, Protocol):
    """`rl.trainer_handle.ManagedTrainer`, as the watch sees it."""

    @property
    def step(self) -> int: ...
    @property
    def incarnation(self) -> int: ...


class EngineWatch:
    """`step` is the newest step that all engines have committed; None while there is none, or while `paused`."""

    def __init__(
        self, engine: Engine, trainer: WatchedTrainer, recorder: Recorder, *, changed: Callable[[], None]
    ) -> None:
        self._engine, self._trainer, self._recorder, self._changed = engine, trainer, recorder, changed
        self._paused = False
        self._probed: Version | None = None
        self._probe_ended = asyncio.Event()
        self.step: int | None = None
        self.sample: Sample | None = None
        """What is probed: a sample of the newest batch."""

    def pause(self) -> None:
        """No new work until `go_on`: the trainer is being replaced."""
        self._paused, self.step = True, None

    def go_on(self) -> None:
        self._paused = False

    async def last_probe(self) -> None:
        """When training stands still: wait until `run` has probed the last version, or has had ample time to."""
        self._probe_ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_PROBE_S):
                while self.sample is not None and (self._probed is None or self._probed.step != self._trainer.step):
                    await self._probe_ended.wait()
                    self._probe_ended.clear()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            version = await self._serving()
            step = None if version is None or self._paused else version.step
            if step != self.step:
                self.step = step
                self._changed()
            if version is not None and step == self._trainer.step:
                await self._probe(version)
            await asyncio.sleep(POLL_S)

    async def _serving(self) -> Version | None:
        try:
            version = (await self._engine.stats()).version
        except EngineError:
            return None
        return version if version is not None and version.incarnation == self._trainer.incarnation else None

    async def _probe(self, version: Version) -> None:
        if self.sample is None or version == self._probed:
            return
        with contextlib.suppress(EngineError):
            row = await mismatch(self._engine, self._trainer, self.sample, version)
            if row is not None:
                self._recorder.record("agreement", {"step": version.step, **row})
        self._probed = version
        self._probe_ended.set()
