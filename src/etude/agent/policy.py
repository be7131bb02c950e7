"""Policies: what answers an episode. EnginePolicy speaks ids with an engine; ScriptedPolicy says what a test wrote.

EnginePolicy keeps the window as the engine saw and sampled it, and never spells anything again:

    renderer.open --ids--> engine.generate --reply ids--> window + renderer.follow --ids--> engine.generate ...
                                                               `-- cannot: a new window, renderer.open (rerender)

Per sampled token it records log-prob and version, per context the KV epochs and routes (window.py); each window leaves
as one `Context`. What it does not do: carry out calls, or judge what was said.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from etude.agent.recipe import AgentRecipe
from etude.agent.tools import schemas
from etude.agent.window import Window
from etude.data.render import Renderer
from etude.errors import EngineError, OverloadedError
from etude.protocols import Engine, GenerateRequest, Message, Reply, TokenChunk
from etude.types import Context, Effort, Opened, Span, StopReason, Task, ToolCall, Version, digest_of

OVERLOAD_WAIT_S = 120.0
"""So long an overloaded engine is asked again; that is back-pressure, not a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Where an episode's tokens end."""

    context_tokens: int
    """Of the window: prompt, replies and results."""
    reply_tokens: int
    """Of one reply."""
    sampled_tokens: int | None = None
    """Of all replies together; None: only the window limits them. Evaluations at an equal budget set it."""


class EnginePolicy:
    """One episode's policy over an engine. Errors of `reply`: EngineError and its kinds."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        episode_id: str,
        limits: TokenLimits,
        temperature: float = 1.0,
        seed: int | None = None,
        min_step: int | None = None,
        exact: Version | None = None,
        opened: Opened = Opened.TASK,
    ) -> None:
        self._engine, self._renderer, self._episode_id, self._limits = engine, renderer, episode_id, limits
        self._temperature, self._seed, self._min_step, self._exact = temperature, seed, min_step, exact
        self._windows = [(Window(), opened)]
        self._read = 0
        self._turns = 0
        self._start = 0
        """Where the last reply begins."""

    @property
    def _window(self) -> Window:
        return self._windows[-1][0]

    @property
    def _context_id(self) -> str:
        number = len(self._windows) - 1
        return f"{self._episode_id}#{number}" if number else self._episode_id

    async def reply(self, conversation: Sequence[Message]) -> Reply:
        """The next turn; one of zero turns, which nothing was sampled for, where the limits leave no room."""
        length = len(self._window)
        new_ids = await self._next_ids(conversation)
        start = len(self._window) + len(new_ids)
        room = min(self._limits.context_tokens - start, self._limits.reply_tokens)
        if self._limits.sampled_tokens is not None:
            room = min(room, self._limits.sampled_tokens - self._window.num_sampled)
        if not self._turns or room > 0:  # results that no reply follows were never read: they are not in the window
            self._window.append(new_ids)
        if room <= 0:
            return Reply(text="", calls=(), stop=StopReason.CONTEXT, effort=Effort(), span=None)
        self._read = len(conversation)
        request = GenerateRequest(
            request_id=f"{self._episode_id}/{self._turns}",
            context_id=self._context_id,
            ids=self._window.ids(),
            max_new_tokens=room,
            stop_ids=self._renderer.stop_ids,
            temperature=self._temperature,
            seed=None if self._seed is None else turn_seed(self._seed, self._turns),
            min_step=self._min_step,
            exact=self._exact,
        )
        self._start = start
        stop = await self._sample(request)
        output_tokens = max(0, start - length) if self._turns else 0
        self._turns += 1
        parsed = self._renderer.parse(self._window.ids()[start:])
        return Reply(
            text=parsed.text,
            calls=parsed.calls,
            stop=stop,
            effort=Effort(
                thinking_tokens=parsed.thinking_tokens,
                call_tokens=parsed.call_tokens,
                output_tokens=output_tokens,
                message_tokens=parsed.message_tokens,
                calls=len(parsed.calls),
                turns=1,
            ),
            span=Span(context=len(self._windows) - 1, start=start, end=len(self._window)),
        )

    def contexts(self) -> tuple[Context, ...]:
        return tuple(window.context(opened) for window, opened in self._windows if len(window))

    async def close(self) -> None:
        """Free the context's KV, also that of a reply that failed. An engine that is gone has nothing to free."""
        if len(self._window):
            with contextlib.suppress(EngineError):
                await self._engine.forget(self._context_id)

    async def _next_ids(self, conversation: Sequence[Message]) -> list[int]:
        """The ids that the conversation's new messages add to the window, which is a new one if the format says so."""
        if not self._turns:
            return [int(token) for token in self._renderer.open(conversation)]
        new = conversation[self._read :]
        if [message.role for message in new] != ["assistant", "tool"]:
            roles = ", ".join(message.role for message in new)
            raise ValueError(f"a conversation goes on with the reply and its results, not with: {roles or 'nothing'}")
        ids = self._renderer.follow(self._window.ids(), self._start, new[0], new[1:])
        if ids is None:
            with contextlib.suppress(EngineError):
                await self._engine.forget(self._context_id)
            self._windows.append((Window(), Opened.RERENDER))
            ids = self._renderer.open(conversation)
        return [int(token) for token in ids]

    async def _sample(self, request: GenerateRequest) -> StopReason:
        """Stream one reply into the window."""
        deadline = asyncio.get_running_loop().time() + OVERLOAD_WAIT_S
        wait_s = 0.02
        while True:
            try:
                async with contextlib.aclosing(_closable(self._engine.generate(request))) as chunks:
                    async for chunk in chunks:
                        self._window.add(chunk, start=len(request.ids))
                        if chunk.stop is not None:
                            return chunk.stop
            except OverloadedError:
                if len(self._window) > len(request.ids) or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 1.0)
                continue
            raise EngineError(f"the engine ended reply {request.request_id} without a reason to stop")


