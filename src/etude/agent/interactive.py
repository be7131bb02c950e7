"""A person and the agent on a folder: requests, turns, changes shown, and asked about before they leave the sandbox.

    request --+--> policy and tools, in a sandbox with a copy of the folder --> outcome --> changes? --ask--> folder
              |          ^ Ctrl-C: the reply stops, tools end
              +----------+-- what the person says instead goes into the conversation

The same loop, tools and sandbox as in training (agent/loop.py). A conversation is kept after every request, so that it
can be taken up again. What it does not do: draw (a Screen does), or talk to a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from etude.agent.loop import Play, Services, changed_files
from etude.agent.prompts import request
from etude.agent.recipe import AgentRecipe
from etude.code.diff import diff_of
from etude.code.folder import Folder, apply_changes
from etude.errors import RunError, SandboxError
from etude.frames import read_file, write_file
from etude.protocols import Message, Policy, Reply, Sandbox
from etude.types import FORMAT, Context, Episode, IOChecks, Limits, Noun, Outcome, Task, ToolResult

SYSTEM = """You are a coding agent. You work in a copy of the user's folder, in a sandbox without network. Read before \
you edit, keep changes small, and run what shows that they work. When you are done, or need the user, answer without a \
call."""


class Screen(Protocol):
    """What a person sees."""

    def reply(self, reply: Reply) -> None: ...
    def result(self, reply: Reply, results: Sequence[ToolResult]) -> None: ...
    def diff(self, text: str) -> None: ...
    async def ask(self, question: str, options: Sequence[str]) -> str: ...


class Saved(Noun, frozen=True):
    """A conversation on disk."""

    folder: str
    conversation: tuple[Message, ...]
    changes: Mapping[str, str | None]
    """Of the sandbox against the folder: what was not brought back."""
    format: int = FORMAT


class _InterruptedError(Exception):
    """The person pressed Ctrl-C."""


class _Interruptible:
    """A policy whose reply ends at once when the person wants it; tools that run are left to end (Policy)."""

    def __init__(self, inner: Policy, interrupt: asyncio.Event) -> None:
        self.inner, self._interrupt = inner, interrupt

    async def reply(self, conversation: Sequence[Message]) -> Reply:
        replying = asyncio.ensure_future(self.inner.reply(conversation))
        waiting = asyncio.ensure_future(self._interrupt.wait())
        try:
            await asyncio.wait({replying, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if self._interrupt.is_set():
                raise _InterruptedError
            return replying.result()
        finally:
            for task in (replying, waiting):
                task.cancel()
            await asyncio.gather(replying, waiting, return_exceptions=True)

    def contexts(self) -> tuple[Context, ...]:
        return self.inner.contexts()

    async def close(self) -> None:
        await self.inner.close()


class Conversation:
    """About one folder. `make_policy` gives a policy for each request, which reads the whole conversation anew."""

    def __init__(
        self,
        folder: Folder,
        sandbox: Sandbox,
        make_policy: Callable[[int], Policy],
        recipe: AgentRecipe,
        screen: Screen,
        kept: Path,
        services: Services,
    ) -> None:
        """kept: a folder of this conversation, where it is saved."""
        self.folder, self._kept = folder, kept
        self._sandbox, self._make_policy, self._screen = sandbox, make_policy, screen
        self.interrupt = asyncio.Event()
        """Set it to stop the reply at hand."""
        self.is_busy = False
        """Whether there is one."""
        self.messages: list[Message] = []
        self._contexts: list[Context] = []
        self._requests = 0
        self._shown: Mapping[str, str | None] = {}
        self._last_diff = ""
        task = Task.make(
            prompt="", workspace=folder.files, verifier=IOChecks(path="", checks=()), category="folder",
            source={"folder": str(folder.path)}, limits=Limits(max_turns=recipe.max_turns, wall_s=recipe.wall_s),
        )  # fmt: skip
        self._play = Play(task, sandbox, recipe, time.monotonic, dataclasses.replace(services, watch=self._watch))

    async def request(self, text: str) -> Outcome | None:
        """What the person wants, until the agent answers without a call; None: interrupted.

        Errors: SandboxError, EngineError; the conversation keeps all whole turns.
        """
        if not self.messages:
            self.messages = [Message(role="system", text=self._play.recipe.system or SYSTEM)]
            text = request(text, self.folder.files)
        self.messages.append(Message(role="user", text=text))
        self.interrupt.clear()
        self._play.begin_again()
        policy = _Interruptible(self._make_policy(self._requests), self.interrupt)
        self._requests += 1
        self.is_busy = True
        try:
            return await self._play.run(policy, self.messages)
        except _InterruptedError:
            return None
        finally:
            self.is_busy = False
            self._contexts += policy.contexts()
            await asyncio.shield(policy.close())
            await self.save()

    async def changes(self) -> dict[str, str | None]:
        """What differs from the folder as it was read. Errors: SandboxError."""
        return await changed_files(self._play.task, self._sandbox)

    async def bring_back(self) -> list[str]:
        """Show all changes, ask, and write them into the folder; the paths written. Errors: WorkspaceError."""
        changes = await self.changes()
        if not changes:
            return []
        if (whole := diff_of(self.folder.files, changes)) != self._last_diff:
            self._screen.diff(whole)
        count = f"{len(changes)} file{'s' if len(changes) > 1 else ''}"
        answer = await self._screen.ask(f"write {count} into {self.folder.path}?", ("yes", "no"))
        return apply_changes(self.folder, changes) if answer == "yes" else []

    async def save(self) -> None:
        """Keep the conversation, and the episode so far."""
        changes = dict(self._shown)
        with contextlib.suppress(SandboxError):  # a sandbox that died took with it what was not shown yet
            changes = await self.changes() if self._play.has_acted else changes
        saved = Saved(folder=str(self.folder.path), conversation=tuple(self.messages), changes=changes)
        write_file(self._kept / "conversation.mp", saved)
        write_file(self._kept / "episode.mp", self.episode(changes))

    def episode(self, changes: Mapping[str, str | None]) -> Episode:
        return self._play.episode(self._kept.name, tuple(self._contexts), Outcome.STOPPED, changes, None)

    async def resume(self, saved: Saved) -> None:
        """Go on with a conversation: its messages, and its changes that the folder does not have. Errors: OSError."""
        self.messages = list(saved.conversation)
        for path, text in saved.changes.items():
            if text is not None:
                await self._sandbox.write_file(path, text.encode())
            else:
                await self._sandbox.exec(["rm", "-f", "--", path], timeout_s=self._play.recipe.tool_timeout_s)
        self._shown = saved.changes

    async def _watch(self, reply: Reply, results: Sequence[ToolResult]) -> None:
        self._screen.reply(reply)
        self._screen.result(reply, results)
        changes = await self.changes()
        if changes != self._shown:
            before = {**self.folder.files, **{path: text for path, text in self._shown.items() if text is not None}}
            newly = {path: text for path, text in changes.items() if self._shown.get(path, "") != text}
            self._last_diff = diff_of(before, newly)
            self._screen.diff(self._last_diff)
            self._shown = changes
        if self.interrupt.is_set():
            raise _InterruptedError


def read_saved(kept: Path) -> Saved:
    """Errors: RunError if there is none, StoreError if it is damaged."""
    path = kept / "conversation.mp"
    if not path.is_file():
        raise RunError(f"no conversation in {kept}")
    return read_file(path, Saved)
