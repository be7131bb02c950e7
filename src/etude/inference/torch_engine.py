"""The engine of one process: an asyncio facade over one thread that computes.

    callers (any event loop)                    the engine's thread
      generate / score / load ...  --commands-->  drain commands
           ^                                      swap, if one is staged and no pinned request delays it
           |                                      admit, plan           scheduler, contexts
           +------------- chunks --------------   forward, sample       forward, attention, sampling
                                                  append, emit

Weights change between two steps only, and requests in flight go on with their KV; each token carries the version that
sampled it. What it does not do: follow the weight store (`fetch` is given to it), or speak over sockets (`service`).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import numpy as np
import psutil
import torch

from etude.errors import EngineError, EtudeError, ModelError, RequestError, VersionError
from etude.inference.contexts import ContextTable
from etude.inference.forward import Forward, Work, layer_shapes, route_dtype, use_engine_attention
from etude.inference.kv import KVMemory, bytes_per_token
from etude.inference.outbox import Outbox
from etude.inference.recipe import EngineRecipe
from etude.inference.requests import CHUNK_TOKENS, Sequence, Sink, check, check_ids
from etude.inference.sampling import PLAIN, sample, sampling_rows
from etude.inference.scheduler import Scheduler
from etude.inference.selfcheck import check_family, plain_logprobs
from etude.inference.swap import PendingSwap, stage
from etude.killpoints import reach
from etude.models.load import Model
from etude.protocols import EngineStats, GenerateRequest, TokenChunk
from etude.types import Manifest, Routes, StopReason, Version

Fetch = Callable[[Manifest], Awaitable[Mapping[str, np.ndarray | torch.Tensor]]]
"""Downloads a version: hub name -> tensor."""
Command = tuple[Callable[[], None], Callable[[EngineError], None]]
"""What to do in the engine's thread, and whom to tell if the engine ended before."""
SLOTS_PER_ROW = 4
"""Contexts that may hold KV, for each request that may run."""
T = TypeVar("T")


