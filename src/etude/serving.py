"""A stage `serve` -> a server that listens: the engine in a process of its own, which follows the weight store if there
is one, the model's chat format, sandboxes for the agent, a recorder if turns are to be kept.

Everything heavy is imported by the function that needs it. What it does not do: answer (serve/).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude import config
from etude.agent.recipe import BASIC, CODING, CODING_LIMITS
from etude.errors import RecipeError
from etude.serve.stage import ServeStage

if TYPE_CHECKING:
    from etude.serve.server import HttpServer


def serve_stage(model: str, weights: str, serve: dict[str, Any], db: str, overrides: Sequence[str]) -> ServeStage:
    """The stage of a command line. db: of sessions, by URL. overrides: key.path=value. Errors: RecipeError."""
    tools = list(BASIC if model == "etude-nano" else CODING)
    tree: dict[str, Any] = {"model": {"path": model}, "serve": serve, "agent": {"tools": tools, **CODING_LIMITS},
                            "engine": {"kv_reuse": "version", "max_concurrent": 64},
                            "sandbox": {"spares": 1, "timeout_s": 120.0, "memory_mb": 2048}}  # fmt: skip
    if db:
        tree["sessions"] = {"db": db}
    if weights:
        tree["weights"] = {"store": weights}
    return config.convert(config.override(tree, overrides), ServeStage, where="serve")


@contextlib.asynccontextmanager
async def open_server(stage: ServeStage) -> AsyncIterator[HttpServer]:
    """A server that listens; what it needs is ended after it.

    Errors: RecipeError, ModelError, EngineError, RunError, StoreError.
    """
    from etude.agent.mcp import Servers
    from etude.data.formats import ChatFormat
    from etude.models.recipe import model_folder
    from etude.rl.engines import ManagedEngine
    from etude.rl.processes import Workers
    from etude.sandbox.pool import NamespacePool
    from etude.serve.keys import Keys
    from etude.serve.parts import make_server
    from etude.sessions.opening import open_recorder

    if stage.agent.mcp and not stage.serve.agent:
        raise RecipeError("agent.mcp is set, and the agent is not served", hint="--agent serves it")
    keys = Keys.load(Path(stage.serve.keys)) if stage.serve.keys else None
    chat = ChatFormat(model_folder(stage.model.path), thinking=stage.agent.thinking)
    folder = Path(tempfile.mkdtemp(prefix="etude-serve-"))
    try:
        (folder / "recipe.toml").write_text(config.resolved_text("serve", stage), encoding="utf-8")
        async with contextlib.AsyncExitStack() as stack:
            workers = Workers(folder)
            stack.push_async_callback(workers.close)
            engine = ManagedEngine(workers, "serve")
            await engine.start()
            pool, servers = None, None
            if stage.serve.agent:
                pool = await stack.enter_async_context(NamespacePool(stage.sandbox))
                servers = await Servers.describe(stage.agent.mcp, pool)
            recorder = None
            if stage.serve.records:
                recorder = await stack.enter_async_context(open_recorder(stage.sessions, chat.renderer(()).spell))
            server = make_server(
                engine, chat, stage.serve, name=Path(stage.model.path).name, recorder=recorder, keys=keys,
                pool=pool, agent=stage.agent, servers=servers,
            )  # fmt: skip
            await server.start()
            stack.push_async_callback(server.close)
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)
