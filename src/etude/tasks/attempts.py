"""What a model itself tries first at a task, and what the tools say to it.

    task --opening--> engine samples a reply --its first edit_file, then run_tests, in a sandbox--> Attempt

A wrong edit that somebody planted teaches to undo and to try something else only where the model would not have made it
anyway: at its own mistakes it goes on to make the same one again. So transcripts hold these (`transcripts`).

What it does not do: play whole episodes, or grade (agent, rewards).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence

from etude.agent.policy import EnginePolicy, TokenLimits
from etude.agent.prompts import opening
from etude.agent.runner import together
from etude.agent.tools import Desk, Toolbox
from etude.data.corpus import PATH, Edit
from etude.data.render import Renderer
from etude.errors import SandboxDiedError, SandboxError
from etude.protocols import Engine, SandboxPool
from etude.types import FORMAT, Noun, StopReason, Task, ToolCall, digest_of

TEST = ToolCall(name="run_tests", arguments={})
MAX_AT_ONCE = 160
_LIMITS = TokenLimits(context_tokens=1024, reply_tokens=96)
_OUTPUT_CHARS = 2000


class Attempt(Noun, frozen=True):
    """One wrong edit of a task's file."""

    edit: Edit
    said: str
    """The tool's answer: `ok`, or why the edit does not fit."""
    text: str
    """The file afterwards."""
    failure: str
    """What run_tests said of it."""


Attempts = Mapping[str, tuple[Attempt, ...]]
"""By task; those that failed the visible tests, each once."""


class Tried(Noun, frozen=True):
    """The file that they are kept in."""

    tasks: dict[str, tuple[Attempt, ...]]
    format: int = FORMAT


async def try_first_edits(
    tasks: Sequence[Task],
    engine: Engine,
    renderer: Renderer,
    pool: SandboxPool,
    *,
    samples: int,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, tuple[Attempt, ...]]:
    """Sample `samples` first edits of each task at temperature 1. `progress` is called after each.

    Errors: EngineError, SandboxError.
    """
    places = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(task: Task, number: int) -> Attempt | None:
        async with places:
            edit = await _sample(task, engine, renderer, f"{seed}/{task.task_id}/{number}")
            found = None if edit is None else await _try(task, edit, pool)
        progress()
        return found

    flat = iter(await together([one(task, number) for task in tasks for number in range(samples)]))
    found: dict[str, tuple[Attempt, ...]] = {}
    for task in tasks:
        wrong = {attempt.edit: attempt for attempt in itertools.islice(flat, samples) if attempt is not None}
        found[task.task_id] = tuple(attempt for attempt in wrong.values() if attempt.failure != "ok")
    return found


async def _sample(task: Task, engine: Engine, renderer: Renderer, name: str) -> Edit | None:
    """The first edit of a sampled reply; None if there is none that can be read."""
    policy = EnginePolicy(engine, renderer, episode_id=name, limits=_LIMITS, seed=int(digest_of(name)[:16], 16) >> 1)
    try:
        reply = await policy.reply(opening(task))
    finally:
        await asyncio.shield(policy.close())
    call = next((call for call in reply.calls if call.name == "edit_file"), None)
    if reply.stop is not StopReason.END:  # the agent's loop carries out no call of a reply that was cut
        return None
    if call is None or call.error is not None or "line" not in call.arguments or call.arguments["path"] != PATH:
        return None
    return Edit(old=str(call.arguments["old"]), new=str(call.arguments["new"]), line=int(str(call.arguments["line"])))


async def _try(task: Task, edit: Edit, pool: SandboxPool) -> Attempt | None:
    """None where the edited code ends the sandbox."""
    sandbox = await pool.acquire(task.workspace)
    try:
        tools = Toolbox(["edit_file", "run_tests"], Desk(task=task, sandbox=sandbox), output_chars=_OUTPUT_CHARS)
        arguments = {"path": PATH, "line": edit.line, "old": edit.old, "new": edit.new}
        said = await tools.answer(ToolCall(name="edit_file", arguments=arguments))
        text = (await sandbox.read_file(PATH)).decode()
        failure = await tools.answer(TEST)
    except SandboxDiedError:  # of what it ran
        return None
    finally:
        with contextlib.suppress(SandboxError):
            await asyncio.shield(sandbox.close())
    return Attempt(edit=edit, said=said.text, text=text, failure=failure.text)
