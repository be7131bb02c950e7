import pytest

from etude.errors import RecipeError
from etude.sandbox.recipe import SandboxRecipe


def test_the_defaults_are_a_recipe() -> None:
    recipe = SandboxRecipe()
    assert (recipe.kind, recipe.network, recipe.python) == ("namespace", "none", "auto")


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({"kind": "firecracker"}, "sandbox.kind = 'firecracker'"),
        ({"network": "full"}, "sandbox.network = 'full'"),
        ({"memory_mb": 1}, "sandbox.memory_mb = 1"),
        ({"pids": 0}, "sandbox.pids = 0"),
        ({"timeout_s": 0.0}, "sandbox.timeout_s = 0.0"),
        ({"timeout_s": float("nan")}, "sandbox.timeout_s = nan"),
        ({"spares": -1}, "sandbox.spares = -1"),
        ({"nice": -5}, "sandbox.nice = -5"),
        ({"disk_mb": 1024, "memory_mb": 512}, "sandbox.disk_mb = 1024"),
        ({"python": "python3"}, "sandbox.python = 'python3'"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(setting: dict[str, object], names: str) -> None:
    with pytest.raises(RecipeError, match=names) as caught:
        SandboxRecipe(**setting)  # type: ignore[arg-type]
    assert caught.value.hint
