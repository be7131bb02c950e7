"""One turn: a conversation in, text and calls out, and the exact tokens of both to the recorder before the end is said.

    Ask --match or write anew--> ids --engine--> chunks --reading--> deltas
                                                   `--> window, ServedTurn --recorder--> durable --> the end may be sent

`start` raises what is wrong before anything is sent; `deltas` yields what to say and ends once the turn is kept;
`close` gives everything back, whatever happened. What it does not do: spell an answer in any API's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from etude.agent.window import join_runs
from etude.data.render import Parsed, Renderer
from etude.errors import EngineError, EtudeError, StoreError
from etude.protocols import (
    Consent,
    Engine,
    GenerateRequest,
    Owner,
    Reply,
    RepositoryState,
    ServedTokens,
    ServedTurn,
    SessionRecorder,
    TokenChunk,
)
from etude.serve.conversation import Ask, Pins, chain, last_reply, link_of, said, scope_of
from etude.serve.measures import Measures
from etude.serve.memory import Boundary, Memory, ServedWindow, Sessions, follows
from etude.serve.reading import ReplyReader
from etude.serve.recipe import ServeRecipe
from etude.serve.refusal import Refusal, refusal_of
from etude.serve.rendering import Rendering
from etude.types import Effort, KVEpoch, Opened, Routes, Run, Span, StopReason, ToolCall


@dataclass(slots=True, kw_only=True)
class Parts:
    """What all requests of one server share."""

    engine: Engine
    rendering: Rendering
    recipe: ServeRecipe
    name: str
    """Of the model, as recorded."""
    memory: Memory
    sessions: Sessions
    measures: Measures
    recorder: SessionRecorder | None = None
    """None: nothing is recorded."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What may be said next, and the tokens since the last delta."""

    text: str
    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(slots=True)
class Usage:
    """Tokens of one turn."""

    prompt: int = 0
    reused: int = 0
    sampled: int = 0
    thinking: int = 0


