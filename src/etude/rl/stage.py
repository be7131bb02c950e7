"""The stage `rl`: which sections such a recipe has."""

from __future__ import annotations

from dataclasses import dataclass, field

from etude.agent.recipe import AgentRecipe
from etude.bench.recipe import EvalRecipe
from etude.inference.recipe import EngineRecipe
from etude.models.recipe import ModelRecipe
from etude.rewards.recipe import RewardRecipe
from etude.rl.recipe import BudgetRecipe, RLRecipe
from etude.sandbox.recipe import SandboxRecipe
from etude.tasks.recipe import TasksRecipe
from etude.train.recipe import TrainRecipe
from etude.weights.recipe import WeightsRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class RLStage:
    """Every section of a recipe with stage = "rl"."""

    model: ModelRecipe
    tasks: TasksRecipe
    sandbox: SandboxRecipe = field(default_factory=SandboxRecipe)
    agent: AgentRecipe = field(default_factory=AgentRecipe)
    reward: RewardRecipe = field(default_factory=RewardRecipe)
    rl: RLRecipe = field(default_factory=RLRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    engine: EngineRecipe = field(default_factory=EngineRecipe)
    weights: WeightsRecipe = field(default_factory=WeightsRecipe)
    eval: EvalRecipe = field(default_factory=EvalRecipe)
    budget: BudgetRecipe = field(default_factory=BudgetRecipe)
