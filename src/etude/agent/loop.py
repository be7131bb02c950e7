"""One episode, on one screen.

    opening -> policy.reply -> calls, in the sandbox -> results in order -> policy.reply ... -> files, patch -> Episode

An episode ends when the model calls finish (FINISHED), writes a turn without a call (STOPPED), or meets a limit. A
broken call is answered with an error and the episode goes on. From the first action on, a sandbox that dies is the
agent's doing (SANDBOX_DIED) and is scored; one that dies before that, none to be had, or an engine that fails at any
time, makes a FAULT. What to do about faults, and grading, is the runner's business.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from etude.agent.prompts import opening
from etude.agent.recipe import AgentRecipe
from etude.agent.tool import NOT_PASSED, Ask, Desk, MakeTool, Search, failed
from etude.agent.toolbox import Toolbox
from etude.code.diff import unified_diff
from etude.errors import EngineError, SandboxDiedError, SandboxError
from etude.protocols import Message, Policy, Reply, Sandbox
from etude.types import Context, Effort, Episode, Fault, Outcome, StopReason, Task, ToolErrorKind, ToolResult, Turn

Clock = Callable[[], float]
"""Seconds, monotonic."""
MAX_FILES = 64
"""Changed files that an episode keeps. Code that ran in the sandbox may have made any number."""
MAX_FILES_SEEN = 1024
"""Files that are looked at to find them; the task's own come first."""
MAX_CHANGED_BYTES = 1 << 20
"""Bytes of the changed files together; what is beyond is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the agent has beyond its sandbox."""

    ask: Ask | None = None
    search: Search | None = None
    extra: Mapping[str, MakeTool] = field(default_factory=dict)
    """Tools beside the recipe's, such as an MCP server's, by name."""
    watch: Callable[[Reply, Sequence[ToolResult]], Awaitable[None]] | None = None
    """Hears of every turn."""


async def run_episode(
    task: Task, sandbox: Sandbox, policy: Policy, recipe: AgentRecipe, *, episode_id: str,
    clock: Clock = time.monotonic, services: Services | None = None,
) -> Episode:  # fmt: skip
    """Play `task` in `sandbox`, which holds its workspace. Machines that break are in the episode, never raised."""
    play = Play(task, sandbox, recipe, clock, services or Services())
    fault: Fault | None = None
    files: Mapping[str, str | None] = {}
    try:
        outcome = await play.run(policy, list(opening(task, recipe.system)))
        if play.has_acted:
            files = await changed_files(task, sandbox)
    except (SandboxError, EngineError) as error:
        if isinstance(error, SandboxDiedError) and play.has_acted:
            outcome = Outcome.SANDBOX_DIED
        else:
            outcome, fault = Outcome.FAULT, Fault(boundary=error.boundary, message=str(error))
    return play.episode(episode_id, policy.contexts(), outcome, files, fault)


