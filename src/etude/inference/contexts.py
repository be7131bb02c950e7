"""What the engine remembers of every context: its ids, whose version computed its KV, and where that KV lies.

    open(context_id, ids, limit)  own KV of equal ids is taken over  |  else that of another context of this version
          |                       (shared in place or copied)        |  else nothing; the rest is prefilled
          v
    ContextKV: computed, runs, epochs  --- close ---> idle, kept until evicted (longest unused first) or forgotten

Dropping computed KV (eviction, another continuation, `kv_reuse`) makes the next request compute it again: that opens
a KV epoch. Epochs outlive the KV itself, so that the records stay whole.

What it does not do: decide who runs (`scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from etude.inference.kv import CHUNK, KVMemory, Slot
from etude.inference.prefixes import PrefixIndex, common_length
from etude.types import KVEpoch, Run, Version

MAX_REMEMBERED = 4096
"""Contexts without KV whose records are kept."""


class ContextKV:
    """One context. KV of positions below `base` (a multiple of CHUNK) lies in `parent`, the rest in `slot`."""

    __slots__ = (
        "base", "computed", "context_id", "epochs", "ids", "is_busy", "keep", "parent", "reported_rows", "routes",
        "runs", "slot",
    )  # fmt: skip

    def __init__(self, context_id: str) -> None:
        self.context_id = context_id
        self.ids = np.zeros(0, np.int32)
        """Of the whole window; valid up to `computed`, and while busy up to the sequence's length."""
        self.computed = 0
        """Tokens whose KV is there."""
        self.slot: Slot | None = None
        self.parent: Slot | None = None
        self.base = 0
        self.runs: list[Run] = []
        """Version of the KV, of the open epoch."""
        self.epochs: list[KVEpoch] = []
        """Those that are closed, and the open one without its runs."""
        self.routes: np.ndarray | None = None
        self.reported_rows = 0
        """Rows whose routes were sent with an earlier reply."""
        self.is_busy = False
        self.keep = True

    def note_version(self, version: Version) -> None:
        """KV from `computed` on comes from `version`."""
        if self.runs and self.runs[-1].start >= self.computed:
            self.runs.pop()
        if not self.runs or self.runs[-1].version != version:
            self.runs.append(Run(start=self.computed, version=version))

    def of_version(self, version: Version | None) -> int:
        """Length of the beginning whose KV is of `version`: it and everything before it was computed by it."""
        if not self.runs or self.runs[0].version != version:
            return 0
        return self.runs[1].start if len(self.runs) > 1 else self.computed

    def stale(self, version: Version | None) -> int:
        """Number of tokens whose KV another version computed."""
        ends = [run.start for run in self.runs[1:]] + [self.computed]
        return sum(end - run.start for run, end in zip(self.runs, ends, strict=True) if run.version != version)

    def all_epochs(self) -> tuple[KVEpoch, ...]:
        """With the open one as it stands."""
        return (*self.epochs[:-1], KVEpoch(first=self.epochs[-1].first, runs=tuple(self.runs)))


@dataclass(frozen=True, slots=True)
class Shared:
    """KV that another context has computed: its first `length` tokens, `base` of them read where they lie."""

    source: ContextKV
    length: int
    base: int


