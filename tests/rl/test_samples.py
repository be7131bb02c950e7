import numpy as np
import pytest

from etude.errors import RunError
from etude.rl.advantages import advantages
from etude.rl.recipe import RLRecipe
from etude.rl.samples import batch_samples, oldest_step, to_samples, versions_of
from etude.types import Group
from rl.builders import context, scored, version


def test_every_context_of_a_chain_carries_the_episodes_advantage() -> None:
    chain = (context(step=1), context(step=2))
    group = Group(key="k", task_id="t", members=(scored(1.0, contexts=chain), scored(0.0)), faults=())
    samples = to_samples(group, advantages(group))
    assert [sample.advantage for sample in samples] == [0.5, 0.5, -0.5]
    assert [(sample.origin.member, sample.origin.context) for sample in samples] == [(0, 0), (0, 1), (1, 0)]
    assert np.array_equal(samples[0].mask, chain[0].sampled)


def test_an_episode_of_a_foreign_endpoint_is_refused_by_name() -> None:
    group = Group(key="k", task_id="t", members=(scored(1.0, contexts=()), scored(0.0)), faults=())
    with pytest.raises(RunError, match="cannot be trained on"):
        to_samples(group, (0.5, -0.5))


def test_staleness_counts_from_the_oldest_token_of_the_group() -> None:
    group = Group(key="k", task_id="t", members=(scored(1.0, contexts=(context(step=7), context(step=4))),), faults=())
    assert oldest_step(group) == 4
    assert versions_of(group) == (version(4), version(7))


def test_samples_whose_advantage_is_too_small_are_left_out() -> None:
    members = (scored(1.0), scored(0.96), scored(0.01), scored(0.01))
    group = Group(key="k", task_id="t", members=members, faults=())
    kept = batch_samples([group], RLRecipe(min_advantage=0.495), 0)
    assert [sample.origin.member for sample in kept] == [0]
