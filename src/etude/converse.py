"""A person's folder and an endpoint or a local model -> a conversation (agent/interactive.py), wired; and where
sessions are kept.

Everything heavy is imported by the function that needs it: with an endpoint no torch is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude import config
from etude.agent.recipe import CODING, CODING_LIMITS
from etude.errors import RecipeError, RunError
from etude.state import state_folder
from etude.types import digest_of

if TYPE_CHECKING:
    from etude.agent.endpoint import Endpoint, Usage
    from etude.agent.interactive import Conversation, Screen
    from etude.agent.recipe import AgentRecipe
    from etude.protocols import Policy


@contextlib.asynccontextmanager
async def open_conversation(
    repo: Path, screen: Screen, *, endpoint: Endpoint | None, model: str, usage: Usage, resume: bool,
    overrides: Sequence[str], on_text: Callable[[str], None],
) -> AsyncIterator[Conversation]:  # fmt: skip
    """A conversation about the folder `repo`: an endpoint, else a local model, answers in it. usage: counts what the
    endpoint is asked.

    Errors: RecipeError, WorkspaceError, ModelError, SandboxError; RunError if there is nothing to resume.
    """
    from etude.agent.interactive import Conversation, read_saved
    from etude.agent.loop import Services
    from etude.agent.mcp import Servers
    from etude.agent.recipe import AgentRecipe
    from etude.agent.search import search_of
    from etude.code.folder import read_folder
    from etude.sandbox.pool import NamespacePool
    from etude.sandbox.recipe import SandboxRecipe

    tree = {"tools": list(CODING), **CODING_LIMITS}
    recipe = config.convert(config.override(tree, overrides), AgentRecipe, where="agent")
    folder = read_folder(repo)
    about = state_folder() / "agent" / digest_of(str(folder.path))[:16]
    kept = max(about.glob("*/"), default=None) if resume else about / time.strftime("%Y%m%d-%H%M%S")
    if kept is None:
        raise RunError(f"there is no conversation about {folder.path} yet", hint="leave out --resume")
    async with NamespacePool(SandboxRecipe(spares=1, timeout_s=recipe.tool_timeout_s, memory_mb=2048)) as pool:
        servers = await Servers.describe(recipe.mcp, pool)
        sandbox = await pool.acquire(folder.files)
        try:
            async with (
                _policies(recipe, servers.schemas(), endpoint, model, usage, on_text) as make_policy,
                servers.tools(sandbox) as extra,
            ):
                services = Services(ask=screen.ask, search=search_of(recipe), extra=extra)
                conversation = Conversation(folder, sandbox, make_policy, recipe, screen, kept, services)
                if resume:
                    await conversation.resume(read_saved(kept))
                kept.mkdir(parents=True, exist_ok=True)
                yield conversation
        finally:
            await sandbox.close()


def endpoint_of(url: str, model: str, key: str, prices: Path | None, budget: float | None) -> Endpoint | None:
    """The endpoint of a command line; None: none is named. prices: TOML, a table a model. Errors: RecipeError."""
    from etude.agent.endpoint import Endpoint, Price

    if not url:
        if prices is not None or budget is not None:
            raise RecipeError("prices and a budget are an endpoint's", hint="--url ADDRESS")
        return None
    if not model:
        raise RecipeError("an endpoint needs the name of a model", hint="--model NAME")
    if prices is None and budget is not None:
        raise RecipeError(
            "a budget needs prices", hint="--prices FILE, with input and output, in dollars for a million"
        )
    try:
        table = tomllib.loads(prices.read_text(encoding="utf-8")) if prices is not None else {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the prices {prices}", cause=str(error)) from error
    if prices is not None and model not in table:
        raise RecipeError(f"{prices} has no price of {model!r}", hint=f'["{model}"], then input = ... and output = ...')
    price = config.convert(table.get(model, {}), Price, where=f"{prices}: {model}")
    return Endpoint(url=url, model=model, key=key, price=price, budget=budget)


@contextlib.asynccontextmanager
async def _policies(
    recipe: AgentRecipe, extra: list[dict[str, Any]], endpoint: Endpoint | None, model: str, usage: Usage,
    on_text: Callable[[str], None],
) -> AsyncIterator[Callable[[int], Policy]]:  # fmt: skip
    """What makes a policy for each request of a conversation. extra: schemas beside those of the recipe's tools."""
    from etude.agent.tools import schemas

    tools = schemas(recipe.tools) + extra
    if endpoint is not None:
        from etude.agent.endpoint import EndpointPolicy

        yield lambda number: EndpointPolicy(endpoint, tools, on_text=on_text, usage=usage)
        return
    from etude.agent.policy import EnginePolicy, TokenLimits
    from etude.data.formats import open_renderer
    from etude.inference.recipe import EngineRecipe
    from etude.inference.torch_engine import TorchEngine
    from etude.models.load import load_model
    from etude.models.recipe import model_folder
    from etude.types import Opened, Version

    path = model or "etude-nano"
    renderer = open_renderer(model_folder(path), tools, thinking=recipe.thinking)
    loaded = await asyncio.to_thread(load_model, path)
    limits = TokenLimits(
        context_tokens=min(recipe.context_tokens, loaded.max_context), reply_tokens=recipe.reply_tokens
    )
    engine = TorchEngine(loaded, EngineRecipe(max_concurrent=1))
    await engine.set_version(Version(incarnation=1, n=0, step=0))
    try:
        yield lambda number: EnginePolicy(
            engine, renderer, episode_id=f"request-{number}", limits=limits,
            opened=Opened.RERENDER if number else Opened.TASK,
        )  # fmt: skip
    finally:
        await engine.close()
