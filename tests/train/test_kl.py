"""KL against exact numbers: a tabular policy of 4 tokens by 3 steps, all 64 replies enumerated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.data.packing import pack
from etude.errors import RunError
from etude.models.load import Model
from etude.train.corrections import Correction
from etude.train.kl import KL, kl_row, penalties
from etude.train.losses import policy_loss
from etude.train.optimizer import to_stored
from etude.train.recipe import TrainRecipe
from etude.train.reference import logprobs_of
from etude.train.step import Trainer
from etude.types import Batch, Origin, Run, Sample, Version
from tiny import tiny_model
from train.batches import START, make_batch, score

TOKENS, STEPS = 4, 3
REPLIES = list(itertools.product(range(TOKENS), repeat=STEPS))
IDENTITY = torch.eye(TOKENS, dtype=torch.float64, requires_grad=True)


def rows(reply: tuple[int, ...]) -> Tensor:
    """One row of the table for each prefix."""
    return torch.tensor([0, 1 + reply[0], 5 + 4 * reply[0] + reply[1]])


def table(seed: int) -> Tensor:
    return torch.randn(21, TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_logs(logits: Tensor, reply: tuple[int, ...]) -> Tensor:
    return torch.log_softmax(logits[rows(reply)], -1).gather(1, torch.tensor(reply)[:, None])[:, 0]


def samples_of(reply: tuple[int, ...], cuts: tuple[int, ...] = ()) -> tuple[list[Sample], np.ndarray, np.ndarray]:
    """The reply as a chain of contexts, cut before the tokens `cuts`; sample and place of each token."""
    samples, numbers, places = [], [], []
    for number, (start, end) in enumerate(itertools.pairwise((0, *cuts, STEPS))):
        ids = np.array([9, *reply[start:end]], np.int32)
        samples.append(
            Sample(ids=ids, mask=np.arange(len(ids)) > 0, logprobs=np.zeros(len(ids), np.float32), advantage=0.0,
                   versions=(), kv_epochs=(), routes=None, origin=Origin(key="g", member=0, context=number))
        )  # fmt: skip
        numbers += [number] * (end - start)
        places += range(1, 1 + end - start)
    return samples, np.array(numbers), np.array(places)


def expected_gradient(kind: str, policy: Tensor, reference: Tensor, cuts: tuple[int, ...] = ()) -> Tensor:
    """Of the KL alone (no reward, beta 1), on policy: our loss's gradient, weighed by each reply's probability."""
    total = torch.zeros_like(policy)
    for reply in REPLIES:
        logs = token_logs(policy, reply).detach()
        gaps = (logs - token_logs(reference, reply)).numpy()
        samples, numbers, places = samples_of(reply, cuts)
        advantages = -torch.from_numpy(penalties(kind, gaps, numbers, places, samples))
        output = policy_loss(
            policy[rows(reply)], IDENTITY, torch.tensor(reply), advantages, logs, denominator=1.0,
            correction=Correction(kind="truncated", clip=2.0),
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(output.loss, policy)
        total += gradient * logs.sum().exp()
    return total


def exact(policy: Tensor, reference: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gradient of a sum over all replies."""
    total = sum(of(token_logs(policy, reply), token_logs(reference, reply)) for reply in REPLIES)
    assert isinstance(total, Tensor)
    (gradient,) = torch.autograd.grad(total, policy)
    return gradient


def reverse_kl(logs: Tensor, fixed: Tensor) -> Tensor:
    return logs.sum().exp() * (logs - fixed).sum()


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2)])
def test_k1_in_the_reward_has_the_gradient_of_the_exact_reverse_kl(cuts: tuple[int, ...]) -> None:
    policy, reference = table(0).requires_grad_(), table(1)
    wanted = exact(policy, reference, reverse_kl)
    found = expected_gradient("k1", policy, reference, cuts)
    assert float(wanted.abs().max()) > 0.1
    assert float((found - wanted).abs().max()) < 1e-6


