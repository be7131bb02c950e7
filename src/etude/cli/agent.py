"""`etude agent`: the agent on your own folder, in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax

from etude.cli.options import visible
from etude.protocols import Reply
from etude.types import ToolResult

if TYPE_CHECKING:
    from etude.agent.endpoint import Usage

_LINES = 6
"""Of a tool's answer that are shown."""


class Terminal:
    """Text as it comes, one line a call, the first lines of its answer, diffs in colour (agent.interactive.Screen)."""

    def __init__(self, *, yes: bool) -> None:
        self._console = Console(highlight=False)
        self._yes = yes
        self._streamed = False

    def text(self, part: str) -> None:
        """A piece of the reply at hand."""
        self._console.print(visible(part), end="", markup=False)
        self._streamed = True

    def reply(self, reply: Reply) -> None:
        if not self._streamed and reply.text:
            self._console.print(visible(reply.text), end="", markup=False)
        if self._streamed or reply.text:
            self._console.print()
        self._streamed = False

    def result(self, reply: Reply, results: Sequence[ToolResult]) -> None:
        for call, answer in zip(reply.calls, results, strict=False):
            name, first = visible(call.name), visible(str(next(iter(call.arguments.values()), "")))
            given = " ; ".join(line for line in first.split("\n") if line.strip())
            room = max(20, self._console.width - len(name) - 4)
            self._console.print(f"[bold cyan]>[/] {escape(name)} ", end="")
            self._console.print(given if len(given) <= room else f"{given[: room - 3]}...", style="cyan", markup=False)
            lines = visible(answer.text.rstrip()).split("\n")
            style = "red" if answer.error else "dim"
            for line in lines[:_LINES]:
                self._console.print(f"  {line[:160]}", style=style, markup=False)
            if len(lines) > _LINES:
                self._console.print(f"  ... {len(lines) - _LINES} more lines", style="dim")

    def diff(self, text: str) -> None:
        self._console.print(Syntax(visible(text.rstrip()), "diff", theme="ansi_dark", background_color="default"))

    async def ask(self, question: str, options: Sequence[str]) -> str:
        if self._yes and "yes" in options:
            return "yes"
        choice = f" [{'/'.join(options)}]" if options else ""
        answer = await self.line(f"{question}{choice} ")
        if not options:
            return answer
        return next((option for option in options if answer and option.startswith(answer.lower())), answer)

    async def line(self, prompt: str) -> str:
        """What the person types; empty at the end of the input."""
        self._console.print(visible(prompt), end="", style="bold", markup=False)
        loop = asyncio.get_running_loop()
        typed: asyncio.Future[str] = loop.create_future()

        def read() -> None:
            line = sys.stdin.readline()
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(typed.set_result, line.strip())

        threading.Thread(target=read, daemon=True).start()  # the program may end while it waits
        return await typed

    def say(self, text: str, style: str = "dim") -> None:
        self._console.print(visible(text), style=style, markup=False)


def _used(usage: Usage, *, with_cost: bool) -> str:
    cost = f", ${usage.cost:.4f}" if with_cost else ""
    return (f"{usage.requests} requests, {usage.input_tokens:,} tokens in ({usage.cached_tokens:,} of them cached), "
            f"{usage.output_tokens:,} out{cost}")  # fmt: skip


Url = Annotated[str, typer.Option("--url", envvar="OPENAI_BASE_URL", help="An OpenAI-compatible endpoint, to /v1.")]
Name = Annotated[str, typer.Option("--model", help="The endpoint's model; without --url a local one, or its folder.")]
Key = Annotated[str, typer.Option("--key", envvar="OPENAI_API_KEY", help="The endpoint's; better in the environment.")]
Prices = Annotated[Path | None, typer.Option("--prices", help="TOML: dollars for a million tokens, by model.")]
Budget = Annotated[float | None, typer.Option("--budget", min=0.0, help="Dollars, by --prices; then it ends.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the last conversation about this folder.")]
Yes = Annotated[bool, typer.Option("--yes", help="Write changes into the folder without asking.")]
Once = Annotated[bool, typer.Option("--once", help="End after the first answer.")]
Dials = Annotated[list[str] | None, typer.Option("-o", help="A dial of the agent, e.g. -o tool_timeout_s=60.")]


def agent(
    prompt: Annotated[str, typer.Argument(help="What to do; asked for if it is left out.")] = "",
    repo: Annotated[Path, typer.Option("--repo", help="The folder to work on.")] = Path("."),
    url: Url = "",
    model: Name = "",
    key: Key = "",
    prices: Prices = None,
    budget: Budget = None,
    resume: Resume = False,
    yes: Yes = False,
    once: Once = False,
    override: Dials = None,
) -> None:
    """Work on your own folder with the agent that trains here. Changes stay in a sandbox until you say yes."""
    from etude.agent.endpoint import Usage
    from etude.converse import endpoint_of, open_conversation

    terminal, usage = Terminal(yes=yes), Usage()
    endpoint = endpoint_of(url, model, key, prices, budget)

    async def run() -> None:
        async with open_conversation(
            repo,
            terminal,
            endpoint=endpoint,
            model=model,
            usage=usage,
            resume=resume,
            overrides=override or [],
            on_text=terminal.text,
        ) as conversation:
            whole = asyncio.current_task()
            assert whole is not None

            def stop() -> None:
                """Ctrl-C: the reply, if there is one, else the program."""
                if conversation.is_busy:
                    conversation.interrupt.set()
                else:
                    whole.cancel()

            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
            text = prompt or await terminal.line("what shall I do? ")
            while text:
                outcome = await conversation.request(text)
                if outcome is None:
                    text = await terminal.line("\nstopped. what instead? (empty: end) ")
                    continue
                if budget is not None and usage.cost >= budget:
                    terminal.say(f"the budget of ${budget:g} is spent", "yellow")
                    break
                if outcome not in ("stopped", "finished"):
                    terminal.say(f"ended: {outcome.replace('_', ' ')}", "yellow")
                if once:
                    break
                text = await terminal.line("\nanything else? (empty: end) ")
            written = await conversation.bring_back()
            terminal.say(f"written: {', '.join(written)}" if written else "nothing was written")
            if endpoint is not None:
                terminal.say(_used(usage, with_cost=prices is not None))

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
