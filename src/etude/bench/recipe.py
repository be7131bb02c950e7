"""Settings of evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecipe:
    """How held-out tasks are measured; every policy that is compared gets the same."""

    every: int = 0
    """Optimizer steps between measurements during training, which stands still meanwhile; 0: before and after only."""
    tasks: int | None = None
    """Only the first so many held-out tasks; unset: all."""
    engines: int = 1
    """Engine processes that share the attempts. Training stands still meanwhile: its core can be used."""
    k: int = 8
    """Attempts at each task."""
    control_k: int | None = None
    """Attempts of the control, the starting policy barred from finishing until a test passes; unset: k. Its attempts
    are the longest, and two suffice for its pass@1."""
    token_budget: int = 256
    """Tokens that an attempt may sample; one that has used them up is graded as it stands."""
    temperature: float = 1.0
    """Of sampling; above 0, or all attempts would be the same."""
    seed: int = 0
    """Of sampling: task and attempt number decide the rest."""

    def __post_init__(self) -> None:
        for name in ("k", "token_budget", "engines"):
            if getattr(self, name) < 1:
                raise RecipeError(f"eval.{name} = {getattr(self, name)} must be at least 1")
        if self.control_k is not None and self.control_k < 1:
            raise RecipeError(f"eval.control_k = {self.control_k} must be at least 1", hint="leave it out for eval.k")
        if self.tasks is not None and self.tasks < 2:
            cause = "an interval needs two"
            raise RecipeError(f"eval.tasks = {self.tasks} is too few", cause=cause, hint="leave it out for all tasks")
        if self.every < 0:
            raise RecipeError(f"eval.every = {self.every} must not be negative", hint="0: before and after only")
        if not self.temperature > 0:
            raise RecipeError(f"eval.temperature = {self.temperature} must be above 0")
