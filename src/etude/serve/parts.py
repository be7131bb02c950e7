"""A server out of an engine, a chat format, a recipe and, if turns are to be kept, a recorder.

What it does not do: make any of these (serving.py does, or a test).
"""

from __future__ import annotations

from etude.agent.mcp import Servers
from etude.agent.recipe import AgentRecipe
from etude.protocols import Engine, SandboxPool, SessionRecorder
from etude.serve.agent_session import AgentSessions
from etude.serve.app import make_app
from etude.serve.gate import Gate
from etude.serve.keys import Keys
from etude.serve.measures import Measures
from etude.serve.memory import Memory, Sessions
from etude.serve.recipe import ServeRecipe
from etude.serve.rendering import Chat, Rendering
from etude.serve.server import HttpServer
from etude.serve.turn import Parts


def make_server(
    engine: Engine, chat: Chat, recipe: ServeRecipe, *, name: str, recorder: SessionRecorder | None = None,
    keys: Keys | None = None, pool: SandboxPool | None = None, agent: AgentRecipe | None = None,
    servers: Servers | None = None,
) -> HttpServer:  # fmt: skip
    """One that can be started. name: of the model. keys: those of the recipe's file, if it names one. pool, servers (of
    MCP): for the agent."""
    assert keys is not None or not recipe.keys, f"the keys of {recipe.keys} must be loaded"
    memory = Memory(max_windows=recipe.remembered_windows, max_tokens=recipe.remembered_tokens)
    parts = Parts(
        engine=engine, rendering=Rendering(chat), recipe=recipe, name=name, memory=memory,
        sessions=Sessions(4 * recipe.remembered_windows), measures=Measures(), recorder=recorder,
    )  # fmt: skip
    gate = Gate(recipe, keys)
    agents = None if pool is None else AgentSessions(parts, pool, agent or AgentRecipe(), servers or Servers({}, ()))
    server = HttpServer(make_app(parts, gate, agents), gate, recipe)
    if agents is not None:
        server.at_end(agents.close)
    return server
