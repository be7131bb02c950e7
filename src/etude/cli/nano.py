"""`etude pretrain` and `etude sft`: the stages before reinforcement learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from etude.cli.options import Json, Overrides

RecipePath = Annotated[Path, typer.Argument(help="A recipe of this stage, or the name of a shipped one.")]


def pretrain(
    recipe: RecipePath = Path("nano-pretrain.toml"), overrides: Overrides = None, as_json: Json = False
) -> None:
    """Pretrain a model on code. The same command goes on where it was."""
    _run("pretrain", recipe, overrides, as_json)


def sft(recipe: RecipePath = Path("nano-sft.toml"), overrides: Overrides = None, as_json: Json = False) -> None:
    """Fine-tune a model on expert transcripts. The same command goes on where it was."""
    _run("sft", recipe, overrides, as_json)


def _run(stage: str, recipe: Path, overrides: list[str] | None, as_json: bool) -> None:
    from etude.build import load_recipe
    from etude.stages import run_stage

    result = run_stage(stage, load_recipe(recipe, overrides or [], stage=stage))
    print(json.dumps(result) if as_json else "\n".join(f"{name}: {value}" for name, value in result.items()))