class TorchEngine:
    """protocols.Engine.

    >>> engine = TorchEngine(load_model("etude-nano"), EngineRecipe(), fetch=download)
    >>> await engine.load(manifest)                      # or set_version, for the weights that the model came with
    >>> async for chunk in engine.generate(request): ...
    >>> await engine.close()
    """

    def __init__(
        self, model: Model, recipe: EngineRecipe, *, fetch: Fetch | None = None, records_routes: bool = True
    ) -> None:
        """The engine owns `model` from now on. With more than one of `recipe.threads`, other threads of the process are
        to compute with one: torch's helpers of several threads slow each other down.

        Errors: ModelError for a family that it cannot serve.
        """
        self._model = model
        self._recipe = recipe
        self._fetch = fetch
        expected = plain_logprobs(model)
        use_engine_attention(model, max_context=model.max_context, records_routes=records_routes)
        memory = _memory(model, recipe)
        routes = None
        if records_routes and model.num_moe_layers:
            routes = np.zeros((0, model.num_moe_layers, model.top_k), route_dtype(model))
        table = ContextTable(memory, kv_reuse=recipe.kv_reuse, routes=routes)
        self._table = table
        self._forward = Forward(model, memory, records_routes=records_routes)
        check_family(self._forward, table, expected)
        self._scheduler = Scheduler(
            table, max_concurrent=recipe.max_concurrent, max_queue=recipe.max_queue, kv_reuse=recipe.kv_reuse
        )
        self._version: Version | None = None
        self._swap: PendingSwap | None = None
        self._swap_lock = asyncio.Lock()
        self._rng = np.random.default_rng(recipe.seed)
        self._prefilled = self._sampled = self._swaps = 0
        self._swap_pause_s = self._busy_s = 0.0
        self._failure: EngineError | None = None
        self._outbox = Outbox()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="etude-engine", daemon=True)
        self._thread.start()

    # The facade: these run in the callers' event loops

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Errors before the first token: RequestError, VersionError, OverloadedError; at any time: EngineError."""
        limit = check(
            request,
            vocab_size=self._model.vocab_size,
            max_context=self._model.max_context,
            kv_tokens=self._table.memory.budget_tokens,
        )
        sink = Sink(asyncio.get_running_loop())
        sequence = Sequence(request, limit, sink)
        self._post(lambda: self._submit(sequence), lambda error: self._outbox.send(sink, error))
        is_over = False
        try:
            while not is_over:
                item = await sink.queue.get()
                is_over = not isinstance(item, TokenChunk) or item.stop is not None
                if not isinstance(item, TokenChunk):
                    raise item
                yield item
        finally:
            if not is_over:
                self._commands.put((lambda: self._scheduler.remove(sequence, self._version), lambda _: None))

    async def score(self, ids: np.ndarray, routes: Routes | None = None) -> tuple[np.ndarray, Routes | None]:
        """See protocols.Engine. Errors: RequestError for malformed ids or routes."""
        check_ids(ids, vocab_size=self._model.vocab_size, max_context=self._model.max_context)

        def compute() -> tuple[np.ndarray, Routes | None]:
            try:
                return self._forward.score(ids, routes)
            except ModelError as error:
                raise RequestError(error.message, cause=error.cause) from error

        return await self._call(compute)

    async def forget(self, context_id: str) -> None:
        await self._call(lambda: self._table.forget(context_id))

    async def set_version(self, version: Version) -> None:
        """Name the weights that the model came with."""
        await self._call(lambda: self._serve(version))

    async def load(self, manifest: Manifest) -> None:
        """Download and check, then swap between two steps. A failure before that leaves the old version serving.

        Errors: StoreError (download), EngineError (the tensors do not fit, or the engine is dead).
        """
        if self._fetch is None:
            raise EngineError("this engine cannot load versions", cause="it was made without a way to fetch them")
        async with self._swap_lock:
            tensors = await self._fetch(manifest)
            staged = await asyncio.to_thread(stage, self._model, tensors, manifest.version)
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            reach("swap-staged")
            swap = PendingSwap(manifest.version, staged, done)
            self._post(lambda: self._plan_swap(swap), lambda error: self._outbox.reject(done, error))
            await done

    async def stats(self) -> EngineStats:
        return await self._call(self._stats)

    async def ended(self) -> None:
        """Returns when the engine's thread has ended: closed, or by a failure that it does not go on from."""
        await asyncio.to_thread(self._thread.join)

    async def close(self) -> None:
        """Stop; whoever still waits gets an EngineError."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run in the engine's thread, between two steps."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                self._outbox.resolve(done, function())
            except EtudeError as error:
                self._outbox.reject(done, error)

        self._post(run, lambda error: self._outbox.reject(done, error))
        return await done

    def _post(self, run: Callable[[], None], fail: Callable[[EngineError], None]) -> None:
        """Errors: EngineError if the engine has ended. One that ends just now calls `fail`."""
        self._commands.put((run, fail))
        if self._failure is not None:
            raise EngineError(self._failure.message, cause=self._failure.cause, hint=self._failure.hint)

    # The engine's thread: everything below runs there

    def _run(self) -> None:
        torch.set_num_threads(self._recipe.threads)
        failure = EngineError("the engine was closed")
        try:
            while self._drain():
                self._try_swap()
                if not self._scheduler.is_idle:
                    started = time.perf_counter()
                    with torch.inference_mode():
                        self._step()
                    self._busy_s += time.perf_counter() - started
                self._outbox.flush()
        except Exception as error:  # the one place where the unknown becomes typed: callers must hear of it
            failure = EngineError("the engine died", cause=f"{type(error).__name__}: {error}", hint="start it again")
            failure.__cause__ = error
            traceback.print_exc()
        self._failure = failure
        self._end(failure)

    def _drain(self) -> bool:
        """Carry out commands; wait for one if there is nothing to compute. False once the engine is closed."""
        may_wait = self._scheduler.is_idle and self._swap is None
        while True:
            try:
                command = self._commands.get(block=may_wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command[0]()
            may_wait = False

    def _submit(self, sequence: Sequence) -> None:
        try:
            self._check_version(sequence.request)
            self._scheduler.submit(sequence)
        except EngineError as error:
            self._outbox.send(sequence.sink, error)

    def _check_version(self, request: GenerateRequest) -> None:
        """Errors: VersionError."""
        serving = self._version
        if serving is None:
            raise VersionError("no version is served yet", hint="load one, or name the initial weights (set_version)")
        if request.min_step is not None and serving.step < request.min_step:
            raise VersionError(f"step {request.min_step} is not served yet", cause=f"step {serving.step} is")
        if request.exact is not None and request.exact != serving:
            raise VersionError(f"version {request.exact.name} is not served", cause=f"version {serving.name} is")
        if request.exact is not None and self._swap is not None:
            raise VersionError(
                f"version {request.exact.name} is about to be replaced", cause=f"{self._swap.version.name} is staged"
            )

    def _step(self) -> None:
        version = self._version
        assert version is not None
        self._scheduler.admit(version)
        decode, prefill = self._scheduler.next_work()
        logits = self._forward.step(decode, prefill)
        rows: list[int] = []
        sequences: list[Sequence] = []
        for row, work in enumerate((*decode, *prefill)):
            sequence = work.sequence
            assert sequence.context is not None
            sequence.context.computed += work.count
            if sequence.context.computed == sequence.length:
                rows.append(row)
                sequences.append(sequence)
        self._count(prefill, decode)
        self._sample(logits if len(rows) == len(logits) else logits[rows], sequences)

    def _count(self, prefill: list[Work], decode: list[Work]) -> None:
        """Prompt tokens that were computed, and what siblings may share from now on."""
        assert self._version is not None
        self._prefilled += sum(work.count for work in prefill)
        self._prefilled += sum(work.sequence.length == work.sequence.prompt_length for work in decode)
        for work in prefill:
            if work.sequence.pending == 0 and work.sequence.context is not None:
                self._table.publish(work.sequence.context, self._version)

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        uniforms = self._rng.random(len(sequences))
        for row, sequence in enumerate(sequences):
            if sequence.rng is not None:
                uniforms[row] = sequence.rng.random()
        requests = [sequence.request for sequence in sequences]
        is_plain = all(request.temperature == 1.0 and not request.banned_ids for request in requests)
        settings = PLAIN if is_plain else sampling_rows(requests)
        tokens, logprobs = sample(logits, uniforms, settings)
        is_sound = np.isfinite(logprobs).tolist()
        self._sampled += len(sequences)
        for sequence, token, logprob, sound in zip(
            sequences, tokens.tolist(), logprobs.tolist(), is_sound, strict=True
        ):
            if not sound:
                self._fail(sequence)
                continue
            stop = sequence.append(token, logprob)
            if stop is not None or sequence.length - sequence.sent >= CHUNK_TOKENS:
                self._emit(sequence, stop)
        if not all(is_sound):
            self._table.purge()

    def _emit(self, sequence: Sequence, stop: StopReason | None) -> None:
        self._outbox.send(sequence.sink, sequence.chunk(stop))
        if stop is not None:
            assert sequence.context is not None
            sequence.context.reported_rows = sequence.context.computed
            self._scheduler.remove(sequence, self._version)

    def _fail(self, sequence: Sequence) -> None:
        """The model gave no distribution. The request ends, and its KV is not kept."""
        assert sequence.context is not None
        sequence.context.keep = False
        error = EngineError("the model's output is not finite", cause="its weights have diverged")
        self._outbox.send(sequence.sink, error)
        self._scheduler.remove(sequence, self._version)

    def _plan_swap(self, swap: PendingSwap) -> None:
        swap.deadline_s = time.monotonic() + self._recipe.pin_timeout_s
        self._swap = swap

    def _try_swap(self) -> None:
        """Commit the staged version, unless pinned requests may delay it a little longer."""
        swap = self._swap
        if swap is None:
            return
        pinned = [sequence for sequence in self._scheduler.all() if sequence.request.exact not in (None, swap.version)]
        if pinned and time.monotonic() < swap.deadline_s:
            return
        started = time.perf_counter()
        for sequence in pinned:
            name = sequence.request.exact.name if sequence.request.exact else ""
            self._outbox.send(sequence.sink, VersionError(f"version {name} was replaced by {swap.version.name}"))
            self._scheduler.remove(sequence, self._version)
        self._swap = None
        self._model.assign(swap.tensors)  # a failure in here ends the engine: it never serves a mixture
        self._forward.refresh()
        self._serve(swap.version)
        reach("swap-committed")
        self._swaps += 1
        self._swap_pause_s += time.perf_counter() - started
        self._outbox.resolve(swap.done, None)

    def _serve(self, version: Version) -> None:
        """From the next token on."""
        self._version = version
        self._table.new_version()
        for sequence in self._scheduler.running:
            assert sequence.context is not None
            sequence.context.note_version(version)
            sequence.note_version(version)

    def _stats(self) -> EngineStats:
        return EngineStats(
            version=self._version,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            prefilled_tokens=self._prefilled,
            reused_tokens=self._scheduler.reused_tokens,
            stale_reused_tokens=self._scheduler.stale_reused_tokens,
            sampled_tokens=self._sampled,
            swaps=self._swaps,
            swap_pause_s=self._swap_pause_s,
            busy_s=self._busy_s,
        )

    def _end(self, failure: EngineError) -> None:
        """Tell everybody who waits: requests, a staged swap, and commands that came too late."""
        for sequence in self._scheduler.all():
            self._outbox.send(sequence.sink, failure)
        if self._swap is not None:
            self._outbox.reject(self._swap.done, failure)
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    command[1](failure)
        self._outbox.flush()


def _memory(model: Model, recipe: EngineRecipe) -> KVMemory:
    layers = layer_shapes(model)
    dtype = model.network.dtype
    slots = SLOTS_PER_ROW * recipe.max_concurrent
    budget = recipe.kv_tokens
    if not budget:
        affordable = psutil.virtual_memory().available // 4 // bytes_per_token(layers, dtype)
        budget = min(affordable, slots * model.max_context)
    return KVMemory(layers, slots=slots, window=min(model.max_context, budget), budget_tokens=budget, dtype=dtype)
