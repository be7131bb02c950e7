"""The `mismatch` of a published version: the same tokens, teacher-forced, through trainer and engine.

The engine scores a sample as it serves, and the trainer with the routes that the engine took, as it trains; what
remains is rounding, what a filter of routes replaced, and whatever one of the two does wrongly. Taken when the engine
has just committed the trainer's newest step, so that no version has to be kept for it; a probe that a new step
overtakes is dropped.

What it does not do: speak of staleness. Tokens that were sampled under older weights are the trainer's row's business
(`mismatch_live`, `off_policy_ratio`); the three are never merged.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from etude.protocols import Engine
from etude.train.client import Scored
from etude.types import Sample, Version


class Scorer(Protocol):
    """The trainer, as the probe sees it."""

    async def score(self, sample: Sample) -> Scored: ...


async def mismatch(engine: Engine, trainer: Scorer, sample: Sample, version: Version) -> dict[str, float] | None:
    """Mean, median, p99 and largest |difference| of the sample's log-probs; None if a step or a swap came between.

    Errors: EngineError if one of the two is gone.
    """
    if (await engine.stats()).version != version:
        return None
    theirs, routes = await engine.score(sample.ids)
    ours = await trainer.score(msgspec.structs.replace(sample, routes=routes))
    if ours.step != version.step or (await engine.stats()).version != version:
        return None
    gap = np.abs(theirs[sample.mask].astype(np.float64) - ours.logprobs)
    p50, p99 = np.quantile(gap, [0.5, 0.99])
    return {
        "mismatch_count": float(len(gap)),
        "mismatch_mean": float(gap.mean()),
        "mismatch_p50": float(p50),
        "mismatch_p99": float(p99),
        "mismatch_max": float(gap.max()),
    }
