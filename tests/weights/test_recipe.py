from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import RecipeError
from etude.weights.recipe import WeightsRecipe


@pytest.mark.parametrize(
    "settings",
    [{"store": "gs://x"}, {"publish_dtype": "bf16"}, {"keep_anchors": 0}, {"poll_s": 0.0}, {"grace_s": -1.0}],
)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=next(iter(settings))):
        WeightsRecipe(**settings)  # type: ignore[arg-type]


def test_the_url_is_absolute() -> None:
    assert WeightsRecipe().url(Path("runs/a")) == f"file://{Path('runs/a').absolute()}/weights"


def test_the_weights_room_loads_no_torch() -> None:
    source = """
import sys
import etude.weights.background, etude.weights.gc, etude.weights.subscribe, etude.weights.verify
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", source], check=True)
