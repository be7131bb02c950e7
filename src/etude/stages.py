"""The stages before reinforcement learning: what `etude pretrain` and `etude sft` do with a recipe.

    pretrain   functions --tasks.pretraining--> corpus --train.pretrain--> model
    sft        tasks --tasks.attempts (the model's own mistakes), tasks.transcripts--> transcripts --train.sft--> model

Everything heavy is imported by the function that needs it.
"""

from __future__ import annotations

import asyncio
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
    from etude.tasks.attempts import Attempts
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
        attempts = asyncio.run(_own_attempts(recipe)) if recipe.transcripts.own_edits else {}
        with _share_bar("write transcripts") as advance:
            transcripts.build(recipe.tasks, model_folder(recipe.model), path, recipe.transcripts, attempts=attempts,
                              workers=recipe.schedule.ranks, progress=advance)  # fmt: skip
    with _share_bar("sft") as advance:
        return sft(recipe, recorder, advance)


async def _own_attempts(recipe: SFTRecipe) -> Attempts:
    """What the model tries first at each task; read again where that was found out before."""
    from etude.data.render import open_renderer
    from etude.frames import read_file, write_file
    from etude.inference.recipe import EngineRecipe
    from etude.inference.torch_engine import TorchEngine
    from etude.metrics import progress
    from etude.models.load import load_model
    from etude.models.recipe import model_folder
    from etude.sandbox.pool import NamespacePool
    from etude.sandbox.recipe import SandboxRecipe
    from etude.tasks.attempts import Tried, try_first_edits
    from etude.tasks.file import load_tasks
    from etude.types import Version

    path = Path(recipe.folder) / "attempts.mp"
    if path.exists():
        return read_file(path, Tried).tasks
    tasks, samples = load_tasks(recipe.tasks), recipe.transcripts.own_edits
    renderer = open_renderer(model_folder(recipe.model), ["edit_file", "run_tests"])
    engine = TorchEngine(load_model(recipe.model), EngineRecipe(threads=recipe.schedule.ranks))
    try:
        await engine.set_version(Version(incarnation=1, n=0, step=0))
        async with NamespacePool(SandboxRecipe()) as pool:
            with progress("try edits", total=len(tasks) * samples) as bar:
                found = await try_first_edits(
                    tasks, engine, renderer, pool, samples=samples, seed=recipe.transcripts.seed, progress=bar.advance
                )
    finally:
        await engine.close()
    write_file(path, Tried(tasks=found))
    return found
