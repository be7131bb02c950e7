"""The ranks after the first of sharded trainers; apart, so that another process can import it."""

from __future__ import annotations

import threading
from datetime import timedelta

from etude.train.corrections import Correction
from etude.train.kl import KL
from etude.train.lead import follow
from etude.train.ranks import Ranks
from etude.train.recipe import TrainRecipe
from etude.train.step import Trainer
from etude.weights.publish import Snapshots
from etude.weights.publish import follow as follow_publisher
from etude.weights.store import open_store
from etude.weights.upload import Uploader
from tiny import tiny_model

PATIENCE = timedelta(minutes=1)


def trainer_of(
    ranks: Ranks, family: str, publish_dtype: str = "float32", micro_batch_tokens: int = 40, kl: float = 0.0
) -> Trainer:
    recipe = TrainRecipe(lr=1e-2, output_scale_rate=2.0, micro_batch_tokens=micro_batch_tokens)
    correction = Correction(kind="truncated", clip=2.0)
    return Trainer(
        tiny_model(family), recipe, publish_dtype=publish_dtype, correction=correction, ranks=ranks, kl=KL(coef=kl)
    )


def serve(ranks: Ranks, family: str, publish_dtype: str = "float32", kl: float = 0.0) -> None:
    follow(trainer_of(ranks, family, publish_dtype, kl=kl))


def serve_publishing(ranks: Ranks, family: str, publish_dtype: str, url: str) -> None:
    """As `roles.follow_trainer` does."""
    trainer, peers, snapshots = trainer_of(ranks, family, publish_dtype), ranks.beside(PATIENCE), Snapshots()
    uploader = Uploader(open_store(url), threads=1)
    threading.Thread(target=follow_publisher, args=(uploader, peers, snapshots), daemon=True).start()
    follow(trainer, snapshots)
