from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.packing import MicroBatch, pack
from etude.errors import RunError
from etude.types import Origin, Routes, Run, Sample, Version

V = Version(incarnation=1, n=0, step=0)


def sample(
    ids: list[int],
    sampled: list[int],
    *,
    key: str = "g",
    member: int = 0,
    experts: object = None,
    advantage: float = 1.0,
) -> Sample:
    mask = np.zeros(len(ids), bool)
    mask[sampled] = True
    routes = None
    if experts is not None:
        rows = np.asarray(experts, np.uint8).reshape(len(ids) - 1, 1, 1)
        routes = Routes(experts=rows, valid=np.ones(len(ids) - 1, bool))
    return Sample(
        ids=np.array(ids, np.int32), mask=mask,
        logprobs=np.where(mask, -0.5 - np.arange(len(ids)), 0).astype(np.float32), advantage=advantage,
        versions=(Run(start=0, version=V),), kv_epochs=(), routes=routes,
        origin=Origin(key=key, member=member, context=0),
    )  # fmt: skip


def packed(samples: list[Sample], max_cost: float = 1e9) -> tuple[MicroBatch, ...]:
    return pack(samples, max_cost=max_cost, pair_cost=0.001).micro_batches


def what_each_target_sees(micro: MicroBatch) -> dict[tuple[int, int], tuple[list[int], list[int], int]]:
    """(sample, place) -> ids that its forward sees, their positions, and the id that it predicts."""
    seen = {}
    for source, target, number, place in zip(micro.sources, micro.targets, micro.samples, micro.places, strict=True):
        tree = next(t for t in micro.trees if t.start <= source < t.start + t.prompt + sum(t.members))
        prompt = np.arange(tree.start, tree.start + tree.prompt)
        own = np.array([], int)
        at = tree.start + tree.prompt
        for length in tree.members:
            if at <= source < at + length:
                own = np.arange(at, source + 1)
            at += length
        rows = np.concatenate([prompt[prompt <= source], own])
        seen[int(number), int(place)] = (micro.ids[rows].tolist(), micro.positions[rows].tolist(), int(target))
    return seen


def test_members_with_the_same_prompt_share_it() -> None:
    (micro,) = packed([sample([5, 6, 7, 8], [2, 3]), sample([5, 6, 9], [2], member=1)])
    assert micro.ids.tolist() == [5, 6, 7]
    assert micro.positions.tolist() == [0, 1, 2]
    assert [(tree.start, tree.prompt, tree.members) for tree in micro.trees] == [(0, 2, (1, 0))]
    assert micro.sources.tolist() == [1, 2, 1]
    assert micro.targets.tolist() == [7, 8, 9]


def test_tokens_after_the_last_loss_position_are_dropped() -> None:
    (micro,) = packed([sample([5, 6, 7, 1, 2, 3], [2])])
    assert micro.ids.tolist() == [5, 6]


def test_other_prompts_other_groups_and_other_routes_are_not_shared() -> None:
    base = sample([5, 6, 7], [2], experts=[0, 1])
    for other, split in (
        (sample([5, 4, 7], [2], experts=[0, 1], member=1), 0),
        (sample([5, 6, 7], [2], experts=[0, 1], key="h"), 0),
        (sample([5, 6, 7], [2], experts=[1, 1], member=1), 1),
    ):
        found = pack([base, other], max_cost=1e9, pair_cost=0)
        assert (found.tokens, found.split_groups) == (4, split)
    same = sample([5, 6, 7], [2], experts=[0, 1], member=1)
    assert pack([base, same], max_cost=1e9, pair_cost=0).tokens == 2


def test_rows_that_were_not_recorded_do_not_prevent_sharing() -> None:
    first, second = sample([5, 6, 7], [2], experts=[0, 1]), sample([5, 6, 7], [2], experts=[3, 1], member=1)
    for one in (first, second):
        assert one.routes is not None
        one.routes.valid[0] = False
    found = pack([first, second], max_cost=1e9, pair_cost=0)
    assert found.tokens == 2
    assert found.micro_batches[0].valid.tolist() == [False, True]


