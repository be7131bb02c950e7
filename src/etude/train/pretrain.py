"""Stage `pretrain`: a new network of the nano's shape, fitted to the corpus, left as a Hugging Face folder.

    folder/corpus.bin, probes.bin, tokenizer.json (tasks.pretraining) --fit--> folder/checkpoint.pt --> folder/model/

Started again, it goes on from the checkpoint; when the time is used up it only writes the model again.
What it does not do: build the corpus (that is the collections' room; `etude pretrain` calls both), or fine-tune.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from etude import frames
from etude.data.corpus import Corpus
from etude.data.render import NanoRenderer
from etude.data.tokenizer import Tokenizer
from etude.models.load import Model, model_from_config
from etude.models.nano import nano_config
from etude.protocols import Recorder
from etude.train.fit import Progress, fit
from etude.train.pretrain_recipe import PretrainRecipe

CORPUS, PROBES, CHECKPOINT, MODEL = "corpus.bin", "probes.bin", "checkpoint.pt", "model"


def pretrain(recipe: PretrainRecipe, recorder: Recorder, progress: Progress = lambda share: None) -> dict[str, Any]:
    """Train until `schedule.wall_s` is used up; the last measurement, and `model`, its folder.

    Errors: StoreError if the corpus is missing or damaged, RunError if the checkpoint does not fit, ModelError.
    """
    folder = Path(recipe.folder)
    corpus = frames.read_file(folder / CORPUS, Corpus)
    probes = frames.read_file(folder / PROBES, Corpus)
    tokenizer = Tokenizer.load(folder)
    renderer = NanoRenderer(tokenizer)
    config = nano_config(recipe.shape, pad_id=renderer.pad, begin_id=renderer.begin, end_id=renderer.end)
    model = model_from_config(config, seed=recipe.schedule.seed)
    measured = fit(model, corpus, recipe.schedule, folder / CHECKPOINT, probes, recorder, progress)
    export(model, tokenizer, folder / MODEL)
    return {**measured, "model": str(folder / MODEL)}


def export(model: Model, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face folder: config.json, model.safetensors, tokenizer.json. Whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.network.save_pretrained(temporary)
    tokenizer.save(temporary)
    for file in temporary.iterdir():  # safetensors makes its file readable to the owner alone
        file.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
