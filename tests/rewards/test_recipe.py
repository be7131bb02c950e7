import pytest

from etude.config import convert
from etude.errors import RecipeError
from etude.rewards.recipe import LengthRecipe, LengthWeights, RewardRecipe


def test_the_quickstart_table_loads() -> None:
    table = {
        "parts": ["verify", "length"],
        "min_solve_rate": 0.1,
        "length": {"coef": 0.03, "k": 1.0, "q": 0.5, "x": {"tokens": 0.001, "calls": 0.1, "turns": 0.1}},
    }
    assert convert(table, RewardRecipe, where="quickstart") == RewardRecipe()


def test_an_unknown_part_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError) as caught:
        RewardRecipe(parts=("verify", "lenght"))
    assert caught.value.hint == "did you mean length?"


@pytest.mark.parametrize(
    "make",
    [
        lambda: RewardRecipe(parts=("length",)),
        lambda: RewardRecipe(parts=("verify", "verify")),
        lambda: RewardRecipe(min_solve_rate=0.0),
        lambda: LengthRecipe(q=-0.5),
        lambda: LengthRecipe(coef=float("nan")),
        lambda: LengthRecipe(k=float("inf")),
        lambda: LengthWeights(calls=-1.0),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_load(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match=r"reward\."):
        make()
