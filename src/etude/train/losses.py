"""The policy gradient's loss, as pure functions.

    L = -(1/Z) sum_i sum over sampled tokens of w A_t log pi        Z from the recipe alone, global over micro-batches

w is the importance weight of a token, a constant for the gradient (corrections.py); A_t the sample's advantage, less
what the KL takes (kl.py). One optimizer step a batch: so the forward that gives log pi is the one that is
differentiated, and nothing has moved between the two.

Log-probs are of the full vocabulary at the sampling temperature. Not here: advantages, or any penalty in the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from etude.train.corrections import Correction, token_weights

CHUNK_ELEMENTS = 1 << 20
"""Logits that are held at a time."""


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log pi of each target [tokens], a chunk of logits at a time. Shapes as in `policy_loss`."""
    rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
    parts = [hidden.new_empty(0)]
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = torch.nn.functional.linear(hidden[part], weight) / temperature
        parts.append(torch.log_softmax(logits, dim=-1).gather(-1, targets[part, None]).squeeze(-1))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The differentiable loss, and per token [tokens], detached: log pi, entropy of pi, importance weight."""

    loss: Tensor
    logprobs: Tensor
    entropies: Tensor
    weights: Tensor


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    behaviour: Tensor,
    *,
    denominator: float,
    correction: Correction,
    weights: Tensor | None = None,
    temperature: float = 1.0,
) -> LossOutput:
    """The loss of one micro-batch, from the hidden states that predict its targets.

    hidden [tokens, width], weight [vocabulary, width]; targets, advantages, behaviour [tokens]. Sums over micro-batches
    give the batch's loss. Logits are made a chunk at a time, and each chunk's gradient in the same pass. weights
    [tokens]: the importance weights, where `correction` cannot be told from a token alone.
    """
    outputs = _PolicyLoss.apply(
        hidden, weight, targets, advantages, behaviour, weights, denominator, correction, temperature
    )
    return LossOutput(*outputs)


class _PolicyLoss(torch.autograd.Function):
    """Forward makes the gradients too: d loss / d logits = (w A / Z) (softmax - one hot) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, behaviour: Tensor,
        given: Tensor | None, denominator: float, correction: Correction, temperature: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        loss = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logs = torch.mm(hidden[part], weight.t())
            if temperature != 1.0:
                logs /= temperature
            logs -= torch.logsumexp(logs, dim=-1, keepdim=True)
            place = targets[part, None]
            chosen = logs.gather(-1, place).squeeze(-1)
            weights = given[part] if given is not None else token_weights(chosen, behaviour[part], correction)
            scale = weights * advantages[part] / denominator
            loss -= (scale * chosen).sum()
            slopes = torch.exp(logs)
            columns.append((chosen, -logs.mul_(slopes).sum(-1), weights))
            scale /= temperature
            slopes.mul_(scale[:, None]).scatter_add_(-1, place, -scale[:, None])
            torch.mm(slopes, weight, out=grad_hidden[part])
            grad_weight.addmm_(slopes.t(), hidden[part])
        ctx.save_for_backward(grad_hidden, grad_weight)
        logprobs, entropies, all_weights = (torch.cat(column) for column in zip(*columns, strict=True))
        ctx.mark_non_differentiable(logprobs, entropies, all_weights)
        return loss, logprobs, entropies, all_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None, None, None, None, None, None
