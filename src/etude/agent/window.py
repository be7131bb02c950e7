"""One token window under construction: ids, and per token what the engine recorded. Becomes a `Context`.

How the records of several requests over one window are joined:

- versions: runs over positions, as sampled.
- KV epochs: a later request whose KV agrees with the last epoch on all that the epoch covers goes on with that epoch;
  anything else is a re-prefill and opens a new one, from its first sampled token on.
- routes: a position that was computed twice keeps the route under the KV that the first later sampled token saw, which
  is the earliest recorded one: every request samples at least one token after the rows that it computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from etude.errors import EngineError
from etude.protocols import TokenChunk
from etude.types import Context, KVEpoch, Opened, Routes, Run


class Epochs:
    """The KV epochs of one window, joined over its requests."""

    def __init__(self) -> None:
        self.found: list[KVEpoch] = []
        self._covered = 0
        """Positions whose KV the last epoch's tokens saw; a token never sees its own."""

    def copy(self) -> Epochs:
        """One that can go on without changing this one."""
        other = Epochs()
        other.found, other._covered = list(self.found), self._covered
        return other

    def add(self, epochs: Sequence[KVEpoch], *, start: int, length: int) -> None:
        """Those of a request whose reply begins at `start`, in a window that is `length` long now.

        `epochs` speak of the whole window; those that ended before this reply are known already.
        """
        if not epochs:
            return
        at_start = [epoch for epoch in epochs if epoch.first <= start]
        current = at_start[-1:] + [epoch for epoch in epochs if epoch.first > start]
        for epoch in current:
            runs = join_runs(epoch.runs)
            last = self.found[-1] if self.found else None
            if last is not None and _until(runs, self._covered) == _until(last.runs, self._covered):
                self.found[-1] = KVEpoch(first=last.first, runs=tuple(runs))
            else:
                first = max(epoch.first, start) if last is not None else epoch.first
                self.found.append(KVEpoch(first=first, runs=tuple(runs)))
            following = [other.first for other in current if other.first > epoch.first]
            self._covered = min(following, default=length) - 1


class Window:
    """Grows by prompt tokens (`append`) and by sampled ones (`add`)."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[Run] = []
        self._epochs = Epochs()
        self._experts: np.ndarray | None = None
        self._valid = np.zeros(0, bool)
        self.num_sampled = 0

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self) -> np.ndarray:
        """[n] int32."""
        return np.array(self._ids, np.int32)

    def append(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self._sampled += [False] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def add(self, chunk: TokenChunk, *, start: int) -> None:
        """Take a chunk of the request whose reply begins at `start`. Errors: EngineError if it is malformed."""
        count = len(chunk.ids)
        if len(chunk.logprobs) != count:
            raise EngineError(f"the engine sent {count} tokens with {len(chunk.logprobs)} log-probs")
        self._ids += [int(token) for token in chunk.ids]
        self._sampled += [True] * count
        self._logprobs += [float(value) for value in chunk.logprobs]
        self.num_sampled += count
        self._versions = join_runs([*self._versions, *chunk.versions])
        if count and not self._versions:
            raise EngineError("the engine sent tokens without the version that sampled them")
        self._epochs.add(chunk.kv_epochs, start=start, length=len(self._ids))
        if chunk.routes is not None:
            self._add_routes(chunk.routes, chunk.routes_start)

    def context(self, opened: Opened = Opened.TASK) -> Context:
        return Context(
            ids=self.ids(),
            sampled=np.array(self._sampled, bool),
            logprobs=np.array(self._logprobs, np.float32),
            versions=tuple(self._versions),
            kv_epochs=tuple(self._epochs.found),
            routes=self._routes(),
            opened=opened,
        )

    def _add_routes(self, routes: Routes, start: int) -> None:
        rows = len(routes.experts)
        if len(routes.valid) != rows:
            raise EngineError(f"the engine sent {rows} routes with {len(routes.valid)} validity bits")
        if self._experts is None:
            self._experts = np.zeros((0, *routes.experts.shape[1:]), routes.experts.dtype)
        elif routes.experts.shape[1:] != self._experts.shape[1:]:
            raise EngineError(f"routes changed shape: {self._experts.shape[1:]}, then {routes.experts.shape[1:]}")
        self._grow(start + rows)
        place = slice(start, start + rows)
        new = routes.valid & ~self._valid[place]
        self._experts[place][new] = routes.experts[new]
        self._valid[place] |= new

    def _grow(self, rows: int) -> None:
        assert self._experts is not None
        missing = rows - len(self._valid)
        if missing > 0:
            empty = np.zeros((missing, *self._experts.shape[1:]), self._experts.dtype)
            self._experts = np.concatenate([self._experts, empty])
            self._valid = np.concatenate([self._valid, np.zeros(missing, bool)])

    def _routes(self) -> Routes | None:
        """Rows = len(ids) - 1; rows that nobody recorded are marked invalid."""
        if self._experts is None:
            return None
        rows = len(self._ids) - 1
        self._grow(rows)
        return Routes(experts=self._experts[:rows].copy(), valid=self._valid[:rows].copy())


def join_runs(runs: Iterable[Run]) -> list[Run]:
    """Runs in order, without those that repeat the version before them."""
    joined: list[Run] = []
    for run in runs:
        if not joined or joined[-1].version != run.version:
            joined.append(run)
    return joined


def _until(runs: Sequence[Run], end: int) -> list[Run]:
    return [run for run in runs if run.start < end]
