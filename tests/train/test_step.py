from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from etude.errors import RunError
from etude.train.corrections import Correction
from etude.train.recipe import TrainRecipe
from etude.train.step import Trainer
from etude.types import Batch
from tiny import tiny_model
from train.batches import START, make_batch, score


def trainer(
    family: str = "qwen3_moe", *, publish_dtype: str = "float32", kind: str = "truncated", **recipe: object
) -> Trainer:
    settings = TrainRecipe(**{"lr": 1e-2, "micro_batch_tokens": 40, **recipe})  # type: ignore[arg-type]
    return Trainer(
        tiny_model(family), settings, publish_dtype=publish_dtype, correction=Correction(kind=kind, clip=2.0)
    )


def test_a_step_makes_good_tokens_likelier_and_bad_ones_less_likely() -> None:
    batch = make_batch(tiny_model("qwen3"), 1)
    learner = trainer("qwen3")
    learner.train(batch)
    after = tiny_model("qwen3")
    after.assign(learner.model.hub_tensors())
    moved = []
    for sample in batch.samples:
        change = score(after, sample.ids)[0] - sample.logprobs
        moved.append(sample.advantage * float(change[sample.mask].sum()))
    assert sum(moved) > 0.1


def test_a_batch_says_at_which_share_of_the_rate_it_is_trained() -> None:
    batch = make_batch(tiny_model("qwen3"), 1)
    start = {name: tensor.clone() for name, tensor in tiny_model("qwen3").hub_tensors().items()}
    moved = {}
    for rate in (1.0, 0.25, 0.0):
        learner = trainer("qwen3", weight_decay=0.0)
        row = learner.train(msgspec.structs.replace(batch, rate=rate))
        assert row["rate"] == rate
        tensors = learner.model.hub_tensors()
        moved[rate] = torch.cat([(tensors[name] - start[name]).flatten() for name in start])
    assert moved[1.0].abs().max() > 1e-3
    assert torch.allclose(moved[0.25], moved[1.0] / 4, atol=1e-6)
    assert not moved[0.0].any()


def test_on_policy_ratios_are_one_and_every_token_is_live() -> None:
    batch = make_batch(tiny_model("qwen3_moe"), 1)
    row = trainer().train(batch, is_current=lambda version: version == START)
    tokens = sum(int(sample.mask.sum()) for sample in batch.samples)
    assert row["loss_tokens"] == row["mismatch_live_count"] == tokens
    assert row["off_policy_ratio_count"] == 0
    assert row["mismatch_live_p99"] < 1e-4
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert row["clipped_share"] == 0
    assert row["missing_route_rows"] == 0
    assert 0 < row["entropy"] < math.log(97)
    assert row["grad_norm"] > 0
    assert row["forward_tokens"] < row["tokens"]


def test_stale_tokens_are_counted_apart_and_clipped() -> None:
    batch = make_batch(tiny_model("qwen3_moe"), 1, stale=1.0)
    row = trainer().train(batch)
    assert row["mismatch_live_count"] == 0
    assert row["off_policy_ratio_count"] == row["loss_tokens"]
    assert row["off_policy_ratio_p50"] == pytest.approx(1, abs=0.3)
    assert row["ratio_max"] > 2
    assert 0.1 < row["clipped_share"] < 0.5
    assert "clipped_share" not in trainer(kind="none").train(batch)


def test_the_row_holds_plain_finite_numbers_and_its_seconds_add_up() -> None:
    row = trainer().train(make_batch(tiny_model("qwen3_moe"), 1))
    assert all(type(value) is float and math.isfinite(value) for value in row.values())
    phases = sum(row[f"{name}_s"] for name in ("pack", "forward", "loss", "backward", "optimize"))
    assert phases == pytest.approx(row["step_s"], rel=0.2)


