"""The stage `serve`: which sections such a recipe has. Light."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.agent.recipe import AgentRecipe
from etude.inference.recipe import EngineRecipe
from etude.models.recipe import ModelRecipe
from etude.sandbox.recipe import SandboxRecipe
from etude.serve.recipe import ServeRecipe
from etude.sessions.recipe import SessionsRecipe
from etude.weights.recipe import WeightsRecipe


def _serving_engine() -> EngineRecipe:
    return EngineRecipe(kv_reuse="version", max_concurrent=64)


def _serving_sandbox() -> SandboxRecipe:
    return SandboxRecipe(spares=1, timeout_s=120.0, memory_mb=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeStage:
    """Every section of a recipe with stage = "serve"."""

    model: ModelRecipe
    weights: WeightsRecipe | None = None
    """Where new versions come from; None: the model's own weights are served."""
    serve: ServeRecipe = field(default_factory=ServeRecipe)
    sessions: SessionsRecipe = field(default_factory=SessionsRecipe)
    engine: EngineRecipe = field(default_factory=_serving_engine)
    agent: AgentRecipe = field(default_factory=AgentRecipe)
    sandbox: SandboxRecipe = field(default_factory=_serving_sandbox)
