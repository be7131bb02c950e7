"""Settings of the stages `pretrain` and `sft`, which make a nano from nothing. Loads nothing heavy."""

from __future__ import annotations

import dataclasses

from etude.data.recipe import CorpusSettings, TranscriptSettings
from etude.errors import RecipeError
from etude.models.nano import NanoShape


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings:
    """How long, how fast, how wide. The clock ends a stage: the learning rate falls to 0 by then."""

    wall_s: float = 3300.0
    """Seconds of training, evaluation and checkpoints included; they add up over resumes."""
    lr: float = 3e-3
    """Peak learning rate of AdamW: embeddings, norms and routers."""
    matrix_lr: float = 6e-3
    """Peak learning rate of Muon: all other matrices."""
    warmup_share: float = 0.02
    """Share of `wall_s` over which the learning rate rises from 0."""
    decay_share: float = 0.6
    """Share of `wall_s`, at its end, over which it falls to 0 on a straight line."""
    weight_decay: float = 0.05
    """Decoupled; of matrices only, times the learning rate."""
    clip_norm: float = 1.0
    """Of the gradient of all parameters together."""
    batch_tokens: int = 5_120
    """Tokens of an optimizer step."""
    micro_tokens: int = 1280
    """Tokens that go through the network at once, about: few enough for the processor's caches."""
    file_share: float = 0.25
    """Share of the shown file's tokens, drawn anew for each document, that are in the loss: they cost time, too."""
    fix_weight: float = 4.0
    """Weight of a token of the repair in the loss, where a token of the shown file has 1."""
    balance_coef: float = 0.01
    """Weight of the load-balancing loss of the experts."""
    ranks: int = 2
    """Processes that share each batch, a core each."""
    evaluate_every_s: float = 300.0
    """Seconds between measurements of exact repair, each followed by a checkpoint."""
    seed: int = 0
    """Of the random weights, and of the choice of the file's tokens."""

    def __post_init__(self) -> None:
        for name in (
            "wall_s",
            "clip_norm",
            "evaluate_every_s",
            "batch_tokens",
            "micro_tokens",
            "ranks",
            "fix_weight",
        ):
            if not getattr(self, name) > 0:
                raise RecipeError(f"schedule.{name} = {getattr(self, name)} must be positive")
        for name in ("lr", "matrix_lr", "weight_decay", "balance_coef"):
            if not getattr(self, name) >= 0:
                raise RecipeError(f"schedule.{name} = {getattr(self, name)} must not be negative")
        for name in ("warmup_share", "decay_share", "file_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"schedule.{name} = {getattr(self, name)} must be a share", hint="from 0 to 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PretrainRecipe:
    """`recipes/nano-pretrain.toml`."""

    functions: str = "functions.jsonl.zst"
    """Harvested functions with their splits (`etude tasks build`); only split `base` is read."""
    folder: str = "runs/nano-pretrain"
    """Corpus, checkpoint, metrics and the resulting model (`model/`) go here."""
    corpus: CorpusSettings = dataclasses.field(default_factory=CorpusSettings)
    """What the functions are made into."""
    shape: NanoShape = dataclasses.field(default_factory=NanoShape)
    """Sizes of the network."""
    schedule: ScheduleSettings = dataclasses.field(default_factory=ScheduleSettings)
    """How it is trained."""

    def __post_init__(self) -> None:
        if self.corpus.vocab_size != self.shape.vocab_size:
            raise RecipeError(
                f"corpus.vocab_size = {self.corpus.vocab_size} differs from shape.vocab_size = {self.shape.vocab_size}",
                cause="the tokenizer is trained on the corpus, and the network must have a row for each of its tokens",
            )
        if self.corpus.max_tokens > self.shape.context_tokens:
            raise RecipeError(
                f"corpus.max_tokens = {self.corpus.max_tokens} exceeds shape.context_tokens",
                cause=f"a window holds {self.shape.context_tokens} tokens",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SFTRecipe:
    """`recipes/nano-sft.toml`."""

    tasks: str = "etude:repair/base"
    """Tasks that the transcripts are about; only those of split `base` may be used."""
    model: str = "runs/nano-pretrain/model"
    """Folder of the pretrained model."""
    folder: str = "runs/nano-sft"
    """Transcripts, checkpoint, metrics and the resulting model (`model/`) go here."""
    transcripts: TranscriptSettings = dataclasses.field(default_factory=TranscriptSettings)
    """What the transcripts hold."""
    schedule: ScheduleSettings = dataclasses.field(
        default_factory=lambda: ScheduleSettings(
            wall_s=300.0, lr=1e-3, matrix_lr=2e-3, warmup_share=0.05, decay_share=0.9, evaluate_every_s=120.0
        )
    )
    """How it is trained."""

    def __post_init__(self) -> None:
        if not self.tasks.endswith("/base"):
            raise RecipeError(f"tasks = {self.tasks!r} are not of split base", hint="such as etude:repair/base")