def test_missing_routes_are_counted_and_the_own_choice_is_used() -> None:
    batch = make_batch(tiny_model("qwen3_moe"), 1)
    for sample in batch.samples:
        assert sample.routes is not None
        sample.routes.valid[:] = False
        sample.routes.experts[:] = 0
    row = trainer().train(batch)
    assert row["missing_route_rows"] == row["forward_tokens"]
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_a_batch_of_another_step_is_refused() -> None:
    learner = trainer()
    with pytest.raises(RunError, match="batch 2 cannot be trained on"):
        learner.train(make_batch(tiny_model("qwen3_moe"), 2))
    assert learner.step == 0


def test_a_batch_without_samples_is_a_step_without_gradient() -> None:
    learner = trainer()
    before = {name: tensor.clone() for name, tensor in learner.model.hub_tensors().items()}
    row = learner.train(Batch(step=1, samples=(), denominator=1.0, seed=0))
    assert (learner.step, row["grad_norm"], row["loss_tokens"]) == (1, 0.0, 0.0)
    decay = 1 - 1e-2 * 0.01
    for name, tensor in learner.model.hub_tensors().items():
        wanted = before[name] * decay if tensor.dim() >= 2 else before[name]
        torch.testing.assert_close(tensor, wanted, msg=name)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    learner = trainer()
    before = {name: tensor.clone() for name, tensor in learner.model.hub_tensors().items()}
    batch = make_batch(tiny_model("qwen3_moe"), 1)
    broken = msgspec.structs.replace(batch.samples[0], advantage=math.nan)
    with pytest.raises(RunError, match="not finite"):
        learner.train(msgspec.structs.replace(batch, samples=(broken, *batch.samples[1:])))
    assert learner.step == 0
    for name, tensor in learner.model.hub_tensors().items():
        assert torch.equal(tensor, before[name]), name
    learner.train(batch)


def test_a_learning_rate_of_zero_changes_nothing() -> None:
    learner = trainer(lr=0.0)
    before = {name: tensor.clone() for name, tensor in learner.model.hub_tensors().items()}
    learner.train(make_batch(tiny_model("qwen3_moe"), 1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.hub_tensors().items())


def test_the_size_of_micro_batches_does_not_change_the_step() -> None:
    batch = make_batch(tiny_model("qwen3_moe"), 1, stale=0.3)
    small, large = trainer(micro_batch_tokens=20), trainer(micro_batch_tokens=100_000)
    first, second = small.train(batch), large.train(batch)
    assert first["micro_batches"] > second["micro_batches"] == 1
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)
    assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("publish_dtype", ["bfloat16"])
def test_the_forward_runs_on_the_published_rounding_while_masters_keep_more(publish_dtype: str) -> None:
    learner = trainer(publish_dtype=publish_dtype, lr=1e-5)
    start = {name: tensor.clone() for name, tensor in learner.masters.tensors.items()}
    for step in (1, 2, 3):
        learner.train(make_batch(tiny_model("qwen3_moe"), step))
    dtype = getattr(torch, publish_dtype)
    for name, parameter in learner.model.network.named_parameters():
        master = learner.masters.tensors[name]
        assert torch.equal(parameter, master.to(dtype).float()), name
    moved = torch.cat([(learner.masters.tensors[name] != start[name]).flatten() for name in start])
    seen = torch.cat([(learner.masters.tensors[n].to(dtype) != start[n].to(dtype)).flatten() for n in start])
    assert float(moved.float().mean()) > 0.9
    assert 0 < float(seen.float().mean()) < 0.3


def test_a_repeated_batch_gives_bitwise_the_same_weights() -> None:
    batches = [make_batch(tiny_model("qwen3_moe"), step, stale=0.2) for step in (1, 2)]
    first, second = trainer(), trainer()
    for batch in batches:
        first.train(batch)
        second.train(batch)
    for name, tensor in first.model.hub_tensors().items():
        assert np.array_equal(tensor.numpy(), second.model.hub_tensors()[name].numpy()), name
