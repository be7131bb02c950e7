import pytest

from agent.scenes import clamp_task
from etude.rewards.combine import score
from etude.rewards.length import penalty
from etude.rewards.recipe import LengthRecipe, RewardRecipe
from etude.types import Effort, Episode, Evidence, Outcome

TASK = clamp_task()
EPISODE = Episode(
    episode_id="e",
    task_id=TASK.task_id,
    contexts=(),
    turns=(),
    outcome=Outcome.FINISHED,
    patch="",
    files={},
    effort=Effort(call_tokens=100, calls=3, turns=2),
    fault=None,
    timings={},
)


def evidence(*passed: bool, episode_id: str = "e") -> Evidence:
    return Evidence(task_id=TASK.task_id, episode_id=episode_id, passed=passed, detail="", wall_s=0.0)


def test_a_solved_task_is_worth_1_less_its_length() -> None:
    reward = score(TASK, EPISODE, evidence(True, True), RewardRecipe())
    assert reward.parts == {"verify": 1.0, "length": -penalty(EPISODE.effort, LengthRecipe())}
    assert reward.total == pytest.approx(sum(reward.parts.values()))
    assert 0.9 < reward.total < 1.0


@pytest.mark.parametrize("passed", [(True, False), (False, False), ()])
def test_anything_less_than_every_check_is_worth_nothing(passed: tuple[bool, ...]) -> None:
    assert score(TASK, EPISODE, evidence(*passed), RewardRecipe()).parts["verify"] == 0.0


def test_only_the_parts_that_the_recipe_names_count() -> None:
    reward = score(TASK, EPISODE, evidence(True), RewardRecipe(parts=("verify",)))
    assert (reward.total, dict(reward.parts)) == (1.0, {"verify": 1.0})


def test_evidence_about_another_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="does not speak of"):
        score(TASK, EPISODE, evidence(True, episode_id="other"), RewardRecipe())
