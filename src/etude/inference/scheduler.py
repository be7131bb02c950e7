"""Who runs in the next step: continuous batching.

    waiting --admit (rows, memory, KV reuse)--> running --every step--> decode: one token each
       |                                                         \\--> prefill: up to STEP_TOKENS in all
       +-- held back while a sibling that computes the same beginning is being prefilled

Memory for the longest window that a request can become is reserved on admission, so that nothing in flight is ever
evicted. What it does not do: compute, sample, or speak to callers.
"""

from __future__ import annotations

from collections import deque

from etude.errors import OverloadedError, RequestError
from etude.inference.contexts import ContextTable
from etude.inference.forward import Work
from etude.inference.kv import CHUNK
from etude.inference.prefixes import common_length
from etude.inference.requests import Sequence
from etude.types import Version

STEP_TOKENS = 1024
"""Prefilled in one step, so that those who decode do not wait long."""


class Scheduler:
    """Used by the engine's thread alone."""

    def __init__(self, table: ContextTable, *, max_concurrent: int, max_queue: int, kv_reuse: str) -> None:
        self._table = table
        self._max_concurrent = max_concurrent
        self._max_queue = max_queue
        self._shares = kv_reuse != "none"
        self._contexts: set[str] = set()
        self._requests: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.reused_tokens = 0
        self.stale_reused_tokens = 0

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def all(self) -> list[Sequence]:
        """Running and waiting."""
        return list(self._requests.values())

    def submit(self, sequence: Sequence) -> None:
        """Errors: RequestError for an id that is in use, OverloadedError if too many wait."""
        request = sequence.request
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is running already")
        if request.context_id in self._contexts:
            raise RequestError(
                f"context {request.context_id!r} has a request running",
                hint="wait for its reply, or use another context_id: equal beginnings share KV anyway",
            )
        if len(self.waiting) >= self._max_queue + self._max_concurrent - len(self.running):
            raise OverloadedError(
                f"{len(self.waiting)} requests are waiting",
                cause=f"engine.max_queue is {self._max_queue}, engine.max_concurrent {self._max_concurrent}",
                hint="try again later",
            )
        self._requests[request.request_id] = sequence
        self._contexts.add(request.context_id)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, version: Version | None) -> None:
        """Finished, cancelled or failed: its row is free, its context idle. One that is gone already is ignored."""
        request = sequence.request
        if self._requests.get(request.request_id) is not sequence:
            return
        del self._requests[request.request_id]
        self._contexts.discard(request.context_id)
        if sequence.context is None:
            self.waiting.remove(sequence)
            if not request.keep_context:
                self._table.forget(request.context_id)
            return
        self.running.remove(sequence)
        sequence.context.keep &= request.keep_context
        self._table.close(sequence.context, version)

    def admit(self, version: Version) -> None:
        """Take in who waits, in order, as far as rows and memory go."""
        held: list[Sequence] = []
        while self.waiting and len(self.running) < self._max_concurrent:
            sequence = self.waiting.popleft()
            if self._should_hold(sequence, version):
                held.append(sequence)
                continue
            request = sequence.request
            context = self._table.open(request.context_id, request.ids, sequence.limit, version)
            if context is None:
                self.waiting.appendleft(sequence)
                break
            sequence.context = context
            sequence.reused = context.computed
            sequence.routes_start = context.reported_rows
            sequence.note_version(version)
            self.reused_tokens += context.computed
            self.stale_reused_tokens += context.stale(version)
            self.running.append(sequence)
        self.waiting.extendleft(reversed(held))

    def next_work(self) -> tuple[list[Work], list[Work]]:
        """(decode, prefill) of the next step: decode in the order that `attention.Plan` wants, prefill as admitted."""
        decode: list[tuple[tuple[int, int, int], Work]] = []
        prefill: list[Work] = []
        room = STEP_TOKENS
        for sequence in self.running:
            pending = sequence.pending
            if pending == 1:
                context = sequence.context
                assert context is not None
                assert context.slot is not None
                parent = context.parent.index if context.parent is not None else -1
                decode.append(((parent, context.base, context.slot.index), Work(sequence, 1)))
            elif room:
                count = min(pending, room)
                room -= count
                prefill.append(Work(sequence, count))
        decode.sort(key=lambda item: item[0])
        return [work for _, work in decode], prefill

    def _should_hold(self, sequence: Sequence, version: Version) -> bool:
        """Whether somebody is just computing more of this prompt's beginning than can be shared by now."""
        if not self._shares or len(sequence.request.ids) <= CHUNK:
            return False
        ids = sequence.request.ids
        best = 0
        for other in self.running:
            context = other.context
            if context is None or other.pending <= 1 or context.of_version(version) < context.computed:
                continue
            best = max(best, common_length(other.request.ids, ids))
        return best > CHUNK and best > self._table.available(sequence.request.context_id, ids, version)
