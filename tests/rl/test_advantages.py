from etude.rl.advantages import advantages
from etude.types import Group
from rl.builders import scored


def test_advantages_are_reward_minus_group_mean_without_any_scaling() -> None:
    group = Group(key="k", task_id="t", members=tuple(scored(total) for total in (1.0, 0.0, 0.0, 1.0)), faults=())
    assert advantages(group) == (0.5, -0.5, -0.5, 0.5)


def test_a_group_of_equals_teaches_nothing() -> None:
    group = Group(key="k", task_id="t", members=tuple(scored(0.7) for _ in range(8)), faults=())
    assert all(abs(value) < 1e-12 for value in advantages(group))


def test_tiny_differences_stay_tiny() -> None:
    group = Group(key="k", task_id="t", members=(scored(1.0), scored(0.999)), faults=())
    assert max(advantages(group)) < 0.001
