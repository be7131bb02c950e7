import pytest

from etude.bench.recipe import EvalRecipe
from etude.config import convert
from etude.errors import RecipeError


def test_the_quickstart_table_loads() -> None:
    assert convert({"every": 0, "k": 8, "token_budget": 256}, EvalRecipe, where="quickstart") == EvalRecipe()


@pytest.mark.parametrize(
    "settings",
    [{"k": 0}, {"token_budget": 0}, {"engines": 0}, {"tasks": 0}, {"every": -1}, {"temperature": 0.0}],
)
def test_a_setting_that_cannot_work_is_refused_at_load(settings: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=r"eval\."):
        EvalRecipe(**settings)  # type: ignore[arg-type]
