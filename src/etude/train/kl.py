"""Keeping the policy near a reference: what a token's advantage loses to the divergence from it.

With d_t = log pi(t) - log pi_ref(t), of tokens that the policy sampled, and beta = `coef`, a token's advantage becomes

    k1 in the reward   A_t = A - beta * sum of d_s over sampled s >= t, along the chain of contexts
    k2 as a loss       A_t = A - beta * d_t                     gradient of beta * mean of d^2 / 2
    k3 as a loss       A_t = A - beta * (1 - exp(-d_t))         gradient of beta * mean of exp(-d) - 1 + d

The reward-to-go of k1 makes the expected gradient on policy that of the exact reverse KL of whole replies; k1 as a
plain loss has expected gradient 0, and d_t alone (k2) is that of a token at a time, blind to where a token leads. k3 as
a loss pulls along the forward KL. Tests enumerate all of these (tests/train/test_kl.py). The mean that advantages
subtract includes the episode itself and shrinks the reward's gradient by (G - 1) / G; the KL's it leaves alone, so beta
counts G / (G - 1) times as much beside it.

Source: Schulman 2020, "Approximating KL divergence"; the Composer 2 report, section 4.1, chooses k1. numpy, pure.
What it does not do: compute log-probs (step.py does, both under the same routes and at the sampling temperature).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etude.types import Sample

KINDS = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """How much, and which."""

    kind: str = "k1"
    coef: float = 0.0
    """beta; 0 computes nothing."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


def penalties(kind: str, gaps: np.ndarray, samples: np.ndarray, places: np.ndarray, of: Sequence[Sample]) -> np.ndarray:
    """[tokens] float64: what is subtracted from each token's advantage, before beta.

    gaps [tokens]: log pi - log pi_ref of every loss position of a batch, in any order; samples, places [tokens]: the
    sample `of` the batch that it belongs to, and its index in it.
    """
    if kind == "k2":
        return gaps
    if kind == "k3":
        return -np.expm1(-gaps)
    origins = [sample.origin for sample in of]
    chains: dict[tuple[str, int], int] = {}
    chain_of = np.array([chains.setdefault((o.key, o.member), len(chains)) for o in origins], np.int64)
    context_of = np.array([o.context for o in origins], np.int64)
    order = np.lexsort((places, context_of[samples], chain_of[samples]))
    ordered = gaps[order].astype(np.float64)
    ends = np.flatnonzero(np.diff(chain_of[samples][order], append=-1) != 0)  # the last token of each chain
    sums = np.cumsum(ordered)
    last = sums[ends][np.searchsorted(ends, np.arange(len(order)))]
    result = np.empty_like(ordered)
    result[order] = last - sums + ordered
    return result


def kl_row(gaps: np.ndarray) -> dict[str, float]:
    """Estimates of the divergence a token, under the policy that sampled: mean of k1 and of k3."""
    if not len(gaps):
        return {}
    gaps = gaps.astype(np.float64)
    return {"kl_k1": float(gaps.mean()), "kl_k3": float((np.expm1(-gaps) + gaps).mean())}
