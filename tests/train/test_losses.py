from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from etude.train import losses
from etude.train.corrections import Correction, token_weights
from etude.train.losses import policy_loss, token_logprobs

NONE = Correction(kind="none")


def inputs(tokens: int = 50, width: int = 6, vocabulary: int = 11) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(tokens, width, generator=draw, dtype=torch.float64).requires_grad_(),
        "weight": torch.randn(vocabulary, width, generator=draw, dtype=torch.float64).requires_grad_(),
        "targets": torch.randint(0, vocabulary, (tokens,), generator=draw),
        "advantages": torch.randn(tokens, generator=draw, dtype=torch.float64),
        "behaviour": -3 * torch.rand(tokens, generator=draw, dtype=torch.float64),
    }


def by_the_book(
    hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor, behaviour: Tensor, *,
    denominator: float, correction: Correction, temperature: float,
) -> Tensor:  # fmt: skip
    logprobs = token_logprobs(hidden, weight, targets, temperature)
    return -(token_weights(logprobs, behaviour, correction) * advantages * logprobs).sum() / denominator


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "correction", [NONE, Correction(kind="truncated", clip=1.5), Correction(kind="masked", clip=1.5)]
)
@pytest.mark.parametrize("elements", [1 << 20, 77])
def test_the_chunked_loss_and_its_gradient_are_those_of_autograd(
    correction: Correction, temperature: float, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", elements)
    values = inputs()
    settings = {"denominator": 40.0, "correction": correction, "temperature": temperature}
    output = policy_loss(**values, **settings)
    wanted = by_the_book(**values, **settings)
    torch.testing.assert_close(output.loss, wanted)
    ours = torch.autograd.grad(2 * output.loss, [values["hidden"], values["weight"]])
    theirs = torch.autograd.grad(2 * wanted, [values["hidden"], values["weight"]])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_entropies_logprobs_and_weights_are_those_of_the_full_distribution() -> None:
    values = inputs()
    output = policy_loss(**values, denominator=1.0, correction=Correction(kind="truncated", clip=1.1))
    policy = torch.distributions.Categorical(logits=values["hidden"] @ values["weight"].T)
    torch.testing.assert_close(output.entropies, policy.entropy())
    torch.testing.assert_close(output.logprobs, policy.log_prob(values["targets"]))
    ratios = torch.exp(policy.log_prob(values["targets"]) - values["behaviour"])
    assert bool((ratios > 1.1).any())
    assert bool((ratios < 1.1).any())
    torch.testing.assert_close(output.weights, ratios.clamp(max=1.1).detach())
    assert not output.weights.requires_grad


def test_the_weight_is_a_constant_for_the_gradient() -> None:
    logits = torch.zeros(1, 2, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1)[:, 0]
    weights = token_weights(logprobs, torch.tensor([-1.5]), Correction(clip=9.0))
    (weights * logprobs).sum().backward()
    ratio = 0.5 * torch.e**1.5
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5 * ratio, -0.5 * ratio]]))


def test_on_policy_the_expected_gradient_is_that_of_the_expected_reward() -> None:
    """A tabular policy, 3 tokens by 3 steps, all 27 episodes enumerated, each with a reward of its own."""
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(13, 3, generator=draw, dtype=torch.float64, requires_grad=True)  # one row a prefix
    rewards = {
        episode: torch.randn((), generator=draw, dtype=torch.float64)
        for episode in itertools.product(range(3), repeat=3)
    }

    def rows(episode: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, 1 + episode[0], 4 + 3 * episode[0] + episode[1]])

    def logprob(episode: tuple[int, ...]) -> Tensor:
        return torch.log_softmax(table[rows(episode)], -1).gather(1, torch.tensor(episode)[:, None]).sum()

    exact = sum(logprob(episode).exp() * reward for episode, reward in rewards.items())
    (wanted,) = torch.autograd.grad(exact, table)

    estimated = torch.zeros_like(table)
    identity = torch.eye(3, dtype=torch.float64, requires_grad=True)
    baseline = sum(float(logprob(e).detach().exp() * r) for e, r in rewards.items())
    for episode, reward in rewards.items():
        hidden = table[rows(episode)]
        mu = torch.log_softmax(hidden, -1).gather(1, torch.tensor(episode)[:, None]).squeeze(1).detach()
        output = policy_loss(
            hidden, identity, torch.tensor(episode), (reward - baseline).expand(3), mu, denominator=1.0,
            correction=Correction(kind="truncated", clip=2.0),
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(output.loss, table)
        estimated -= gradient * logprob(episode).exp().detach()
    torch.testing.assert_close(estimated, wanted)


def test_off_policy_the_untruncated_weight_is_unbiased_and_the_truncated_one_is_smaller() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    (wanted,) = torch.autograd.grad((torch.softmax(logits, -1) * reward).sum(), logits)
    mu = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    identity = torch.eye(3, dtype=torch.float64)

    def expected(correction: Correction) -> Tensor:
        total = torch.zeros(3, dtype=torch.float64)
        for token in range(3):
            output = policy_loss(
                logits[None], identity, torch.tensor([token]), reward[token : token + 1], mu.log()[token : token + 1],
                denominator=1.0, correction=correction,
            )  # fmt: skip
            total -= mu[token] * torch.autograd.grad(output.loss, logits)[0]
        return total

    torch.testing.assert_close(expected(Correction(clip=1e9)), wanted)
    assert not torch.allclose(expected(Correction(clip=1.2)), wanted)
    assert not torch.allclose(expected(NONE), wanted)


def test_the_denominator_is_global_over_micro_batches() -> None:
    values = inputs()
    whole = policy_loss(**values, denominator=7.0, correction=NONE).loss
    parts = [
        policy_loss(
            **{name: v if name == "weight" else v[part] for name, v in values.items()}, denominator=7.0, correction=NONE
        ).loss
        for part in (slice(0, 13), slice(13, 50))
    ]
    torch.testing.assert_close(sum(parts), whole)