@dataclass(slots=True)
class Play:
    """An episode while it is played: what it has used so far, against its limits."""

    task: Task
    sandbox: Sandbox
    recipe: AgentRecipe
    clock: Clock
    services: Services
    turns: list[Turn] = field(default_factory=list)
    generate_s: float = 0.0
    tools_s: float = 0.0
    has_acted: bool = False
    calls: int = 0
    calls_before: int = 0
    first_turn: int = 0
    desk: Desk = field(init=False)
    tools: Toolbox = field(init=False)

    def __post_init__(self) -> None:
        task, recipe = self.task, self.recipe.for_task(self.task)
        self.desk = Desk(
            task=task, sandbox=self.sandbox, finish_needs_pass=recipe.finish_needs_pass, ask=self.services.ask,
            search=self.services.search, lint_command=recipe.lint_command,
        )  # fmt: skip
        self.tools = Toolbox(
            recipe.tools, self.desk, output_chars=recipe.tool_output_chars, strict=recipe.strict,
            extra=self.services.extra,
        )  # fmt: skip

    async def run(self, policy: Policy, conversation: list[Message]) -> Outcome:
        """Turns until the episode ends; `conversation` grows by them. Errors: SandboxError, EngineError."""
        outcome: Outcome | None = None
        while outcome is None:
            start = self.clock()
            reply = await policy.reply(conversation)
            self.generate_s += self.clock() - start
            if reply.effort.turns == 0:  # the window has no room for another reply
                return Outcome.CONTEXT_LIMIT
            results, outcome = await self.act(reply)
            self.record(reply, results, self.clock() - start)
            conversation += [
                Message(role="assistant", text=reply.text, calls=reply.calls),
                Message(role="tool", results=results),
            ]
            if self.services.watch is not None:
                await self.services.watch(reply, results)
        return outcome

    def begin_again(self) -> None:
        """For another request of the same person: turns and calls count anew, and so does the time of the tools."""
        self.first_turn, self.calls, self.tools_s = len(self.turns), 0, 0.0
        self.desk.is_finished = False

    def episode(
        self, episode_id: str, contexts: tuple[Context, ...], outcome: Outcome,
        files: Mapping[str, str | None], fault: Fault | None,
    ) -> Episode:  # fmt: skip
        """files: those that changed, as `changed_files` gives them."""
        before = self.task.workspace
        return Episode(
            episode_id=episode_id,
            task_id=self.task.task_id,
            contexts=contexts,
            turns=tuple(self.turns),
            outcome=outcome,
            patch=unified_diff(before, {path: text for path, text in {**before, **files}.items() if text is not None}),
            files={path: text for path, text in files.items() if text is not None},
            effort=sum((turn.effort for turn in self.turns), Effort()),
            fault=fault,
            timings={"generate": self.generate_s, "tools": self.tools_s},
        )

    async def act(self, reply: Reply) -> tuple[tuple[ToolResult, ...], Outcome | None]:
        """Carry out a reply's calls, those that only read side by side; the outcome if the episode ends with it."""
        self.calls_before = self.calls
        if reply.stop is not StopReason.END:
            return (), Outcome.CONTEXT_LIMIT
        if not reply.calls and not self._barred():
            return (), Outcome.STOPPED
        if not reply.calls:
            return (failed(ToolErrorKind.UNEXPECTED_ENVIRONMENT, NOT_PASSED),), self._turns_left()
        results: list[ToolResult] = []
        outcome: Outcome | None = None
        for calls in self.tools.together(reply.calls):
            if outcome is not None:
                results += [failed(ToolErrorKind.INVALID_ARGUMENTS, "the episode has ended")] * len(calls)
                continue
            allowed = calls[: self.recipe.max_calls - self.calls]
            self.calls += len(allowed)
            start = self.clock()
            self.desk.timeout_s = min(self.recipe.tool_timeout_s, self._wall_limit() - self.tools_s)
            if allowed:
                await self._prove_alive()
            results += await self.tools.answer_all(allowed)
            self.tools_s += self.clock() - start
            if self.desk.is_finished:
                outcome = Outcome.FINISHED
            elif len(allowed) < len(calls):
                outcome = Outcome.TURN_LIMIT
                over = len(calls) - len(allowed)
                results.append(failed(ToolErrorKind.INVALID_ARGUMENTS, "no calls are left"))
                results += [failed(ToolErrorKind.INVALID_ARGUMENTS, "the episode has ended")] * (over - 1)
            elif self.tools_s >= self._wall_limit():
                outcome = Outcome.TIME_LIMIT
        return tuple(results), outcome or self._turns_left()

    def record(self, reply: Reply, results: tuple[ToolResult, ...], wall_s: float) -> None:
        counts = {name: getattr(reply.effort, name) for name in Effort.__struct_fields__}
        effort = Effort(**{**counts, "calls": self.calls - self.calls_before})  # calls beyond the limit do not count
        self.turns.append(
            Turn(
                text=reply.text,
                calls=reply.calls,
                results=results,
                stop=reply.stop,
                effort=effort,
                span=reply.span,
                wall_s=wall_s,
            )
        )

    async def _prove_alive(self) -> None:
        """Right before the first action: a sandbox that broke while it waited must not count against the agent."""
        if not self.has_acted:
            await self.sandbox.list_files()
            self.has_acted = True

    def _barred(self) -> bool:
        return self.recipe.finish_needs_pass and not self.desk.has_passed

    def _turns_left(self) -> Outcome | None:
        limit = min(self.recipe.max_turns, self.task.limits.max_turns)
        return Outcome.TURN_LIMIT if len(self.turns) - self.first_turn + 1 >= limit else None

    def _wall_limit(self) -> float:
        return min(self.recipe.wall_s, self.task.limits.wall_s)


async def changed_files(task: Task, sandbox: Sandbox) -> dict[str, str | None]:
    """The text files that differ from the task's workspace, path -> text; None: gone. Errors: SandboxError."""
    changed: dict[str, str | None] = {}
    room = MAX_CHANGED_BYTES
    paths = await sandbox.list_files()
    for path in task.workspace:
        if path not in paths:
            changed[path] = None
    for path in sorted(paths, key=lambda path: (path not in task.workspace, path))[:MAX_FILES_SEEN]:
        try:
            data = await sandbox.read_file(path)
            text = data.decode()
            path.encode()
        except (OSError, UnicodeError):
            continue  # not a text file, or no longer there
        if text == task.workspace.get(path):
            continue
        if len(changed) == MAX_FILES or len(data) > room:
            break
        room -= len(data)
        changed[path] = text
    return changed
