"""From logits to tokens and their log-probs, for a whole batch at once.

One uniform number a row picks the token by inversion of the cumulative distribution, so that a request with a seed of
its own costs nothing extra and a seeded reply can be repeated. Log-probs are those of the full vocabulary at the
sampling temperature, in float32.

What it does not do: top-p, top-k, penalties: what is trained on must be sampled from the model's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from etude.protocols import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How the rows of a batch differ from plain sampling at temperature 1."""

    temperatures: torch.Tensor | None = None
    """[rows, 1] float32 divisors."""
    greedy: torch.Tensor | None = None
    """[rows, 1] bool: temperature 0, the likeliest token. Its log-prob is that at temperature 1."""
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    """(row, id) of every logit that is never sampled."""


PLAIN = SamplingRows()


def sampling_rows(requests: Sequence[GenerateRequest]) -> SamplingRows:
    """Settings of a batch whose rows belong to `requests`."""
    temperatures = torch.tensor([request.temperature for request in requests], dtype=torch.float32)[:, None]
    greedy = temperatures == 0
    rows = [row for row, request in enumerate(requests) for _ in request.banned_ids]
    ids = [token for request in requests for token in request.banned_ids]
    return SamplingRows(
        temperatures=torch.where(greedy, 1.0, temperatures),
        greedy=greedy if bool(greedy.any()) else None,
        banned=(torch.tensor(rows), torch.tensor(ids)) if rows else None,
    )


def sample(logits: torch.Tensor, uniforms: np.ndarray, rows: SamplingRows) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their log-probs. logits: [rows, vocabulary], overwritten; uniforms: [rows] in [0, 1).

    Returns ([rows] int64, [rows] float32). A row whose logits are not finite gets a log-prob that is not finite.
    """
    logits = logits.float()
    if rows.banned is not None:
        logits[rows.banned] = -torch.inf
    if rows.temperatures is not None:
        logits /= rows.temperatures
    logits -= logits.amax(dim=-1, keepdim=True)
    cumulative = logits.exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The first token whose cumulative mass exceeds the target: never one of probability 0, whose mass equals that of
    # the token before it. Rounding may put the target on the total itself; the nearest number below it is meant.
    target = torch.from_numpy(uniforms.astype(np.float32))[:, None] * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, logits.argmax(dim=-1, keepdim=True), tokens)
    logprobs = logits.gather(-1, tokens) - total.log()
    return tokens[:, 0].numpy(), logprobs[:, 0].numpy()