class Turn:
    """`await start()`, iterate `deltas()`, then read `calls`, `stop`, `usage`, `text`; `await close()` at the end."""

    def __init__(self, parts: Parts, ask: Ask, owner: Owner, pins: Pins) -> None:
        self._parts, self.ask, self._owner, self._pins = parts, ask, owner, pins
        self.turn_id = uuid.uuid4().hex
        self.usage = Usage()
        self.stop = StopReason.END
        self.calls: tuple[ToolCall, ...] = ()
        self.effort = Effort()
        self.versions: list[Run] = []
        self.stopped_by = ""
        """Of the request's stop texts, the one that was met."""
        self._began = time.perf_counter()
        self._at = time.time()
        self._first_token_s: float | None = None
        self._window: ServedWindow | None = None
        self._opened: Opened | None = None
        self._ids = np.zeros(0, np.int32)
        self._start = 0
        self._chunks: AsyncIterator[TokenChunk] | None = None
        self._taken: list[TokenChunk] = []
        self._is_kept = False

    @property
    def text(self) -> str:
        """All that was said."""
        return self._reader.told

    @property
    def created(self) -> int:
        """Seconds since 1970."""
        return int(self._at)

    @property
    def is_over(self) -> bool:
        """Whether the turn is kept: what is said from now on is its end."""
        return self._is_kept

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def session_id(self) -> str:
        return self._session.session_id

    async def start(self) -> None:
        """Until the first token is there. Errors: Refusal."""
        ask, parts = self.ask, self._parts
        tools = () if ask.choice == "none" else ask.tools
        self._renderer = await parts.rendering.renderer(tools)
        self._scope = scope_of(self._owner)
        self._links = chain(self._scope, tools, ask.messages)
        await self._place()
        forced = parts.rendering.forced(self._renderer, ask)
        self._ids = follows(self._ids, forced)
        self._start = len(self._ids)
        self._reader = ReplyReader(self._renderer, forced=forced, stops=ask.stop, keeps_broken=ask.api == "agent")
        self._forced = len(forced)
        limit = parts.rendering.max_context
        if limit and self._start >= limit:
            raise Refusal(
                400, f"prompt is too long: {self._start} tokens > {limit - 1} maximum",
                code="context_length_exceeded", param="messages",
            )  # fmt: skip
        self.usage.prompt = self._start
        assert self._window is not None
        request = GenerateRequest(
            request_id=self.turn_id, context_id=self._window.context_id, ids=self._ids,
            max_new_tokens=ask.max_tokens or parts.recipe.reply_tokens, stop_ids=self._renderer.stop_ids,
            temperature=ask.temperature, seed=ask.seed, min_step=self._pins.min_step, exact=self._pins.exact,
        )  # fmt: skip
        self._chunks = parts.engine.generate(request)
        self._taken.append(await self._next())
        self._first_token_s = time.perf_counter() - self._began
        parts.measures.first_token_s.observe(self._first_token_s)

    async def deltas(self, *, live: bool) -> AsyncIterator[Delta]:
        """What to say, as it comes; with `live` off one delta. It ends once the turn is kept. Errors: Refusal."""
        reader, unsaid = self._reader, ""
        chunk = self._taken[0]
        pending: list[TokenChunk] = []
        while True:
            self.usage.sampled += len(chunk.ids)
            pending.append(chunk)
            if live:
                unsaid += reader.feed(chunk.ids)
            else:
                reader.add(chunk.ids)
            if chunk.stop is not None or reader.is_cut or (not live and reader.stopped()):
                break
            if unsaid:
                yield _delta(unsaid, pending)
                unsaid, pending = "", []
            chunk = await self._next()
            self._taken.append(chunk)
        rest, self.calls, parsed = reader.finish()
        self.effort = self._effort(parsed)
        self.stop, self.stopped_by = chunk.stop or StopReason.END, reader.cut_by
        await self._keep(parsed, chunk if chunk.stop is not None else await self._cut_records())
        yield _delta(unsaid + rest, pending)

    async def close(self) -> None:
        """Cancel what still runs; give the window back."""
        await self._end_sampling()
        if self._window is not None:
            self._window.is_busy = False
        measures = self._parts.measures
        measures.prompt_tokens.inc(self.usage.prompt)
        measures.reused_tokens.inc(self.usage.reused)
        measures.sampled_tokens.inc(self.usage.sampled)
        if self._taken and not self._is_kept:
            measures.cancelled.inc()

    async def _end_sampling(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()

    async def _cut_records(self) -> TokenChunk:
        """The engine's records of a reply that a stop text cut: they come with an end, so one more token is asked for.

        It is not part of the reply. Errors: Refusal.
        """
        assert self._window is not None
        await self._end_sampling()
        ids = follows(self._ids, np.concatenate([chunk.ids for chunk in self._taken]))
        request = GenerateRequest(
            request_id=f"{self.turn_id}/end", context_id=self._window.context_id, ids=ids, max_new_tokens=1,
            stop_ids=(),
        )  # fmt: skip
        try:
            last = [chunk async for chunk in self._parts.engine.generate(request)][-1]
        except EtudeError as error:
            raise refusal_of(error) from error
        epochs = tuple(
            KVEpoch(first=epoch.first, runs=tuple(run for run in epoch.runs if run.start < len(ids)))
            for epoch in last.kv_epochs if epoch.first < len(ids)
        )  # fmt: skip
        return msgspec.structs.replace(last, kv_epochs=epochs, routes=_until(last, len(ids) - 1))

    # Where the turn goes on

    async def _place(self) -> None:
        """Find the window that the history names, or open one."""
        ask, parts, pins = self.ask, self._parts, self._pins
        name = pins.session or ask.session
        session = parts.sessions.named(self._scope, name) if name else None
        reply = last_reply(ask.messages)
        found = parts.memory.find(self._links[reply], session) if reply is not None else None
        if found is not None and reply is not None:
            return await self._go_on(*found, reply)
        self._session = session or parts.sessions.new(self._scope)
        await self._open(Opened.TASK if reply is None else Opened.CLIENT_REWRITE)
        return None

    async def _go_on(self, window: ServedWindow, boundary: Boundary, reply: int) -> None:
        """After that reply of that window, in it or in one that begins with the same ids."""
        ask, parts = self.ask, self._parts
        self._session, new = window.session, ask.messages[reply + 1 :]
        goes_on = boundary is window.replies[-1] and not window.is_busy
        if goes_on:  # taken before anything is waited for: others fork from now on
            window.is_busy, self._window = True, window
        before = window.ids[: boundary.end]
        added = await parts.rendering.follow(self._renderer, before, boundary.start, ask.messages[reply], new)
        if added is None:
            window.is_busy = window.is_busy and not goes_on
            return await self._open(Opened.RERENDER)
        self._ids = follows(before, added)
        if goes_on:
            self._added = new
            parts.measures.turns.inc()
            return None
        return self._new_window(Opened.FORK)

    async def _open(self, opened: Opened) -> None:
        self._ids = await self._parts.rendering.open(self._renderer, self.ask.messages)
        self._new_window(opened)

    def _new_window(self, opened: Opened) -> None:
        empty = np.zeros(0, np.int32)
        self._window = ServedWindow(session=self._session, context=-1, context_id=uuid.uuid4().hex, ids=empty)
        self._opened, self._added = opened, self.ask.messages
        self._parts.measures.contexts.labels(opened.value).inc()

    async def _next(self) -> TokenChunk:
        assert self._chunks is not None
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            raise refusal_of(EngineError("the engine ended the reply without a reason to stop")) from None
        except EtudeError as error:
            raise refusal_of(error) from error
        self.versions = join_runs([*self.versions, *chunk.versions])
        return chunk

    # What is kept of it

    async def _keep(self, parsed: Parsed, last: TokenChunk) -> None:
        """The window as it is now; the turn to the recorder, and back once it is safe. Errors: Refusal."""
        parts, window = self._parts, self._window
        assert window is not None
        self.usage.reused = min(last.reused_tokens, self._start)
        self.usage.thinking = parsed.thinking_tokens
        if any(call.error for call in parsed.calls):
            parts.measures.broken_calls.inc()
        if window.context < 0:
            window.context = self._session.next_context()
        ids = follows(self._ids, np.concatenate([chunk.ids for chunk in self._taken]))
        epochs = window.epochs.copy()
        epochs.add(last.kv_epochs, start=self._start, length=len(ids))
        if parts.recorder is not None and self._owner.consent is not Consent.NONE:
            tokens = self._tokens(ids, len(window.ids), tuple(epochs.found), last)
            await self._record(parts.recorder, self._served(tokens))
        self._is_kept = True
        window.epochs = epochs
        key = link_of(self._links[-1], said(self._reader.told, self.calls))
        for context_id in parts.memory.keep(window, ids, Boundary(self._start - self._forced, len(ids), key)):
            parts.measures.forgotten.inc()
            with contextlib.suppress(EngineError):  # an engine that is gone has nothing to free
                await parts.engine.forget(context_id)
        parts.measures.windows.set(len(parts.memory))
        parts.measures.window_tokens.set(parts.memory.tokens)
        parts.measures.wall_s.observe(time.perf_counter() - self._began)

    async def _record(self, recorder: SessionRecorder, turn: ServedTurn) -> None:
        """Errors: Refusal if it cannot be kept."""
        began = time.perf_counter()
        try:
            await asyncio.shield(recorder.record(turn))
        except StoreError as error:
            self._session.give_back(turn.number)
            raise refusal_of(error) from error
        self._parts.measures.recorded.inc()
        self._parts.measures.record_s.observe(time.perf_counter() - began)

    def _tokens(self, ids: np.ndarray, start: int, epochs: tuple[KVEpoch, ...], last: TokenChunk) -> ServedTokens:
        count, prompt = len(ids) - start, self._start - start
        logprobs = np.zeros(count, np.float32)
        logprobs[prompt:] = np.concatenate([chunk.logprobs for chunk in self._taken])
        return ServedTokens(
            start=start, ids=ids[start:], sampled=np.arange(count) >= prompt, logprobs=logprobs,
            versions=tuple(self.versions), kv_epochs=epochs, routes=last.routes, routes_start=last.routes_start,
        )  # fmt: skip

    def _effort(self, parsed: Parsed) -> Effort:
        window = self._window
        assert window is not None
        return Effort(
            thinking_tokens=parsed.thinking_tokens, call_tokens=parsed.call_tokens,
            message_tokens=parsed.message_tokens, calls=len(self.calls), turns=1,
            output_tokens=0 if self._opened is not None else self._start - len(window.ids),
        )  # fmt: skip

    def _served(self, tokens: ServedTokens) -> ServedTurn:
        window, parts = self._window, self._parts
        assert window is not None
        end = self._start + self.usage.sampled
        return ServedTurn(
            turn_id=self.turn_id, session_id=self.session_id, number=self._session.next_turn(), owner=self._owner,
            source=self.ask.api, model=parts.name, started_at=self._at, first_token_s=self._first_token_s,
            wall_s=time.perf_counter() - self._began, messages=tuple(self._added),
            reply=Reply(
                text=self._reader.told, calls=self.calls, stop=self.stop, effort=self.effort,
                span=Span(context=window.context, start=self._start, end=end),
            ),
            context=window.context, opened=self._opened, tokens=tokens, repository=_repository(self._pins.repository),
        )  # fmt: skip


def _delta(text: str, chunks: Sequence[TokenChunk]) -> Delta:
    if not chunks:
        return Delta(text, np.zeros(0, np.int32), np.zeros(0, np.float32))
    if len(chunks) == 1:
        return Delta(text, chunks[0].ids, chunks[0].logprobs)
    return Delta(
        text, np.concatenate([chunk.ids for chunk in chunks]), np.concatenate([chunk.logprobs for chunk in chunks])
    )


def _until(chunk: TokenChunk, rows: int) -> Routes | None:
    """The chunk's routes of the first `rows` rows of the window."""
    routes, count = chunk.routes, max(0, rows - chunk.routes_start)
    return None if routes is None else Routes(experts=routes.experts[:count], valid=routes.valid[:count])


def _repository(words: str) -> RepositoryState | None:
    """`NAME@COMMIT` or `NAME@COMMIT#BRANCH`, of the header x-etude-repository."""
    root, at, rest = words.partition("@")
    if not at:
        return None
    commit, _, branch = rest.partition("#")
    return RepositoryState(root=root, commit=commit, branch=branch)
