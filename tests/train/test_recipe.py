from __future__ import annotations

import subprocess
import sys

import pytest

from etude.config import convert
from etude.errors import RecipeError
from etude.train.recipe import TrainRecipe


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "sgd"}, {"launch": "ray"}, {"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"threads": 0},
     {"clip_norm": 0.0}, {"checkpoint_every": 0}, {"micro_batch_tokens": 0}, {"weight_decay": -0.1}, {"eps": 0.0},
     {"output_scale_rate": -1.0}],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=f"train.{next(iter(settings))}"):
        TrainRecipe(**settings)  # type: ignore[arg-type]


def test_a_table_of_toml_makes_the_recipe_and_unknown_keys_are_refused() -> None:
    assert convert({"lr": 1e-4, "betas": [0.9, 0.95]}, TrainRecipe, where="x").betas == (0.9, 0.95)
    with pytest.raises(RecipeError, match="unknown key warmup"):
        convert({"warmup": 3}, TrainRecipe, where="x")


def test_recipe_client_and_checkpoints_load_no_torch() -> None:
    source = """
import sys
import etude.train.recipe, etude.train.client, etude.train.checkpoint, etude.data.packing
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", source], check=True)