async def _closable(chunks: AsyncIterator[TokenChunk]) -> AsyncGenerator[TokenChunk, None]:
    """A generator over any iterator: closing it closes the inner one if it can be closed."""
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def task_renderers(
    make: Callable[[Sequence[dict[str, Any]]], Renderer], recipe: AgentRecipe, extra: Sequence[dict[str, Any]]
) -> Callable[[Task], Renderer]:
    """The chat format that speaks of each task's own tools. `make` takes JSON schemas; extra: those of MCP's tools."""

    @functools.cache
    def of(tools: tuple[str, ...]) -> Renderer:
        return make([*schemas(tools), *extra])

    return lambda task: of(recipe.for_task(task).tools)


def engine_policies(
    engine: Engine,
    renderer_of: Callable[[Task], Renderer],
    limits: TokenLimits,
    *,
    temperature: float = 1.0,
    exact: Version | None = None,
    prefix: str = "",
) -> Callable[..., EnginePolicy]:
    """A maker of policies for `runner.Runner`. `prefix` keeps the contexts of several users of one engine apart."""

    def make(*, task: Task, episode_id: str, seed: int, min_step: int | None) -> EnginePolicy:
        return EnginePolicy(
            engine,
            renderer_of(task),
            episode_id=prefix + episode_id,
            limits=limits,
            temperature=temperature,
            seed=seed,
            min_step=min_step,
            exact=exact,
        )

    return make


def turn_seed(seed: int, turn: int) -> int:
    """A seed of its own for every turn of an episode, below 2**63."""
    return int(digest_of(str(seed), str(turn))[:16], 16) >> 1


Script = Sequence[Reply] | Callable[[Sequence[Message]], Reply]


class ScriptedPolicy:
    """Says what it was given: a list of replies, or a function of the conversation. It has no token windows.

    A list that has ended goes on with empty turns, which end an episode.

    >>> ScriptedPolicy([say("look", ToolCall(name="run_tests", arguments={})), say("done")])
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._turn = 0
        self.seen: list[tuple[Message, ...]] = []
        """The conversation at each call."""
        self.is_closed = False

    async def reply(self, conversation: Sequence[Message]) -> Reply:
        self.seen.append(tuple(conversation))
        self._turn += 1
        if callable(self._script):
            return self._script(conversation)
        return self._script[self._turn - 1] if self._turn <= len(self._script) else say("")

    def contexts(self) -> tuple[Context, ...]:
        return ()

    async def close(self) -> None:
        self.is_closed = True


def say(text: str, *calls: ToolCall, stop: StopReason = StopReason.END) -> Reply:
    """A reply for a script."""
    return Reply(text=text, calls=calls, stop=stop, effort=Effort(calls=len(calls), turns=1), span=None)
