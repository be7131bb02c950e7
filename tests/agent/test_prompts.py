from agent.scenes import clamp_task
from etude.agent.prompts import opening


def test_the_opening_is_the_prompt_and_the_numbered_files_in_path_order() -> None:
    task = clamp_task(workspace={"solution.py": "a\nb\n", "lib.py": "c\n"})
    (user,) = opening(task)
    assert user.role == "user"
    assert user.text == "Repair clamp.\nlib.py\n1\tc\nsolution.py\n1\ta\n2\tb\n"


def test_a_system_message_comes_first_if_there_is_one() -> None:
    assert [message.role for message in opening(clamp_task(), "Be brief.")] == ["system", "user"]
