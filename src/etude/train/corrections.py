"""How a token that another policy sampled is weighted: w, a constant for the gradient.

r = exp(log pi - log mu), where pi is the trainer's policy at the start of the step and mu what the engine sampled from,
token by token, so that a reply which several versions sampled is no special case.

    none        1                                       biased by all of the staleness, no variance of its own
    truncated   min(r, clip)                            IMPALA's rho-bar (Espeholt et al. 2018, arXiv 1802.01561)
    masked      r where 1/clip <= r <= clip, else 0     tokens that moved too far teach nothing (as IcePop's masks)
    sequence    min(product of the sample's r, clip)    unbiased up to the clip, for comparison: its variance grows with
                                                        length; refused where versions mix within a sample

What it does not do: look at advantages, or decide which samples are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

KINDS = ("none", "truncated", "masked", "sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Which of them, and its bound."""

    kind: str = "truncated"
    clip: float = 2.0
    """1 or more; not used by `none`."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    @property
    def needs_sequences(self) -> bool:
        """Whether a token's weight depends on the other tokens of its sample."""
        return self.kind == "sequence"


def token_weights(logprobs: Tensor, behaviour: Tensor, correction: Correction) -> Tensor:
    """w of each token, detached. logprobs, behaviour and result [tokens]."""
    if correction.kind == "none":
        return torch.ones_like(logprobs)
    ratios = torch.exp(logprobs.detach() - behaviour)
    if correction.kind == "masked":
        return ratios.masked_fill_((ratios < 1 / correction.clip) | (ratios > correction.clip), 0.0)
    assert correction.kind == "truncated", correction.kind
    return ratios.clamp_(max=correction.clip)


def sequence_weights(
    logprobs: np.ndarray, behaviour: np.ndarray, samples: np.ndarray, correction: Correction
) -> np.ndarray:
    """w of each token, float32: that of its sample. samples [tokens] int64: the sample that each belongs to."""
    ratios = np.exp(np.bincount(samples, logprobs.astype(np.float64) - behaviour))
    return np.minimum(ratios, correction.clip)[samples].astype(np.float32)
