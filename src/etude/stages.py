"""The stages before reinforcement learning: what `etude pretrain` and `etude sft` do with a recipe.

    pretrain   functions --tasks.pretraining--> corpus --train.pretrain--> model
    sft        tasks --tasks.transcripts--> transcripts --train.sft--> model

Everything heavy is imported by the function that needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude import config
from etude.build import stages
from etude.errors import RecipeError

if TYPE_CHECKING:
    from etude.protocols import Recorder
    from etude.train.pretrain_recipe import PretrainRecipe, SFTRecipe


def run_stage(stage: str, recipe: Any) -> dict[str, Any]:
    """Pretrain or fine-tune; returns what the stage measured last. Goes on where it was."""
    from etude.frames import write_bytes
    from etude.metrics import JsonlRecorder

    folder = Path(recipe.folder)
    _check_same(folder / "recipe.toml", recipe)
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "recipe.toml", config.resolved_text(stage, recipe).encode())
    recorder = JsonlRecorder(folder / "metrics.jsonl")
    try:
        return _pretrain(recipe, recorder) if stage == "pretrain" else _sft(recipe, recorder)
    finally:
        recorder.close()


def _check_same(path: Path, recipe: Any) -> None:
    """What a folder holds was made by its recipe: all but the schedule must stay. Errors: RecipeError."""
    if not path.exists():
        return
    before = config.build(config.read_tree(path), stages(), source=str(path))
    for field in dataclasses.fields(recipe):
        if field.name != "schedule" and getattr(before, field.name, None) != getattr(recipe, field.name):
            raise RecipeError(
                f"{path.parent} was made with another {field.name}",
                cause=f"{path} says {getattr(before, field.name, None)}",
                hint="choose another folder, or remove this one",
            )


@contextlib.contextmanager
def _share_bar(description: str) -> Iterator[Callable[[float], None]]:
    """A bar that is told which share is done."""
    from etude.metrics import progress

    done = 0
    with progress(description, total=1000) as bar:

        def advance(share: float) -> None:
            nonlocal done
            bar.advance(max(0, int(1000 * share) - done))
            done = max(done, int(1000 * share))

        yield advance


def _pretrain(recipe: PretrainRecipe, recorder: Recorder) -> dict[str, Any]:
    from etude.tasks import pretraining
    from etude.train.pretrain import pretrain

    folder = Path(recipe.folder)
    if not (folder / pretraining.MANIFEST).exists():  # written last
        with _share_bar("write documents") as advance:
            pretraining.build(Path(recipe.functions), folder, recipe.corpus, workers=recipe.schedule.ranks,
                              progress=advance)  # fmt: skip
    with _share_bar("pretrain") as advance:
        return pretrain(recipe, recorder, advance)


def _sft(recipe: SFTRecipe, recorder: Recorder) -> dict[str, Any]:
    from etude.models.recipe import model_folder
    from etude.tasks import transcripts
    from etude.train.sft import sft

    path = Path(recipe.folder) / transcripts.TRANSCRIPTS
    if not path.exists():
        with _share_bar("write transcripts") as advance:
            transcripts.build(recipe.tasks, model_folder(recipe.model), path, recipe.transcripts,
                              workers=recipe.schedule.ranks, progress=advance)  # fmt: skip
    with _share_bar("sft") as advance:
        return sft(recipe, recorder, advance)
