"""Estimates over tasks, with intervals. Pure; numpy only; seeded where it resamples.

What it does not do: know what a policy or a table is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from etude.types import Noun

Z95 = 1.959963984540054
"""97.5% quantile of the standard normal."""


class Interval(Noun, frozen=True):
    """An estimate with the bounds of its 95% interval."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k attempts solves the task, from c successes in n attempts: 1 - C(n-c, k) / C(n, k).

    Unbiased for k <= n (Chen et al. 2021, arXiv 2107.03374). Errors: ValueError for k > n.

    >>> pass_at_k(n=8, c=2, k=1)
    0.25
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {c} successes in {n} attempts")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def paired_difference(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Mean of after - before over tasks, with the normal 95% interval of the per-task differences.

    Each task is its own control, so what makes tasks differ cancels. The interval speaks of other tasks like these; it
    takes them as independent (see `clustered_difference`). One task gives an unbounded interval.
    """
    differences = _differences(before, after)
    mean = float(differences.mean())
    if len(differences) == 1:
        return Interval(value=mean, low=-np.inf, high=np.inf)
    half = Z95 * float(differences.std(ddof=1)) / len(differences) ** 0.5
    return Interval(value=mean, low=mean - half, high=mean + half)


def clustered_difference(
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    seed: int = 0,
    num_resamples: int = 10_000,
) -> Interval:
    """Mean of after - before, with the 95% percentile interval of a bootstrap over whole clusters (packages).

    Tasks of one package resemble each other; this interval speaks of tasks of other packages, and is the wider one.
    With few clusters (under about 20) a percentile interval is too narrow: read it as a lower bound of the doubt.
    """
    differences = _differences(before, after)
    if len(clusters) != len(differences):
        raise ValueError(f"{len(differences)} tasks have {len(clusters)} clusters")
    _, member = np.unique([str(cluster) for cluster in clusters], return_inverse=True)
    sums, sizes = np.bincount(member, weights=differences), np.bincount(member)
    draws = np.random.default_rng(seed).integers(len(sums), size=(num_resamples, len(sums)))
    means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(value=float(differences.mean()), low=float(low), high=float(high))


def _differences(before: Sequence[float], after: Sequence[float]) -> np.ndarray:
    if len(before) != len(after) or not len(before):
        raise ValueError(f"pairs are needed: {len(before)} tasks before, {len(after)} after")
    return np.asarray(after, np.float64) - np.asarray(before, np.float64)
