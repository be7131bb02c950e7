"""Settings of the agent."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.agent.tools import TOOLS
from etude.config import nearest
from etude.errors import RecipeError, TaskError
from etude.types import Task

TOOL_NAMES = tuple(TOOLS)
"""Every tool there is."""
BASIC = ("read_file", "edit_file", "run_tests", "finish")
"""What the nano knows."""
CODING = ("read_file", "edit_file", "apply_patch", "list_dir", "glob", "grep", "shell", "shell_output", "shell_kill",
          "read_lints", "todo_write", "ask_user")  # fmt: skip
"""For a model that works on a person's own code."""
CODING_LIMITS = {"context_tokens": 200_000, "reply_tokens": 16_000, "max_turns": 100, "max_calls": 400,
                 "wall_s": 3600.0, "tool_timeout_s": 120.0, "tool_output_chars": 16_000}  # fmt: skip
"""And where such work ends: keys of AgentRecipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """A server of the Model Context Protocol whose tools the agent may call, as mcp__SERVER__TOOL."""

    command: tuple[str, ...]
    """The program and its arguments; it speaks over its standard input and output."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to its environment. Inside the sandbox the agent can read it: no secret belongs there."""
    trusted: bool = False
    """False: it runs inside the sandbox of each episode. True: on this machine, with your own rights and network."""
    tools: tuple[str, ...] = ()
    """The tools that are offered; none: all of the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecipe:
    """What an episode is given, and where it ends."""

    tools: tuple[str, ...] = BASIC
    """The tools that the agent may call; any other name is answered with an error. A task may name others."""
    strict: tuple[str, ...] = ()
    """Tools that take their arguments to the letter. Others take numbers that come as text, and leave out arguments
    that they do not know."""
    lint_command: str = ""
    """The project's own linter, for read_lints; empty: ruff where it is installed, else syntax alone."""
    search_url: str = ""
    """Where web_search asks: an address with {query} in it that answers with JSON as SearXNG's does. Empty: the tool is
    off. It runs on the host, not in the sandbox."""
    mcp: Mapping[str, McpServer] = field(default_factory=dict)
    """Servers by name: `[agent.mcp.NAME]`."""
    thinking: str = "keep"
    """What becomes of earlier thinking where a chat format has it: `keep` it where it was sampled, or `drop` it as the
    family's template does, which opens a new context."""
    system: str = ""
    """Text of the system message; empty: there is none."""
    context_tokens: int = 1024
    """Tokens of the window: task, replies and tool answers together. A full window ends the episode."""
    reply_tokens: int = 256
    """Tokens of one reply. A reply that is cut ends the episode, and nothing in it is carried out."""
    max_turns: int = 12
    """Replies in one episode; a task's own limit lowers it."""
    max_calls: int = 24
    """Tool calls in one episode. A call beyond is answered with an error and the episode ends."""
    wall_s: float = 60.0
    """Seconds that the tools of one episode may take together; a task's own limit lowers it. Waiting for the model
    does not count: how long a busy machine takes over a token is not the agent's doing."""
    tool_timeout_s: float = 10.0
    """Seconds that one tool call may take."""
    tool_output_chars: int = 1200
    """Characters of one tool answer; the rest is cut and counted."""
    finish_needs_pass: bool = False
    """A control for evaluation: ending is refused until run_tests has passed once. It shows what persistence alone
    is worth."""
    max_episodes: int = 160
    """Episodes that run at once."""

    def for_task(self, task: Task) -> AgentRecipe:
        """With the task's own tools and strictness, if it has any. Errors: TaskError for a tool that cannot be had."""
        if not task.tools and task.strict is None:
            return self
        try:
            return dataclasses.replace(
                self, tools=task.tools or self.tools, strict=self.strict if task.strict is None else task.strict
            )
        except RecipeError as error:
            raise TaskError(f"task {task.task_id}: {error.message}", cause=error.cause, hint=error.hint) from error

    def __post_init__(self) -> None:
        for name in self.tools:
            if name not in TOOL_NAMES:
                hint = nearest(name, TOOL_NAMES) or f"tools: {', '.join(TOOL_NAMES)}"
                raise RecipeError(f"agent.tools: unknown tool {name!r}", hint=hint)
        if self.thinking not in ("keep", "drop"):
            raise RecipeError(f"agent.thinking = {self.thinking!r} is unknown", hint="keep or drop")
        if unknown := [name for name in self.strict if name not in TOOL_NAMES]:
            raise RecipeError(f"agent.strict: unknown tool {unknown[0]!r}", hint=nearest(unknown[0], TOOL_NAMES))
        if "web_search" in self.tools and not self.search_url:
            raise RecipeError('agent.tools has "web_search" without a backend', hint="set agent.search_url")
        if self.search_url and "{query}" not in self.search_url:
            raise RecipeError(f"agent.search_url = {self.search_url!r} has no {{query}} in it")
        for name, server in self.mcp.items():
            if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", name):
                raise RecipeError(f"agent.mcp.{name} is not a name", hint="small letters, digits, - and _, at most 32")
            if not server.command:
                raise RecipeError(f"agent.mcp.{name}.command is empty", hint='command = ["program", "argument"]')
        if len(set(self.tools)) < len(self.tools) or not self.tools:
            raise RecipeError("agent.tools must name at least one tool, each once", cause=f"tools = {list(self.tools)}")
        if self.finish_needs_pass and "run_tests" not in self.tools:
            raise RecipeError("agent.finish_needs_pass = true needs the tool run_tests", hint="add it to agent.tools")
        for name in ("context_tokens", "reply_tokens", "max_turns", "max_calls", "max_episodes"):
            if getattr(self, name) < 1:
                raise RecipeError(f"agent.{name} = {getattr(self, name)} must be at least 1")
        for name in ("wall_s", "tool_timeout_s"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"agent.{name} = {getattr(self, name)} must be more than 0")
        if self.tool_output_chars < 80:
            raise RecipeError(f"agent.tool_output_chars = {self.tool_output_chars} cannot hold an error message")
