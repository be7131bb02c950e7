"""The length penalty C_{k,q}: concave, so that effort costs most where a task is easy, and less where it is hard.

C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), after the Composer 2 report (arXiv 2603.24477, section 4.2). C(0) = 0, the
slope at 0 is 1. Pure functions; where the coefficient applies and what x counts is in the recipe.
"""

from __future__ import annotations

import math

from etude.errors import RecipeError
from etude.rewards.recipe import SOLVED_VALUE, LengthRecipe, LengthWeights, RewardRecipe
from etude.types import Effort


def concave(x: float, k: float, q: float) -> float:
    """C(x) for x, k, q >= 0, accurate also near k = 0 (x) and q = 1 (ln(1 + k x) / k).

    With u = log1p(k x) and s = (1 - q) u, C is u / k * expm1(s) / s; both quotients have limits, taken at 0.
    """
    scaled = k * x
    if scaled == 0.0:
        return x
    log = math.log1p(scaled)
    exponent = (1.0 - q) * log
    growth = math.expm1(exponent) / exponent if exponent != 0.0 else 1.0
    return x * (log / scaled) * growth


def weighted(effort: Effort, weights: LengthWeights) -> float:
    """x: the effort as one number."""
    kinds = ("thinking_tokens", "call_tokens", "output_tokens", "message_tokens")
    tokens = sum(getattr(effort, kind) * token_weight(weights, kind) for kind in kinds)
    return tokens + weights.calls * effort.calls + weights.turns * effort.turns


def token_weight(weights: LengthWeights, kind: str) -> float:
    """Weight of one token of a kind: its own if it is set, else that of all tokens."""
    own = getattr(weights, kind)
    return weights.tokens if own is None else own


def penalty(effort: Effort, recipe: LengthRecipe) -> float:
    """coef * C(x)."""
    return recipe.coef * concave(weighted(effort, recipe.x), recipe.k, recipe.q)


def validate(reward: RewardRecipe, *, context_tokens: int, max_calls: int, max_turns: int) -> None:
    """Refuse a penalty under which giving up pays: coef * C(x_max) must not exceed V * min_solve_rate.

    x_max is the most effort that the agent's limits allow: every token of the window of the dearest kind, every call,
    every turn. Errors: RecipeError.
    """
    if "length" not in reward.parts:
        return
    weights = reward.length.x
    kinds = ("thinking_tokens", "call_tokens", "output_tokens", "message_tokens")
    dearest = max(token_weight(weights, kind) for kind in kinds)
    x_max = dearest * context_tokens + weights.calls * max_calls + weights.turns * max_turns
    most = reward.length.coef * concave(x_max, reward.length.k, reward.length.q)
    gain = SOLVED_VALUE * reward.min_solve_rate
    if most > gain:
        raise RecipeError(
            "giving up would pay: the length penalty outweighs a solved task that succeeds at reward.min_solve_rate",
            cause=f"coef * C(x_max) = {most:.3f} at x_max = {x_max:.2f}, but 1 * min_solve_rate = {gain:.3f}",
            hint="lower reward.length.coef or the agent's limits, or raise reward.min_solve_rate",
        )
