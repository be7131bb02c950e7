"""A model in shards takes the steps of a whole one, and goes on with another number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from etude.errors import RunError
from etude.train.lead import Lead
from etude.train.optimizer import to_stored
from etude.train.ranks import Ranks, together
from etude.train.service import open_trainer
from etude.types import Batch
from etude.weights.pieces import Stored
from etude.weights.recipe import WeightsRecipe
from etude.weights.replica import Replica
from etude.weights.store import open_store
from etude.weights.subscribe import latest
from tiny import tiny_model
from train.batches import make_batch
from train.sharded_ranks import PATIENCE, serve, serve_publishing, trainer_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TOLERANCE, WORST = 2e-5, 1e-3
"""Of 999 in 1,000 weights, and of each, after a few steps of 1e-2: sums are made in another order, and AdamW enlarges
what that does to a gradient of nearly 0."""


@contextmanager
def led(count: int, family: str, publish_dtype: str = "float32", kl: float = 0.0) -> Iterator[Lead]:
    with together(count, serve, family, publish_dtype, kl) as ranks:
        lead = Lead(trainer_of(ranks, family, publish_dtype, kl=kl))
        yield lead
        lead.close()


def batches(family: str, count: int = 3) -> list[Batch]:
    model = tiny_model(family)
    return [make_batch(model, step, groups=3, stale=0.2) for step in range(1, count + 1)]


def assert_close(one: Mapping[str, Stored], other: Mapping[str, Stored]) -> None:
    assert one.keys() == other.keys()
    gaps = np.concatenate([np.abs(stored.array - other[name].array).ravel() for name, stored in one.items()])
    assert np.quantile(gaps, 0.999) < TOLERANCE
    assert gaps.max() < WORST


def test_two_ranks_are_held_near_a_reference_as_one_is() -> None:
    family = "qwen3_moe"
    start = {name: to_stored(tensor) for name, tensor in tiny_model(family).hub_tensors().items()}
    with led(1, family, kl=0.5) as one, led(2, family, kl=0.5) as two:
        for lead in (one, two):
            lead.set_reference(start)
        for batch in batches(family):
            mine, theirs = two.train(batch), one.train(batch)
            for name in ("kl_k1", "route_overlap", "loss", "grad_norm"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
        assert_close(two.published(), one.published())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_two_ranks_take_the_steps_of_one(family: str) -> None:
    with led(1, family) as one, led(2, family) as two:
        for batch in batches(family):
            mine, theirs = two.train(batch), one.train(batch)
            for name in ("loss", "grad_norm", "entropy", "ratio_p99", "clipped_share", "mismatch_live_count", "tokens"):
                assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=1e-6), name
        assert_close(two.published(), one.published())
        sample = batch.samples[0]
        assert np.abs(two.score(sample) - one.score(sample)).max() < 1e-3


def test_16_bit_versions_of_shards_are_those_of_the_whole_but_for_rounding() -> None:
    with led(1, "qwen3", "bfloat16") as one, led(2, "qwen3", "bfloat16") as two:
        for batch in batches("qwen3"):
            one.train(batch)
            two.train(batch)
        differ = [
            float((two.published()[name].array != stored.array).mean()) for name, stored in one.published().items()
        ]
        assert max(differ) < 0.02


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(before: int, after: int) -> None:
    first, *rest = batches("qwen3_moe")
    with led(before, "qwen3_moe") as lead:
        lead.train(first)
        saved = lead.state()
        for batch in rest:
            lead.train(batch)
        wanted = {name: Stored(stored.dtype, stored.array.copy()) for name, stored in lead.published().items()}
    with led(after, "qwen3_moe") as lead:
        lead.restore(first.step, saved)
        again = lead.state()
        assert all(np.array_equal(again[name], array) for name, array in saved.items())
        for batch in rest:
            lead.train(batch)
        assert_close(lead.published(), wanted)


def test_a_batch_of_another_step_is_refused_and_all_ranks_go_on() -> None:
    first, second, third = batches("qwen3")
    with led(2, "qwen3") as lead:
        lead.train(first)
        with pytest.raises(RunError, match="batch 3"):
            lead.train(third)
        assert lead.train(second)["loss_tokens"] > 0


def test_more_ranks_than_rows_or_micro_batches() -> None:
    """A rank may have nothing of a small parameter, and no micro-batch of its own."""
    (batch,) = batches("qwen3", 1)
    small = Batch(**{**{n: getattr(batch, n) for n in batch.__struct_fields__}, "samples": batch.samples[:1]})
    with led(1, "qwen3") as one, led(3, "qwen3") as three:
        one.train(small)
        three.train(small)
        assert_close(three.published(), one.published())


@pytest.mark.parametrize(("family", "publish_dtype"), [("qwen3_moe", "bfloat16"), ("deepseek_v3", "float32")])
def test_each_rank_publishes_its_shard_as_differences_from_its_own_last_one(
    tmp_path: Path, family: str, publish_dtype: str
) -> None:
    url = f"file://{tmp_path}/weights"
    store, weights = open_store(url), WeightsRecipe(publish_dtype=publish_dtype, anchor_every=3)
    with together(2, serve_publishing, family, publish_dtype, url) as ranks:
        trainer = trainer_of(ranks, family, publish_dtype)
        service = open_trainer(
            trainer, store=store, checkpoints=tmp_path / "checkpoints", checkpoint_every=100, weights=weights,
            peers=ranks.beside(PATIENCE),
        )  # fmt: skip
        replica, manifests = Replica(store), []
        for batch in [None, *batches(family, 4)]:
            if batch is not None:
                service.step(batch)
                service._background.wait()
            manifests.append(latest(store))
            held, wanted = replica.fetch(manifests[-1]), service._trainer.published()
            assert held.keys() == wanted.keys()
            for name, stored in wanted.items():
                np.testing.assert_array_equal(held[name], stored.array, strict=True)
        service.close()
    assert [manifest.is_anchor for manifest in manifests] == [True, False, False, True, False]
    assert any(part.offset for part in manifests[1].changes), "no tensor was cut between the ranks"
    assert replica.restarts == 0


def test_alone_nothing_is_sent() -> None:
    assert Ranks().tell(b"anything") == b"anything"