def test_other_sums_would_be_wrong() -> None:
    """s > t, and s = t alone; so the bounds of the sum matter, and the test above can tell."""
    policy, reference = table(0).requires_grad_(), table(1)
    wanted = exact(policy, reference, reverse_kl)

    def with_sum(of: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        total = torch.zeros_like(policy)
        for reply in REPLIES:
            logs = token_logs(policy, reply)
            gaps = (logs.detach() - token_logs(reference, reply)).numpy()
            loss = (torch.from_numpy(of(gaps).copy()) * logs).sum() * logs.sum().exp().detach()
            total += torch.autograd.grad(loss, policy)[0]
        return total

    def to_go(gaps: np.ndarray) -> np.ndarray:
        return np.cumsum(gaps[::-1])[::-1]

    assert float((with_sum(to_go) - wanted).abs().max()) < 1e-6
    assert float((with_sum(lambda gaps: to_go(gaps) - gaps) - wanted).abs().max()) > 1e-2
    assert float((with_sum(lambda gaps: gaps) - wanted).abs().max()) > 1e-2


def test_k1_as_a_plain_loss_and_without_stopgrad_is_wrong() -> None:
    policy, reference = table(0).requires_grad_(), table(1)
    wanted = exact(policy, reference, reverse_kl)
    as_loss = exact(policy, reference, lambda logs, fixed: logs.sum().exp().detach() * (logs - fixed).sum())
    assert float(as_loss.abs().max()) < 1e-12

    def twice(logs: Tensor, fixed: Tensor) -> Tensor:
        weight = logs.sum().exp().detach()
        gaps = logs - fixed
        to_go = gaps.flip(0).cumsum(0).flip(0)
        return weight * (to_go * logs).sum()

    assert float((exact(policy, reference, twice) - wanted).abs().max()) > 1e-2


def test_k2_and_k3_have_the_gradients_of_their_own_losses() -> None:
    policy, reference = table(0).requires_grad_(), table(1)

    def k2(logs: Tensor, fixed: Tensor) -> Tensor:
        return logs.sum().exp().detach() * ((logs - fixed) ** 2 / 2).sum()

    def k3(logs: Tensor, fixed: Tensor) -> Tensor:
        return logs.sum().exp().detach() * (torch.exp(fixed - logs) - 1 + logs - fixed).sum()

    assert float((expected_gradient("k2", policy, reference) - exact(policy, reference, k2)).abs().max()) < 1e-6
    assert float((expected_gradient("k3", policy, reference) - exact(policy, reference, k3)).abs().max()) < 1e-6


@pytest.mark.parametrize("kl", [0.125, 0.5, 1.0])
def test_estimates_have_mean_and_variance_of_the_closed_forms_for_gaussians(kl: float) -> None:
    """q = N(0, 1), p = N(mu, 1): KL = mu^2 / 2; Var(k1) = 2 KL, Var(k3) = exp(2 KL) - 1 - 2 KL."""
    mu = math.sqrt(2 * kl)
    x = np.random.default_rng(0).normal(size=4_000_000)
    gaps = (x - mu) ** 2 / 2 - x**2 / 2  # log q - log p
    row = kl_row(gaps)
    assert row["kl_k1"] == pytest.approx(kl, abs=0.01)
    assert row["kl_k3"] == pytest.approx(kl, abs=0.02)
    assert gaps.var() == pytest.approx(2 * kl, rel=0.01)
    assert (np.expm1(-gaps) + gaps).var() == pytest.approx(math.expm1(2 * kl) - 2 * kl, rel=0.15)


def test_tokens_may_come_in_any_order_and_chains_stay_apart() -> None:
    samples = [
        Sample(ids=np.arange(4, dtype=np.int32), mask=np.arange(4) > 0, logprobs=np.zeros(4, np.float32), advantage=0.0,
               versions=(), kv_epochs=(), routes=None, origin=Origin(key=key, member=member, context=context))
        for key, member, context in (("a", 1, 0), ("a", 0, 1), ("a", 0, 0), ("b", 0, 0))
    ]  # fmt: skip
    numbers = np.array([1, 2, 0, 3, 2, 1, 0])
    places = np.array([2, 1, 3, 1, 3, 1, 1])
    gaps = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    found = penalties("k1", gaps, numbers, places, samples)
    # chain (a, 0): sample 2 at places 1, 3, then sample 1 at places 1, 2 = gaps 2, 16, 32, 1
    assert found.tolist() == [1.0, 51.0, 4.0, 8.0, 49.0, 33.0, 68.0]
    assert penalties("k1", gaps[:0], numbers[:0], places[:0], samples).tolist() == []


# In the trainer


def trainer(
    kl: KL | None = None, *, correction: Correction | None = None, family: str = "qwen3_moe", lr: float = 1e-2
) -> Trainer:
    recipe = TrainRecipe(lr=lr, micro_batch_tokens=40 if family == "qwen3_moe" else 4000)
    return Trainer(tiny_model(family), recipe, publish_dtype="float32", correction=correction or Correction(), kl=kl)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_at_the_reference_the_kl_takes_nothing(kind: str) -> None:
    batch = make_batch(tiny_model("qwen3_moe"), 1)
    plain, held = trainer(), trainer(KL(kind=kind, coef=1.0))
    held.set_reference(held.masters.published())
    plain.train(batch)
    row = held.train(batch)
    assert abs(row["kl_k1"]) < 1e-5
    for name, tensor in plain.model.hub_tensors().items():
        assert torch.allclose(tensor, held.model.hub_tensors()[name], atol=1e-4), name


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_without_any_reward_the_kl_pulls_the_policy_to_its_reference(kind: str) -> None:
    reference, learner = tiny_model("qwen3"), trainer(KL(kind=kind, coef=1.0), family="qwen3", lr=5e-4)
    draw = torch.Generator().manual_seed(0)
    for tensor in reference.hub_tensors().values():
        tensor.add_(torch.randn(tensor.shape, generator=draw), alpha=0.03)
    learner.set_reference({name: to_stored(tensor) for name, tensor in reference.hub_tensors().items()})
    distances = []
    for step in range(1, 9):
        replies = sampled_replies(learner.model, draw)
        distances.append(exact_kl(learner.model, reference, replies))
        learner.train(batch_of(learner.model, replies, step))
    assert distances[0] > 0.1
    assert distances[-1] < 0.9 * distances[0]


def copy_of(model: Model) -> Model:
    other = tiny_model("qwen3")
    other.assign(model.hub_tensors())
    return other


@torch.no_grad()
def sampled_replies(model: Model, draw: torch.Generator, count: int = 400, length: int = 6) -> Tensor:
    """[count, 1 + length] ids: a random first token, and what the model samples after it."""
    plain, ids = copy_of(model), torch.randint(0, 97, (count, 1), generator=draw)
    for _ in range(length):
        probabilities = plain.network(ids).logits[:, -1].softmax(-1)
        ids = torch.cat((ids, torch.multinomial(probabilities, 1, generator=draw)), dim=1)
    return ids


@torch.no_grad()
def exact_kl(model: Model, reference: Model, ids: Tensor) -> float:
    """Mean over positions of the full distributions' reverse KL."""
    ours, fixed = (torch.log_softmax(one.network(ids[:, :-1]).logits, -1) for one in (copy_of(model), reference))
    return float((ours.exp() * (ours - fixed)).sum(-1).mean())


def batch_of(model: Model, replies: Tensor, step: int) -> Batch:
    plain, samples = copy_of(model), []
    for number, row in enumerate(replies.numpy().astype(np.int32)):
        samples.append(
            Sample(ids=row, mask=np.arange(len(row)) > 0, logprobs=score(plain, row)[0], advantage=0.0,
                   versions=(Run(start=0, version=START),), kv_epochs=(), routes=None,
                   origin=Origin(key=str(number), member=0, context=0))
        )  # fmt: skip
    return Batch(step=step, samples=tuple(samples), denominator=float(replies[:, 1:].numel()), seed=0)


def test_a_step_without_its_reference_is_refused() -> None:
    with pytest.raises(RunError, match="not loaded"):
        trainer(KL(coef=0.1)).train(make_batch(tiny_model("qwen3_moe"), 1))


def test_a_sequence_is_weighed_by_the_product_of_its_ratios() -> None:
    batch = make_batch(tiny_model("qwen3_moe"), 1, stale=0.3)
    learner = trainer(correction=Correction(kind="sequence", clip=1.5))
    micros = pack(batch.samples, max_cost=40, pair_cost=0.01).micro_batches
    terms, _ = learner._look(batch, micros)
    for micro, weighs in zip(micros, terms, strict=True):
        (logprobs,) = logprobs_of(learner._objective, [micro], learner.ranks, 1.0)
        for number in set(micro.samples.tolist()):
            mine = micro.samples == number
            product = math.exp(float((logprobs[mine] - micro.logprobs[mine]).sum()))
            assert weighs.weights is not None
            assert weighs.weights[mine] == pytest.approx(min(product, 1.5), rel=1e-4)
    learner.train(batch)


def test_sequences_that_several_versions_sampled_are_refused() -> None:
    batch = make_batch(tiny_model("qwen3_moe"), 1)
    first = batch.samples[0]
    later = Version(incarnation=1, n=1, step=1)
    mixed = Sample(
        ids=first.ids, mask=first.mask, logprobs=first.logprobs, advantage=first.advantage, kv_epochs=(), routes=None,
        versions=(Run(start=0, version=START), Run(start=5, version=later)), origin=first.origin,
    )  # fmt: skip
    learner = trainer(correction=Correction(kind="sequence"))
    with pytest.raises(RunError, match="several versions sampled it"):
        learner.train(Batch(step=1, samples=(mixed,), denominator=1.0, seed=0))
    assert learner.step == 0
