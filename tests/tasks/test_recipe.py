"""Settings of the tasks room."""

from __future__ import annotations

import pytest

from etude.errors import RecipeError
from etude.tasks.recipe import TasksBuildRecipe, TasksRecipe


def test_measuring_on_the_training_tasks_is_refused() -> None:
    with pytest.raises(RecipeError, match="same tasks"):
        TasksRecipe(train="x.zst/train", heldout="x.zst/train")


@pytest.mark.parametrize(
    ("key", "value"), [("workers", 0), ("visible", 1), ("hidden", 5), ("max_package_share", 0.0), ("train", 0)]
)
def test_a_value_out_of_range_is_named(key: str, value: float) -> None:
    with pytest.raises(RecipeError, match=key):
        TasksBuildRecipe(**{key: value})  # type: ignore[arg-type]
