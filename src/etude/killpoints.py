"""Named points at which a test can have a process killed. Without ETUDE_KILL_AT they do nothing.

ETUDE_KILL_AT=name:n:marker sends SIGKILL to the process that reaches the point `name` for the n-th time, once: the file
`marker` is made first, and a process that finds it there lives on. So the run that the test starts again, which
inherits the variable, does not die again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_name, _, _rest = os.environ.get("ETUDE_KILL_AT", "").partition(":")
_count, _, _marker = _rest.partition(":")
_left = int(_count or 1)

POINTS = (
    "group-written", "group-scored", "batch-written", "batch-recorded", "step-recorded", "eval-written",
    "trained", "blobs-uploaded", "manifest-created", "checkpoint-written", "checkpoint-renamed",
    "swap-staged", "swap-committed",
)  # fmt: skip
"""Orchestrator, trainer, engine: the steps of each one's protocol, each named by what has just been done."""


def reach(name: str) -> None:
    """Say that the step `name` is done."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0:
        try:
            Path(_marker).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
