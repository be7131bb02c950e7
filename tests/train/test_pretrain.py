"""The stages before reinforcement learning, whole: corpus to model folder, transcripts to model folder, and again."""

import dataclasses
import stat
from pathlib import Path

import numpy as np
import pytest

from etude import frames
from etude.data.corpus import FILE, FIX, Document, join
from etude.data.tokenizer import Tokenizer
from etude.errors import RecipeError, StoreError
from etude.models.load import load_model
from etude.models.nano import NanoShape
from etude.models.recipe import SHIPPED
from etude.train.pretrain import pretrain
from etude.train.pretrain_recipe import PretrainRecipe, ScheduleSettings, SFTRecipe
from etude.train.sft import sft

SHAPE = NanoShape(hidden=16, layers=1, heads=1, head_dim=16, experts=2, top_k=1, intermediate=16, context_tokens=384)
SCHEDULE = ScheduleSettings(wall_s=0.5, batch_tokens=100, micro_tokens=64, ranks=1)


class Rows:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def record(self, kind: str, row: object) -> None:
        self.kinds.append(kind)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus, probes and transcripts of random ids, beside the shipped tokenizer."""
    Tokenizer.load(SHIPPED["etude-nano"]).save(tmp_path)
    rng = np.random.default_rng(0)
    marks = np.array([FILE] * 8 + [FIX] * 4, np.uint8)
    made = [Document(ids=rng.integers(9, 2048, 12).astype(np.uint16), marks=marks) for _ in range(40)]
    for name in ("corpus.bin", "probes.bin", "transcripts.bin"):
        frames.write_file(tmp_path / name, join(made, name))
    return tmp_path


def test_both_stages_leave_folders_that_load_and_go_on(folder: Path) -> None:
    rows = Rows()
    recipe = PretrainRecipe(folder=str(folder), shape=SHAPE, schedule=SCHEDULE)
    first = pretrain(recipe, rows)
    assert first["n"] == 40
    assert "probe" in rows.kinds
    weights = (folder / "model" / "model.safetensors").read_bytes()
    assert stat.S_IMODE((folder / "model" / "model.safetensors").stat().st_mode) == 0o644
    again = pretrain(recipe, rows)  # the time is used up: the same model is written again
    assert again["step"] == first["step"]
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    longer = dataclasses.replace(recipe, schedule=dataclasses.replace(SCHEDULE, wall_s=1.0))
    assert pretrain(longer, rows)["step"] > first["step"]

    (folder / "sft").mkdir()
    (folder / "transcripts.bin").rename(folder / "sft" / "transcripts.bin")
    tuned = sft(SFTRecipe(model=str(folder / "model"), folder=str(folder / "sft"), schedule=SCHEDULE), rows)
    assert tuned["n"] == 2  # a twentieth of 40
    assert load_model(tuned["model"]).num_experts == 2
    assert Tokenizer.load(tuned["model"]).vocab_size == 2048


def test_a_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"corpus\.bin"):
        pretrain(PretrainRecipe(folder=str(tmp_path), shape=SHAPE, schedule=SCHEDULE), Rows())


def test_a_network_without_a_row_for_each_token_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"corpus\.vocab_size = 2048 differs from shape\.vocab_size = 100"):
        PretrainRecipe(shape=dataclasses.replace(SHAPE, vocab_size=100))


@pytest.mark.parametrize("change", [{"wall_s": 0.0}, {"lr": -1.0}, {"file_share": 1.5}, {"ranks": 0}])
def test_settings_out_of_range_are_refused_by_name(change: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=rf"schedule\.{next(iter(change))} = "):
        dataclasses.replace(SCHEDULE, **change)
