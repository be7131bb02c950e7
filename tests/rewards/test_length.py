import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import RecipeError
from etude.rewards.length import concave, penalty, validate, weighted
from etude.rewards.recipe import LengthRecipe, LengthWeights, RewardRecipe
from etude.types import Effort

XS = st.floats(0, 1e6)
KS = st.floats(1e-9, 1e3)
QS = st.floats(0, 5)


@pytest.mark.parametrize(
    ("x", "k", "q", "value"),
    [
        (1, 1, 0.5, 0.828), (16, 1, 0.5, 6.246), (1, 1, 1, 0.693), (16, 1, 1, 2.833), (1, 1, 2, 0.5), (16, 1, 2, 0.941),
        (64, 1, 0.5, 14.125), (0.1, 4, 1, 0.084), (64, 4, 1, 1.387),
    ],
)  # fmt: skip
def test_check_values(x: float, k: float, q: float, value: float) -> None:
    assert concave(x, k, q) == pytest.approx(value, abs=5e-4)


@settings(deadline=None)
@given(XS, KS, QS)
def test_it_is_the_formula_where_the_formula_is_accurate(x: float, k: float, q: float) -> None:
    if k * x < 1e-3 or abs(1 - q) < 1e-3:
        return
    assert concave(x, k, q) == pytest.approx(((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)), rel=1e-8)


@settings(deadline=None)
@given(XS, KS)
def test_q_0_is_the_straight_line_and_q_1_the_logarithm(x: float, k: float) -> None:
    assert concave(x, k, 0.0) == pytest.approx(x, rel=1e-12)
    assert concave(x, k, 1.0) == pytest.approx(math.log1p(k * x) / k, rel=1e-12)
    assert concave(x, k, 1.0 + 1e-12) == pytest.approx(concave(x, k, 1.0), rel=1e-9)
    assert concave(x, k, 1.0 - 1e-12) == pytest.approx(concave(x, k, 1.0), rel=1e-9)


@settings(deadline=None)
@given(XS, QS)
def test_k_to_0_is_the_straight_line(x: float, q: float) -> None:
    assert concave(x, 0.0, q) == x
    assert concave(x, 1e-15, q) == pytest.approx(x, rel=1e-8)


@settings(deadline=None)
@given(KS, QS)
def test_it_starts_at_0_with_slope_1(k: float, q: float) -> None:
    assert concave(0.0, k, q) == 0.0
    small = 1e-9 / max(k, 1.0)
    assert concave(small, k, q) / small == pytest.approx(1.0, rel=1e-6)


@settings(deadline=None)
@given(st.floats(0, 1e4), st.floats(0, 1e4), KS, QS)
def test_it_never_falls_and_is_concave(a: float, b: float, k: float, q: float) -> None:
    low, high = min(a, b), max(a, b)
    middle = concave((low + high) / 2, k, q)
    assert concave(low, k, q) <= concave(high, k, q) * (1 + 1e-12)
    assert middle >= (concave(low, k, q) + concave(high, k, q)) / 2 * (1 - 1e-9)


@settings(deadline=None)
@given(XS, KS, st.floats(1.01, 5))
def test_above_q_1_it_is_bounded(x: float, k: float, q: float) -> None:
    assert concave(x, k, q) <= 1 / (k * (q - 1)) * (1 + 1e-9)


EFFORT = Effort(thinking_tokens=100, call_tokens=50, output_tokens=200, message_tokens=10, calls=3, turns=2)


def test_x_weighs_tokens_calls_and_turns() -> None:
    assert weighted(EFFORT, LengthWeights()) == pytest.approx(0.36 + 0.3 + 0.2)


def test_a_kind_of_token_may_have_a_weight_of_its_own() -> None:
    weights = LengthWeights(thinking_tokens=0.01, output_tokens=0.0)
    assert weighted(EFFORT, weights) == pytest.approx(1.0 + 0.06 + 0.3 + 0.2)


def test_the_penalty_is_the_coefficient_times_c() -> None:
    assert penalty(EFFORT, LengthRecipe(coef=0.03)) == pytest.approx(0.03 * concave(0.86, 1.0, 0.5))
    assert penalty(EFFORT, LengthRecipe(coef=0.0)) == 0.0


LIMITS = {"context_tokens": 1024, "max_calls": 24, "max_turns": 12}


def test_the_quickstart_dials_are_accepted() -> None:
    validate(RewardRecipe(), **LIMITS)


def test_a_penalty_that_makes_giving_up_pay_is_refused_with_the_numbers() -> None:
    reward = RewardRecipe(length=LengthRecipe(coef=0.05))
    with pytest.raises(RecipeError) as caught:
        validate(reward, **LIMITS)
    assert caught.value.cause == "coef * C(x_max) = 0.137 at x_max = 4.62, but 1 * min_solve_rate = 0.100"
    validate(RewardRecipe(parts=("verify",), length=LengthRecipe(coef=0.05)), **LIMITS)
    validate(RewardRecipe(length=LengthRecipe(coef=0.05), min_solve_rate=0.2), **LIMITS)


def test_the_dearest_kind_of_token_sets_the_bound() -> None:
    reward = RewardRecipe(length=LengthRecipe(x=LengthWeights(thinking_tokens=0.1)))
    with pytest.raises(RecipeError, match="giving up would pay"):
        validate(reward, **LIMITS)