class ContextTable:
    """All contexts. Reuse by new requests follows `kv_reuse` (docs/semantics.md, sampling)."""

    def __init__(self, memory: KVMemory, *, kv_reuse: str, routes: np.ndarray | None = None) -> None:
        """routes: [0, moe_layers, top_k] of the dtype that routes are kept in; None for a model without."""
        self.memory = memory
        self._kv_reuse = kv_reuse
        self._routes = routes
        self._contexts: dict[str, ContextKV] = {}
        self._index: PrefixIndex[ContextKV] = PrefixIndex()

    def is_busy(self, context_id: str) -> bool:
        context = self._contexts.get(context_id)
        return context is not None and context.is_busy

    def open(self, context_id: str, ids: np.ndarray, limit: int, version: Version) -> ContextKV | None:
        """The context of a new request, with KV taken over for `context.computed` of its `ids` (always fewer than all).

        limit: the longest that the window can become; memory is reserved up to there. None if there is no room now.
        """
        context = self._contexts.pop(context_id, None) or ContextKV(context_id)
        self._contexts[context_id] = context  # the last one in the order of use
        own = self._own(context, ids, version)
        if not own:
            self._evict(context)
        shared = None if own else self._shared(ids, version)
        if not self._reserve(context, shared, limit):
            if any(other.is_busy for other in self._contexts.values()):
                return None
            # What is to be taken over is itself in the way: the source, or a parent of which only a part is read.
            self._evict(context)
            own, shared = 0, None
            if not self._reserve(context, shared, limit):
                return None
        self._truncate(context, own, first=len(ids))
        if shared is not None:
            self._share(context, shared)
        if context.slot is None:
            context.slot = self.memory.take(limit - context.base)
        else:
            self.memory.resize(context.slot, limit - context.base)
        self._fill(context, ids, limit)
        context.is_busy, context.keep = True, True
        context.note_version(version)
        if not context.epochs:
            context.epochs.append(KVEpoch(first=len(ids), runs=()))
        self._trim()
        return context

    def publish(self, context: ContextKV, version: Version) -> None:
        """Let others share what `context` has of the serving version."""
        if self._kv_reuse != "none" and (length := context.of_version(version)):
            self._index.add(context, context.ids[:length])

    def close(self, context: ContextKV, version: Version | None) -> None:
        """The request is over: idle from now on, or freed."""
        context.is_busy = False
        self._contexts[context.context_id] = self._contexts.pop(context.context_id)  # the last one used
        if not context.keep:
            self._forget(context)
        elif self._kv_reuse == "none":
            self._evict(context)
        elif context.slot is not None:
            self.memory.resize(context.slot, context.computed - context.base)
            if version is not None:
                self.publish(context, version)

    def forget(self, context_id: str) -> None:
        """Free a context now, or when its request ends."""
        context = self._contexts.get(context_id)
        if context is not None and context.is_busy:
            context.keep = False
        elif context is not None:
            self._forget(context)

    def purge(self) -> None:
        """Drop all KV that no running request holds, and clear its memory: it may hold values that are not finite."""
        for context in list(self._contexts.values()):
            if not context.is_busy:
                self._evict(context)
        self.memory.wipe_free()

    def new_version(self) -> None:
        """A swap: nothing is of the serving version any more."""
        self._index.clear()

    def available(self, context_id: str, ids: np.ndarray, version: Version) -> int:
        """How many of `ids` `open` would take over now."""
        context = self._contexts.get(context_id)
        own = 0 if context is None else self._own(context, ids, version)
        shared = None if own else self._shared(ids, version)
        return own if shared is None else shared.length

    def _own(self, context: ContextKV, ids: np.ndarray, version: Version) -> int:
        """How much of the context's own KV is taken over."""
        if context.slot is None or self._kv_reuse == "none":
            return 0
        usable = context.computed if self._kv_reuse == "context" else context.of_version(version)
        own = min(common_length(context.ids[:usable], ids), len(ids) - 1)
        # Below its base a context has no memory to write to; and what siblings read in place must not be overwritten.
        return 0 if own < context.base or (context.slot.refs > 1 and own < context.computed) else own

    def _shared(self, ids: np.ndarray, version: Version) -> Shared | None:
        source = None if self._kv_reuse == "none" else self._index.find(ids)
        if source is None:
            return None
        length = min(common_length(source.ids[: source.of_version(version)], ids), len(ids) - 1)
        # Siblings share most of the prompt; a mere common header is copied, so that its owner stays nobody's parent.
        base = length // CHUNK * CHUNK if 2 * length >= len(ids) else 0
        if source.base:
            base = min(base, source.base)  # beyond that there would be two parents
        return Shared(source, length, base) if length else None

    def _reserve(self, context: ContextKV, shared: Shared | None, limit: int) -> bool:
        """Evict idle contexts, the longest unused first, until the window fits."""
        base = context.base if shared is None else shared.base
        tokens = limit - base - (context.slot.tokens if context.slot else 0)
        new_slot = context.slot is None
        if self.memory.fits(tokens, new_slot=new_slot):
            return True
        spared = (context, None if shared is None else shared.source)
        idle = [c for c in self._contexts.values() if c.slot is not None and not c.is_busy and c not in spared]
        for victim in idle:
            self._evict(victim)
            if self.memory.fits(tokens, new_slot=new_slot):
                return True
        return False

    def _share(self, context: ContextKV, shared: Shared) -> None:
        """Take over KV, and the routes of its rows."""
        source = shared.source
        context.runs = [source.runs[0]]
        context.computed = shared.length
        if source.routes is not None:
            context.routes = source.routes[: shared.length]
        context.base = shared.base
        if shared.base:
            context.parent = source.parent if source.base else source.slot
            assert context.parent is not None
            context.parent.refs += 1
        context.slot = self.memory.take(shared.length - shared.base)
        # What is not read in place is copied: first what the source itself reads from its parent, then its own.
        inherited = max(min(source.base, shared.length) - shared.base, 0)
        if source.parent is not None:
            self.memory.copy(source.parent, context.slot, inherited, start=shared.base)
        assert source.slot is not None
        start = max(shared.base - source.base, 0)
        rest = shared.length - shared.base - inherited
        self.memory.copy(source.slot, context.slot, rest, start=start, to=inherited)

    def _fill(self, context: ContextKV, ids: np.ndarray, limit: int) -> None:
        """Buffers as long as the window can become, with the new ids."""
        context.reported_rows = common_length(context.ids[: context.reported_rows], ids)
        context.ids = np.zeros(limit, np.int32)
        context.ids[: len(ids)] = ids
        if self._routes is not None:
            known = self._routes if context.routes is None else context.routes[:limit]
            context.routes = np.zeros((limit, *self._routes.shape[1:]), self._routes.dtype)
            context.routes[: len(known)] = known

    def _truncate(self, context: ContextKV, own: int, *, first: int) -> None:
        """Keep `own` tokens of KV. Less than there was means that the rest is computed again: a new epoch."""
        if own == context.computed:
            return
        self._index.remove(context)
        if context.epochs:
            closed = context.all_epochs()
            if closed[-1].first >= first:
                closed = closed[:-1]  # nothing was sampled under it
            context.epochs = [*closed, KVEpoch(first=first, runs=())]
        context.runs = [run for run in context.runs if run.start < own]
        context.computed = own

    def _evict(self, context: ContextKV) -> None:
        """Free the KV; ids and records stay, and tell the next request that it computes again."""
        self._index.remove(context)
        if context.slot is not None:
            self.memory.drop(context.slot)
        if context.parent is not None:
            self.memory.drop(context.parent)
        context.slot = context.parent = context.routes = None
        context.base = 0
        context.ids = context.ids[: context.computed].copy()

    def _forget(self, context: ContextKV) -> None:
        self._evict(context)
        self._contexts.pop(context.context_id, None)

    def _trim(self) -> None:
        """Forget the records of contexts that lost their KV long ago and were never freed by their owner."""
        if len(self._contexts) > MAX_REMEMBERED:
            stale = [c for c in self._contexts.values() if c.slot is None]
            for context in stale[: len(stale) // 2]:
                self._forget(context)
