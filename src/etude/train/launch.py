"""A trainer of several ranks on this machine: its process becomes torchrun's agent, the ranks are processes under it.

    orchestrator --> python -m etude.worker RUN trainer ... (torchrun's agent) --> the same words, RANK=0 .. n - 1

Rank 0 serves the socket, the others follow it. One that dies takes all down: the orchestrator starts the trainer again,
and it resumes from its checkpoint. What it does not do: several machines (`torchrun` itself does, with the same words).
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from etude.errors import RunError
from etude.train.ranks import Ranks

PATIENCE = timedelta(days=7)
"""Ranks wait for the next batch as long as it takes; one that dies is noticed by its connection."""


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "LOCAL_RANK" in os.environ


def run_ranks(module: str, words: Sequence[str], count: int) -> None:
    """`python -m module words` in `count` processes, until they end. Errors: RunError if one fails."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", local_addr="127.0.0.1", max_restarts=0,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", module, *words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RunError(f"rank {rank} of the trainer failed", cause=failure.message, hint="see its log") from error


def joined() -> Ranks:
    """This process among the ranks that torchrun started. Errors: RunError if they do not meet."""
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise RunError("the trainer's ranks did not meet", cause=str(error).splitlines()[0]) from error
    return Ranks(dist.get_rank(), dist.get_world_size())
