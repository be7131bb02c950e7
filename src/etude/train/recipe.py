"""Settings of the trainer. Light: reading a recipe loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRecipe:
    """How a batch changes the weights."""

    lr: float = 5e-5
    """Step size. 0 trains nothing: the control run."""
    output_scale_rate: float = 1.0
    """Times lr: the step size of the last norm's weights; with another rate than 1 they move together, as one number.
    They scale the logits, so they are the policy's temperature, and far from 0: steps of lr leave it where it was."""
    optimizer: str = "adamw"
    """adamw (Loshchilov and Hutter, arXiv 1711.05101)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the running square."""
    weight_decay: float = 0.01
    """Decoupled, times lr, on matrices only."""
    clip_norm: float = 1.0
    """The gradient is scaled down to this global norm."""
    checkpoint_every: int = 10
    """Optimizer steps between checkpoints."""
    launch: str = "local"
    """Where the trainer runs: local, one process beside the orchestrator."""
    ranks: int = 1
    """Processes that the model is sharded over (FSDP2). 1 is fastest where the model fits one core's memory."""
    threads: int = 1
    """Torch threads of each of the trainer's processes."""
    micro_batch_tokens: int = 6000
    """Cost of one forward and backward, in tokens; attention is counted in."""

    def __post_init__(self) -> None:
        if self.optimizer != "adamw":
            raise RecipeError(f"train.optimizer = {self.optimizer!r} is not supported", hint="adamw")
        if self.launch != "local":
            raise RecipeError(f"train.launch = {self.launch!r} is not supported", hint="local")
        if not (len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)):
            raise RecipeError(f"train.betas = {self.betas} must be two numbers in [0, 1)")
        for name in ("checkpoint_every", "ranks", "threads", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise RecipeError(f"train.{name} = {getattr(self, name)} must be at least 1")
        for name in ("clip_norm", "eps"):
            if not getattr(self, name) > 0:
                raise RecipeError(f"train.{name} = {getattr(self, name)} must be positive")
        for name in ("lr", "output_scale_rate", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise RecipeError(f"train.{name} = {getattr(self, name)} must not be negative")