def test_routes_follow_their_tokens() -> None:
    (micro,) = packed(
        [sample([5, 6, 7, 8], [2, 3], experts=[1, 2, 3]), sample([5, 6, 9, 4], [2, 3], experts=[1, 2, 0], member=1)]
    )
    assert micro.experts is not None
    assert micro.experts.reshape(-1).tolist() == [1, 2, 3, 0]


def test_a_tree_that_costs_too_much_is_cut_between_members() -> None:
    samples = [sample([5, 6, 7, 8, 9, 4], [2, 3, 4, 5], member=number) for number in range(4)]
    found = pack(samples, max_cost=8, pair_cost=0)
    assert [len(micro.ids) for micro in found.micro_batches] == [8, 8]
    assert found.unshared_tokens == 20


def test_a_sample_that_alone_costs_too_much_gets_its_own_micro_batch() -> None:
    found = packed([sample(list(range(30)), [29]), sample([1, 2], [1], key="h")], max_cost=10)
    assert sorted(len(micro.ids) for micro in found) == [1, 29]


def test_attention_counts_towards_the_cost() -> None:
    samples = [sample(list(range(20)), [19], key=str(number)) for number in range(4)]
    assert len(pack(samples, max_cost=80, pair_cost=0).micro_batches) == 1
    assert len(pack(samples, max_cost=80, pair_cost=0.1).micro_batches) == 2


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (sample([5, 6], []), "no sampled token"),
        (sample([5, 6], [0]), "nothing before it"),
        (sample([5, 6, 7], [2], experts=[1, 2]), None),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(broken: Sample, why: str | None) -> None:
    if why is None:
        assert broken.routes is not None
        import msgspec

        routes = msgspec.structs.replace(broken.routes, valid=broken.routes.valid[:1])
        broken, why = msgspec.structs.replace(broken, routes=routes), "route rows"
    with pytest.raises(RunError, match="sample g/0/0") as caught:
        packed([broken])
    assert why in str(caught.value)


def test_nothing_gives_no_micro_batch() -> None:
    assert pack([], max_cost=10, pair_cost=0).micro_batches == ()


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    found = []
    for group in range(draw(st.integers(1, 3))):
        prompts = [draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)) for _ in range(2)]
        for member in range(draw(st.integers(1, 4))):
            prompt = draw(st.sampled_from(prompts))
            rest = draw(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6))
            ids = [*prompt, 7, *(number for number, _ in rest)]
            sampled = [len(prompt), *(len(prompt) + 1 + i for i, (_, flag) in enumerate(rest) if flag)]
            found.append(sample(ids, sampled, key=f"g{group}", member=member, advantage=float(member)))
    return found


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([3.0, 15.0, 1e9]))
def test_every_sampled_token_is_trained_once_and_sees_exactly_its_own_past(
    samples: list[Sample], max_cost: float
) -> None:
    seen: dict[tuple[int, int], tuple[list[int], list[int], int]] = {}
    for micro in packed(samples, max_cost):
        more = what_each_target_sees(micro)
        assert len(more) == len(micro.targets)
        assert not seen.keys() & more.keys()
        seen |= more
        for number, place, advantage, logprob in zip(
            micro.samples, micro.places, micro.advantages, micro.logprobs, strict=True
        ):
            assert advantage == samples[number].advantage
            assert logprob == samples[number].logprobs[place]
    wanted = {
        (number, int(place)): (one.ids[:place].tolist(), list(range(place)), int(one.ids[place]))
        for number, one in enumerate(samples)
        for place in np.flatnonzero(one.mask)
    }
    assert seen == wanted


@settings(max_examples=20, deadline=None)
@given(batches())
def test_packing_is_deterministic(samples: list[Sample]) -> None:
    first, second = packed(samples, 12), packed(samples, 12)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.samples.tolist() == other.samples.tolist()
