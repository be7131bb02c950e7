"""How far the trainer's policy is from the one that sampled, in numbers that are never merged (docs/semantics.md 5.2).

    mismatch_live      |log pi - log mu| of tokens whose version and whole KV are the trainer's own: should be rounding
    off_policy_ratio   pi / mu of all other tokens: how stale the batch is

Each with its count; few tokens are live when training is asynchronous. The third number, `mismatch` of a teacher-forced
probe, is the engine's to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from etude.types import Run, Sample, Version


def live_tokens(sample: Sample, is_current: Callable[[Version], bool]) -> np.ndarray:
    """[n] bool: tokens that the current version sampled, seeing only KV that it had computed itself."""
    n = len(sample.ids)
    live = _current(sample.versions, n, is_current)
    epochs = sorted(sample.kv_epochs, key=lambda epoch: epoch.first)
    seen = np.zeros(n, bool)
    for number, epoch in enumerate(epochs):
        end = epochs[number + 1].first if number + 1 < len(epochs) else n
        broken = np.flatnonzero(~_current(epoch.runs, n, is_current))
        last = int(broken[0]) if len(broken) else n  # a token at position p saw the entries before p
        seen[epoch.first : min(last + 1, end)] = True
    return live & seen & sample.mask


def _current(runs: Sequence[Run], n: int, is_current: Callable[[Version], bool]) -> np.ndarray:
    flags = np.zeros(n, bool)
    for run in runs:
        flags[run.start :] = is_current(run.version)  # until the next run writes over it
    return flags


def summary(name: str, values: np.ndarray) -> dict[str, float]:
    """`name`_count, and if there are any: _mean, _p50, _p99."""
    row = {f"{name}_count": float(len(values))}
    if len(values):
        p50, p99 = np.quantile(values, [0.5, 0.99])
        row |= {f"{name}_mean": float(values.mean()), f"{name}_p50": float(p50), f"{name}_p99": float(p99)}
    return row


def agreement_row(logprobs: np.ndarray, behaviour: np.ndarray, live: np.ndarray) -> dict[str, float]:
    """Both summaries, over the loss positions of a batch. All arrays [tokens]."""
    gap = logprobs.astype(np.float64) - behaviour
    return summary("mismatch_live", np.abs(gap[live])) | summary("off_policy_ratio", np.exp(gap[~live]))
