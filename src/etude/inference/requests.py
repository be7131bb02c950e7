"""A request while it lives: checked on arrival, then a sequence that grows until it stops.

What it does not do: look at versions or memory (`scheduler` does, when it admits).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence as Items

import numpy as np

from etude.errors import EtudeError, RequestError
from etude.inference.contexts import ContextKV
from etude.protocols import GenerateRequest, TokenChunk
from etude.types import Routes, Run, StopReason, Version

CHUNK_TOKENS = 16
"""Tokens of one chunk at most; a reply that ends sooner comes in one piece."""


class Sink:
    """Where the chunks of a request go: a queue in the caller's event loop, filled from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[TokenChunk | EtudeError] = asyncio.Queue()


class Sequence:
    """A running or waiting request. Its ids lie in its context's buffer once it is admitted."""

    __slots__ = (
        "banned", "context", "length", "limit", "logprobs", "prompt_length", "request", "reused", "rng",
        "routes_start", "sent", "sink", "stop_ids", "versions",
    )  # fmt: skip

    def __init__(self, request: GenerateRequest, limit: int, sink: Sink | None) -> None:
        """sink: None for the engine's own probe."""
        self.request = request
        self.sink = sink
        self.prompt_length = self.length = self.sent = len(request.ids)
        self.limit = limit
        """Length at which the reply is cut."""
        self.stop_ids = frozenset(request.stop_ids)
        self.rng = None if request.seed is None else np.random.default_rng(request.seed)
        self.logprobs = np.zeros(limit - self.length, np.float32)
        self.versions: list[Run] = []
        self.context: ContextKV | None = None
        self.reused = 0
        self.routes_start = 0

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; the last of them gives the next token's distribution."""
        assert self.context is not None
        return self.length - self.context.computed

    def note_version(self, version: Version) -> None:
        """Tokens from here on are sampled by `version`."""
        if self.versions and self.versions[-1].start >= self.length:
            self.versions.pop()
        if not self.versions or self.versions[-1].version != version:
            self.versions.append(Run(start=self.length, version=version))

    def append(self, token: int, logprob: float) -> StopReason | None:
        """Take the sampled token. Returns why the reply is over, if it is."""
        assert self.context is not None
        self.context.ids[self.length] = token
        self.logprobs[self.length - self.prompt_length] = logprob
        self.length += 1
        if token in self.stop_ids:
            return StopReason.END
        if self.length < self.limit:
            return None
        full = self.length - self.prompt_length >= self.request.max_new_tokens
        return StopReason.LENGTH if full else StopReason.CONTEXT

    def chunk(self, stop: StopReason | None) -> TokenChunk:
        """What has not been sent yet; with `stop`, also the records of the whole window."""
        assert self.context is not None
        start, self.sent = self.sent, self.length
        records: dict[str, object] = {}
        if stop is not None:
            records = {
                "stop": stop,
                "kv_epochs": self.context.all_epochs(),
                "routes": self._routes(),
                "routes_start": self.routes_start,
                "reused_tokens": self.reused,
            }
        return TokenChunk(
            request_id=self.request.request_id,
            ids=self.context.ids[start : self.length].copy(),
            logprobs=self.logprobs[start - self.prompt_length : self.length - self.prompt_length].copy(),
            versions=_runs_within(self.versions, start, self.length),
            **records,  # type: ignore[arg-type]
        )

    def _routes(self) -> Routes | None:
        """Of the rows that no earlier reply of this context sent."""
        assert self.context is not None
        if self.context.routes is None:
            return None
        rows = self.context.routes[self.routes_start : self.context.computed].copy()
        return Routes(experts=rows, valid=np.ones(len(rows), bool))


def _runs_within(runs: Items[Run], start: int, end: int) -> tuple[Run, ...]:
    """The runs of positions [start, end)."""
    before = [run for run in runs if run.start <= start][-1:]
    inside = [run for run in runs if start < run.start < end]
    return tuple(Run(start=max(run.start, start), version=run.version) for run in (*before, *inside))


def check_ids(ids: np.ndarray, *, vocab_size: int, max_context: int, name: str = "ids") -> None:
    """Errors: RequestError naming what is wrong with them."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(f"{name} must be a row of integers", cause=f"{ids.dtype} of shape {ids.shape}")
    if not len(ids):
        raise RequestError(f"{name} is empty", hint="give at least one token, such as the one that begins a text")
    if len(ids) > max_context:
        raise RequestError(
            f"{name} is too long: {len(ids)} tokens", cause=f"the model's window is {max_context} tokens"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        odd = low if low < 0 else high
        raise RequestError(f"{name} has {odd}, which is no token", cause=f"the vocabulary has {vocab_size}")


def check(request: GenerateRequest, *, vocab_size: int, max_context: int, kv_tokens: int) -> int:
    """The length at which the reply is cut. Errors: RequestError naming the limit or the field."""
    check_ids(request.ids, vocab_size=vocab_size, max_context=max_context)
    if len(request.ids) == max_context:
        raise RequestError(
            f"ids is too long: {len(request.ids)} tokens leave no room to reply",
            cause=f"the model's window is {max_context} tokens",
        )
    if request.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens = {request.max_new_tokens} must be at least 1")
    if not math.isfinite(request.temperature) or request.temperature < 0:
        raise RequestError(f"temperature = {request.temperature} must be 0 or more, and finite")
    if request.seed is not None and request.seed < 0:
        raise RequestError(f"seed = {request.seed} must not be negative")
    for name in ("stop_ids", "banned_ids"):
        tokens = getattr(request, name)
        if odd := [token for token in tokens if not 0 <= token < vocab_size]:
            raise RequestError(f"{name} has {odd[0]}, which is no token", cause=f"the vocabulary has {vocab_size}")
    if len(set(request.banned_ids)) == vocab_size:
        raise RequestError("banned_ids bans every token")
    limit = min(len(request.ids) + request.max_new_tokens, max_context)
    if limit > kv_tokens:
        raise RequestError(
            f"the window of {limit} tokens (prompt and reply) does not fit into memory",
            cause=f"engine.kv_tokens is {kv_tokens}",
            hint="ask for fewer new tokens, or raise engine.kv_tokens",
        )
    return limit
