import pytest

from etude.rl.credit import credit
from etude.rl.recipe import RLRecipe
from etude.types import Group
from rl.builders import scored


def groups() -> list[Group]:
    totals = ((1.0, 0.0, 0.0, 1.0), (0.9, 0.2, 0.1, 0.0), (0.0, 0.0, 0.0, 0.0))
    return [
        Group(key=str(number), task_id="t", members=tuple(scored(total) for total in row), faults=())
        for number, row in enumerate(totals)
    ]


def test_the_groups_own_mean_is_the_rule() -> None:
    assert credit(groups(), RLRecipe(credit="group_mean"), seed="")[0] == (0.5, -0.5, -0.5, 0.5)


def test_rejection_credits_what_solved_its_task_and_nothing_else() -> None:
    found = credit(groups(), RLRecipe(credit="rejection"), seed="")
    assert found == [(1.0, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)]


def test_shuffled_rewards_are_the_batchs_own_dealt_anew_and_centred_in_their_groups() -> None:
    found = credit(groups(), RLRecipe(credit="shuffled"), seed="0 1")
    assert found != credit(groups(), RLRecipe(credit="group_mean"), seed="")
    assert all(abs(sum(row)) < 1e-12 for row in found)
    assert found == credit(groups(), RLRecipe(credit="shuffled"), seed="0 1")
    assert found != credit(groups(), RLRecipe(credit="shuffled"), seed="0 2")


def test_shuffling_leaves_the_groups_as_they_were() -> None:
    given = groups()
    credit(given, RLRecipe(credit="shuffled"), seed="0 1")
    assert [[member.reward.total for member in group.members] for group in given] == [
        [member.reward.total for member in group.members] for group in groups()
    ]


def test_division_by_the_spread_blows_up_a_group_that_hardly_differs() -> None:
    close = Group(key="c", task_id="t", members=tuple(scored(total) for total in (1.0, 0.99, 1.0, 0.99)), faults=())
    (plain,), (divided,) = (credit([close], RLRecipe(credit=kind), seed="") for kind in ("group_mean", "group_std"))
    assert plain == pytest.approx((0.005, -0.005, 0.005, -0.005))
    assert divided == pytest.approx((0.866, -0.866, 0.866, -0.866), abs=1e-3)


def test_division_by_length_makes_a_long_wrong_answer_cheap() -> None:
    members = tuple(scored(total, tokens=tokens) for total, tokens in ((1.0, 10), (0.0, 10), (0.0, 100), (1.0, 20)))
    recipe = RLRecipe(credit="per_length", tokens_per_episode=10)
    (found,) = credit([Group(key="c", task_id="t", members=members, faults=())], recipe, seed="")
    assert found == pytest.approx((0.5, -0.5, -0.05, 0.25))
