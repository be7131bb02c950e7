"""Stage `sft`: a pretrained model, fitted to expert transcripts, left as a Hugging Face folder.

    model + folder/transcripts.bin (tasks.transcripts) --fit--> folder/checkpoint.pt --> folder/model/

The last transcripts, a twentieth, are measured on and not trained on. Started again, it goes on from the checkpoint.
What it does not do: write transcripts (`etude sft` calls both), or reinforcement learning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude import frames
from etude.data.corpus import Corpus
from etude.data.tokenizer import Tokenizer
from etude.models.load import load_model
from etude.models.recipe import model_folder
from etude.protocols import Recorder
from etude.train.fit import Progress, fit
from etude.train.pretrain import CHECKPOINT, MODEL, export
from etude.train.pretrain_recipe import SFTRecipe

TRANSCRIPTS = "transcripts.bin"
_PROBE_SHARE = 0.05


def sft(recipe: SFTRecipe, recorder: Recorder, progress: Progress = lambda share: None) -> dict[str, Any]:
    """Train until `schedule.wall_s` is used up; the last measurement, and `model`, its folder.

    Errors: StoreError if the transcripts are missing or damaged, RunError if the checkpoint does not fit, ModelError.
    """
    folder = Path(recipe.folder)
    whole = frames.read_file(folder / TRANSCRIPTS, Corpus)
    model, tokenizer = load_model(recipe.model), Tokenizer.load(model_folder(recipe.model))
    kept = int(len(whole) * (1 - _PROBE_SHARE))
    corpus, probes = part(whole, 0, kept), part(whole, kept, len(whole))
    measured = fit(model, corpus, recipe.schedule, folder / CHECKPOINT, probes, recorder, progress)
    export(model, tokenizer, folder / MODEL)
    return {**measured, "model": str(folder / MODEL)}


def part(corpus: Corpus, first: int, last: int) -> Corpus:
    """Documents first to last - 1."""
    start, stop = int(corpus.starts[first]), int(corpus.starts[last])
    starts = corpus.starts[first : last + 1] - start
    return Corpus(ids=corpus.ids[start:stop], marks=corpus.marks[start:stop], starts=starts, name=corpus.name)
