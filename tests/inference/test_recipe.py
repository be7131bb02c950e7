"""The engine's table: what cannot be honored is refused when the recipe is read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from etude.errors import RecipeError
from etude.inference.recipe import EngineRecipe


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "vllm"), ("replicas", 257), ("replicas", 0), ("kv_reuse", "always"), ("max_concurrent", 0),
        ("max_queue", -1), ("kv_tokens", -1), ("threads", 0), ("pin_timeout_s", -1.0), ("seed", -1),
    ],
)  # fmt: skip
def test_what_cannot_be_honored_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(RecipeError, match=f"engine.{key}"):
        EngineRecipe(**{key: value})  # type: ignore[arg-type]


def test_recipe_and_client_load_no_torch() -> None:
    code = "import sys, etude.inference.recipe, etude.inference.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
