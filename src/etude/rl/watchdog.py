"""Say whom everything waits for, when nothing has moved for a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from etude.protocols import Recorder


async def watch(recorder: Recorder, *, after_s: float, step: Callable[[], int], waiting_for: Callable[[], str]) -> None:
    """Record a `watchdog` row whenever `step` has stood still for `after_s`. Until cancelled."""
    last, since = step(), time.monotonic()
    while True:
        await asyncio.sleep(min(1.0, after_s / 4))
        if step() != last:
            last, since = step(), time.monotonic()
        elif time.monotonic() - since > after_s:
            recorder.record("watchdog", {"step": last, "waiting_for": waiting_for(), "seconds": after_s})
            since = time.monotonic()
