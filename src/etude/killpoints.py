"""Named points at which a test can have a process killed. Without ETUDE_KILL_AT they do nothing.

ETUDE_KILL_AT names a file. While it is there and holds `POINT N`, the process that reaches the point for the N-th time
from then on renames it to FILE.done, so that one process dies for it, and gets SIGKILL. The test may write the next one
while the run goes on.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

POINTS = (
    "group-written", "group-scored", "batch-written", "batch-recorded", "step-recorded", "eval-written",
    "trained", "snapshot-taken", "blobs-uploaded", "manifest-created", "checkpoint-written", "checkpoint-renamed",
    "version-leased", "version-fetched", "swap-staged", "swap-committed",
)  # fmt: skip
"""Orchestrator, trainer, engine: the steps of each one's protocol, each named by what has just been done."""

_file = os.environ.get("ETUDE_KILL_AT")
_plan = ("", 0)
_left = 0


def reach(name: str) -> None:
    """Say that the step `name` is done."""
    global _plan, _left
    if _file is None:
        return
    try:
        plan = (Path(_file).read_text(), os.stat(_file).st_mtime_ns)
    except FileNotFoundError:
        return
    point, _, count = plan[0].partition(" ")
    if point != name:
        return
    if plan != _plan:
        _plan, _left = plan, int(count)
    _left -= 1
    if _left == 0:
        try:
            os.rename(_file, f"{_file}.done")
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
