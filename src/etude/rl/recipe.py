"""Settings of the loop: how much is learned from what, how old it may be, and what ends it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from etude.errors import RecipeError

CREDITS = ("group_mean", "group_std", "per_length", "shuffled", "rejection")
CORRECTIONS = ("none", "truncated", "masked", "sequence")
KLS = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class KLRecipe:
    """How strongly the policy is held near a version that does not change (train/kl.py has the formulas)."""

    coef: float = 0.0
    """beta; 0: not at all, and the step costs no more. Else it costs two more forwards."""
    kind: str = "k1"
    """k1: in the reward, of all that follows a token; k2, k3: as losses, token by token."""
    reference: str = "start"
    """The version: `start`, the first that the run published, or one by name, such as `1.20`. It is pinned."""

    def __post_init__(self) -> None:
        if not 0 <= self.coef < 10:
            raise RecipeError(f"rl.kl.coef = {self.coef} is out of range", hint="0, or about 0.001 to 0.1")
        if self.kind not in KLS:
            raise RecipeError(f"rl.kl.kind = {self.kind!r} is unknown", hint=", ".join(KLS))
        if self.reference != "start" and not re.fullmatch(r"\d+\.\d+", self.reference):
            raise RecipeError(f"rl.kl.reference = {self.reference!r} names no version", hint="start, or such as 1.20")


@dataclass(frozen=True, slots=True, kw_only=True)
class RLRecipe:
    """How much is learned from what, and how old it may be."""

    groups_per_step: int = 20
    """Groups in one optimizer step."""
    group_size: int = 8
    """Episodes of one task: they share a baseline."""
    min_group: int = 4
    """With fewer survivors of broken machines a group is abandoned."""
    credit: str = "group_mean"
    """What an episode's tokens are multiplied with. `group_mean`: its reward minus the mean of its group. For studies:
    `group_std` and `per_length`, divided by the group's standard deviation or by the episode's length; `shuffled`,
    after the batch's rewards were dealt out at random; `rejection`, 1 if it solved its task."""
    min_advantage: float = 0.0
    """Samples whose |advantage| is not above this are not trained on. In a group where all or none solved the task only
    lengths differ: such samples cost as much as others and move next to nothing."""
    max_staleness: int = 2
    """Optimizer steps between the weights that sampled a token and those that train on it; 0 is synchronous."""
    tokens_per_episode: int = 256
    """Constant of the loss denominator: groups_per_step * group_size * tokens_per_episode."""
    correction: str = "truncated"
    """Importance weight of a token that older weights sampled: `none`, `truncated` at `clip`, `masked` beyond it, or
    `sequence`, that of its whole sample (train/corrections.py)."""
    clip: float = 2.0
    """Upper bound of the importance weight; `masked` also has its inverse as the lower one."""
    kl: KLRecipe = KLRecipe()
    """Samples that `min_advantage` leaves out are not pulled either."""
    replay: bool = True
    """Whether the trainer's routers take the experts that the engine's took, in a mixture of experts."""
    plausibility: float = 0.0
    """Replayed experts that the trainer's router ranks below this share of what its own worst choice has are replaced
    (models/plausibility.py); 0: none. 0.1 to 0.5 for softmax routers; sigmoid ones need more to drop any."""
    infra_retries: int = 2
    """How often an episode is run again after a machine broke."""
    late: str = "wait"
    """What happens to a group that would grow too old: `wait` for it, or `drop` it (loses long episodes: a bias)."""
    seed: int = 0
    """Of the order of drawing and of sampling."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "group_size", "min_group", "tokens_per_episode"):
            if getattr(self, name) < 1:
                raise RecipeError(f"rl.{name} = {getattr(self, name)} must be at least 1")
        if not 2 <= self.min_group <= self.group_size:
            raise RecipeError(
                f"rl.min_group = {self.min_group} does not fit rl.group_size = {self.group_size}",
                cause="a group of one has no baseline",
                hint="2 <= min_group <= group_size",
            )
        if not 0 <= self.min_advantage < 1:
            raise RecipeError(f"rl.min_advantage = {self.min_advantage} would leave no sample", hint="0, or about 0.05")
        if not 0 <= self.seed < 1 << 32:
            raise RecipeError(f"rl.seed = {self.seed} is out of range", hint="0 to 2^32 - 1")
        if self.max_staleness < 0 or self.infra_retries < 0:
            raise RecipeError("rl.max_staleness and rl.infra_retries must not be negative")
        if self.correction not in CORRECTIONS:
            raise RecipeError(f"rl.correction = {self.correction!r} is unknown", hint=", ".join(CORRECTIONS))
        if self.correction == "sequence" and self.max_staleness:
            raise RecipeError(
                'rl.correction = "sequence" does not fit rl.max_staleness above 0',
                cause="weights are swapped in mid-reply, and several versions then sample one reply",
                hint='rl.max_staleness = 0, or rl.correction = "truncated"',
            )
        if not 0 <= self.plausibility <= 1:
            raise RecipeError(f"rl.plausibility = {self.plausibility} is no share", hint="0 (off) to 1")
        if self.plausibility and not self.replay:
            raise RecipeError("rl.plausibility filters replayed experts, and rl.replay is off", hint="rl.replay = true")
        if self.credit not in CREDITS:
            raise RecipeError(f"rl.credit = {self.credit!r} is unknown", hint=", ".join(CREDITS))
        if self.late not in ("wait", "drop"):
            raise RecipeError(f"rl.late = {self.late!r} is unknown", hint="wait or drop")
        if self.clip < 1:
            raise RecipeError(f"rl.clip = {self.clip} would shrink on-policy tokens", hint="use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRecipe:
    """What ends training: whichever comes first, the epoch's end included."""

    wall_s: float = 330.0
    """Seconds of training, over all resumptions; evaluation is not counted."""
    steps: int | None = None
    """Optimizer steps; unset: no limit."""
    warmup_share: float = 0.0
    """First share of the budget over which the learning rate rises to its full size. Adam's first steps are as long as
    steps can be whatever the gradient says: without it they move the policy at random."""
    decay_share: float = 0.0
    """Last share of the budget over which the learning rate falls to 0, in a line; 0: it is constant."""

    def __post_init__(self) -> None:
        for name in ("warmup_share", "decay_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"budget.{name} = {getattr(self, name)} is no share", hint="0 to 1")
        if not self.wall_s > 0:
            raise RecipeError(f"budget.wall_s = {self.wall_s} must be above 0")
        if self.steps is not None and self.steps < 1:
            raise RecipeError(f"budget.steps = {self.steps} must be at least 1", hint="leave it out for no limit")

    def rate(self, *, wall_s: float, step: int, epoch_steps: int) -> float:
        """Share of the learning rate for step `step`, which begins after `wall_s` seconds of training.

        epoch_steps: steps that the epoch's prompts suffice for.
        """
        spent = max(wall_s / self.wall_s, (step - 1) / min(self.steps or epoch_steps, epoch_steps))
        rise = spent / self.warmup_share if self.warmup_share else 1.0
        fall = max(0.0, 1.0 - spent) / self.decay_share if self.decay_share else 1.0
        return min(1.0, rise, fall)
