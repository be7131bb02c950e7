from etude.rl.credit import credit
from etude.types import Group
from rl.builders import scored


def groups() -> list[Group]:
    totals = ((1.0, 0.0, 0.0, 1.0), (0.9, 0.2, 0.1, 0.0), (0.0, 0.0, 0.0, 0.0))
    return [
        Group(key=str(number), task_id="t", members=tuple(scored(total) for total in row), faults=())
        for number, row in enumerate(totals)
    ]


def test_the_groups_own_mean_is_the_rule() -> None:
    assert credit(groups(), "group_mean", seed="")[0] == (0.5, -0.5, -0.5, 0.5)


def test_rejection_credits_what_solved_its_task_and_nothing_else() -> None:
    found = credit(groups(), "rejection", seed="")
    assert found == [(1.0, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)]


def test_shuffled_rewards_are_the_batchs_own_dealt_anew_and_centred_in_their_groups() -> None:
    found = credit(groups(), "shuffled", seed="0 1")
    assert found != credit(groups(), "group_mean", seed="")
    assert all(abs(sum(row)) < 1e-12 for row in found)
    assert found == credit(groups(), "shuffled", seed="0 1")
    assert found != credit(groups(), "shuffled", seed="0 2")


def test_shuffling_leaves_the_groups_as_they_were() -> None:
    given = groups()
    credit(given, "shuffled", seed="0 1")
    assert [[member.reward.total for member in group.members] for group in given] == [
        [member.reward.total for member in group.members] for group in groups()
    ]
