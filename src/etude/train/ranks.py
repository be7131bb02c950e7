"""Several processes that fit one network together: each takes its share of a batch, gradients are summed.

    together(2, follow, *args)  ->  rank 0 here, follow(rank 1, *args) in a process of its own

A process a core beats a thread a core by a fifth at the nano's size, where Python between the operations is a good part
of the time. What it does not do: several machines, or sharded weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from etude.errors import LostRankError, RunError

_READY = "rank {} is up"
_JOIN = timedelta(minutes=3)
"""How long processes wait for each other, at the start and in a collective."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place among `count`; alone, nothing is sent. Errors of all methods: LostRankError."""

    rank: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None
    """Of the processes; None: the first one that they made."""

    def beside(self, patience: timedelta) -> Ranks:
        """The same ranks in a group of its own, for another thread. All ranks call it, at the same point."""
        if self.count == 1:
            return self
        return dataclasses.replace(self, group=dist.new_group(backend="gloo", timeout=patience))

    def turns(self, total: int) -> Iterator[tuple[int, bool]]:
        """(number, is it this rank's): all ranks compute equally many, one that has too few another's, for nothing."""
        for first in range(0, total, self.count):
            is_mine = first + self.rank < total
            yield first + self.rank if is_mine else first, is_mine

    def of_first(self, value: float) -> float:
        """What rank 0 gave, on all ranks."""
        shared = torch.tensor([value], dtype=torch.float64)
        self._send(functools.partial(dist.broadcast, shared, 0, group=self.group))
        return float(shared)

    def add(self, values: Tensor) -> None:
        """Replace `values` by its sum over all ranks."""
        self._send(functools.partial(dist.all_reduce, values, group=self.group))

    def copy_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0."""
        for tensor in tensors:
            self._send(functools.partial(dist.broadcast, tensor, 0, group=self.group))

    def tell(self, data: bytes) -> bytes:
        """What rank 0 gave, on all ranks."""
        size = torch.tensor([len(data)])
        self._send(functools.partial(dist.broadcast, size, 0, group=self.group))
        body = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._send(functools.partial(dist.broadcast, body, 0, group=self.group))
        return body.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 what every rank gave, in their order; elsewhere nothing."""
        if self.count == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        own = torch.tensor([len(data)])
        self._send(functools.partial(dist.all_gather, sizes, own, group=self.group))
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        bodies = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        self._send(functools.partial(dist.gather, padded, bodies, 0, group=self.group))
        return [body[: int(size)].numpy().tobytes() for body, size in zip(bodies or [], sizes, strict=False)]

    def spread(self, function: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """function(part) of every part, each computed on one rank; results have the parts' shapes."""
        owners = [number % self.count for number in range(len(parts))]
        found = [function(part) if owner == self.rank else torch.empty_like(part)
                 for owner, part in zip(owners, parts, strict=True)]  # fmt: skip
        for owner, part in zip(owners, found, strict=True):
            self._send(functools.partial(dist.broadcast, part, owner, group=self.group))
        return found

    def _send(self, collective: Callable[[], Any]) -> None:
        if self.count == 1:
            return
        try:
            collective()
        except RuntimeError as error:
            raise LostRankError(
                "a process of the fit is gone", cause=str(error).splitlines()[0],
                hint="the same command goes on from the checkpoint",
            ) from error  # fmt: skip


@contextlib.contextmanager
def together(count: int, follow: Callable[..., None], *args: Any) -> Iterator[Ranks]:
    """Rank 0 of `count`; `follow(ranks, *args)`, which must be picklable, runs on each of the others."""
    if count == 1:
        yield Ranks()
        return
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_JOIN)
    others = [
        context.Process(target=_enter, args=(rank, count, store.port, follow, args), daemon=True)
        for rank in range(1, count)
    ]
    for process in others:
        process.start()
    try:
        _wait_for(others, store)
        _join(0, count, store)
        yield Ranks(0, count)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for process in others:
            process.join(timeout=5)
            process.kill()


def _wait_for(others: Sequence[BaseProcess], store: dist.TCPStore) -> None:
    """Until all have started. One that dies meanwhile would be waited for in vain."""
    while not store.check([_READY.format(rank) for rank in range(1, len(others) + 1)]):
        if any(process.exitcode is not None for process in others):
            raise RunError("a process of the fit ended before it was up", hint="its message is above")
        time.sleep(0.02)


def _join(rank: int, count: int, store: dist.TCPStore) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may not resolve
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=_JOIN)
    except RuntimeError as error:
        raise RunError("the processes of the fit did not meet", cause=str(error).splitlines()[0]) from error


def _enter(rank: int, count: int, port: int, follow: Callable[..., None], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_JOIN)
        store.set(_READY.format(rank), "")
        _join(rank, count, store)
        follow(Ranks(rank, count), *args)
    except RunError:  # rank 0 is gone, or stopped early: it says why
        sys.exit(1)
