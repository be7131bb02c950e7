"""The stage `serve`: which sections such a recipe has; what they are where nothing is said, serving.py says. Light."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.agent.recipe import AgentRecipe
from etude.inference.recipe import EngineRecipe
from etude.models.recipe import ModelRecipe
from etude.sandbox.recipe import SandboxRecipe
from etude.serve.recipe import ServeRecipe
from etude.sessions.recipe import SessionsRecipe
from etude.weights.recipe import WeightsRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeStage:
    """Every section of a recipe with stage = "serve"."""

    model: ModelRecipe
    weights: WeightsRecipe | None = None
    """Where new versions come from; None: the model's own weights are served."""
    serve: ServeRecipe
    sessions: SessionsRecipe = field(default_factory=SessionsRecipe)
    engine: EngineRecipe
    agent: AgentRecipe
    sandbox: SandboxRecipe
