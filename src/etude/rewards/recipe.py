"""Settings of the reward, and the check that giving up does not pay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from etude.config import nearest
from etude.errors import RecipeError

PART_NAMES = ("verify", "length")
SOLVED_VALUE = 1.0
"""What the part `verify` gives a solved task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthWeights:
    """How effort adds up to x, the length that is penalised."""

    tokens: float = 0.001
    """A token: thinking, calls, tool output or final message, unless a key below says otherwise."""
    thinking_tokens: float | None = None
    """A token of thinking; unset: as `tokens`."""
    call_tokens: float | None = None
    """A token of a tool call; unset: as `tokens`."""
    output_tokens: float | None = None
    """A token of tool output that was read; unset: as `tokens`."""
    message_tokens: float | None = None
    """A token of the final message; unset: as `tokens`."""
    calls: float = 0.1
    """A tool call."""
    turns: float = 0.1
    """A reply of the model."""

    def __post_init__(self) -> None:
        for name in ("tokens", "thinking_tokens", "call_tokens", "output_tokens", "message_tokens", "calls", "turns"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise RecipeError(f"reward.length.x.{name} = {value} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRecipe:
    """The penalty is coef * C(x), C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)): steep at first, then flatter."""

    coef: float = 0.03
    """Reward lost per unit of C; 0 switches the penalty off."""
    k: float = 1.0
    """Scale of the curvature; 0 is the straight line."""
    q: float = 0.5
    """Strength of the curvature; 0 is the straight line, 1 the logarithm, above 1 the penalty is bounded."""
    x: LengthWeights = field(default_factory=LengthWeights)
    """What x counts."""

    def __post_init__(self) -> None:
        for name in ("coef", "k", "q"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RecipeError(f"reward.length.{name} = {getattr(self, name)} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRecipe:
    """A reward is the sum of its parts."""

    parts: tuple[str, ...] = PART_NAMES
    """`verify`: 1 for a solved task, else 0. `length`: minus the penalty on effort."""
    min_solve_rate: float = 0.1
    """The rarest success for which trying must still pay: a length penalty that outweighs it is refused."""
    length: LengthRecipe = field(default_factory=LengthRecipe)
    """The part `length`."""

    def __post_init__(self) -> None:
        for name in self.parts:
            if name not in PART_NAMES:
                hint = nearest(name, PART_NAMES) or f"parts: {', '.join(PART_NAMES)}"
                raise RecipeError(f"reward.parts: unknown part {name!r}", hint=hint)
        if "verify" not in self.parts or len(set(self.parts)) < len(self.parts):
            raise RecipeError(
                f"reward.parts = {list(self.parts)} must name verify, and each part once",
                cause="without verify nothing rewards a solved task",
            )
        if not 0 < self.min_solve_rate <= 1:
            raise RecipeError(f"reward.min_solve_rate = {self.min_solve_rate} must be above 0 and at most 1")
