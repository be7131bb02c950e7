"""No attempt of attacks.txt is graded as solved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from agent.scenes import clamp_task
from etude.protocols import Sandbox
from etude.rewards import verify
from etude.sandbox.iochecks import CheckOutcome
from etude.types import IOCheck, IOChecks, Task
from rewards.test_verify import graded


def attacks() -> list[tuple[str, dict[str, str]]]:
    """(name, files) of each entry."""
    text = Path(__file__).with_name("attacks.txt").read_text()
    found = []
    for entry in re.split(r"^#! ", text, flags=re.MULTILINE)[1:]:
        head, _, body = entry.partition("\n")
        source, *others = re.split(r"^#\+ ", body, flags=re.MULTILINE)
        files = {"solution.py": source}
        for other in others:
            path, _, content = other.partition("\n")
            files[path] = content
        found.append((head.partition(" | ")[0], files))
    return found


ATTACKS = attacks()


@pytest.mark.parametrize(("name", "files"), ATTACKS, ids=[name for name, _ in ATTACKS])
def test_no_attempt_to_forge_a_grade_succeeds(name: str, files: dict[str, str]) -> None:
    evidence, _ = graded(files)
    assert not evidence.solved
    assert len(evidence.passed) == len(clamp_task().verifier.checks)


def test_there_are_many() -> None:
    assert len(ATTACKS) >= 30


NAIVE = """
import sys
sys.path.insert(0, ".")
checks = {checks!r}
import solution
for call, expected in checks:
    if not eval(call, vars(solution)) == eval(expected): sys.exit(1)
"""


async def judge_inside(
    sandbox: Sandbox, spec: IOChecks, checks: Sequence[IOCheck], timeout_s: float
) -> tuple[CheckOutcome, ...]:
    """What a grader does that trusts the process under test: expected values inside, `==`, and the exit code."""
    source = NAIVE.format(checks=[(check.call, check.expected) for check in checks])
    done = await sandbox.run_python(source, timeout_s=timeout_s)
    return tuple(
        CheckOutcome(call=check.call, expected=check.expected, got="", passed=done.exit_code == 0) for check in checks
    )


def test_a_grader_that_judges_inside_is_fooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "run_iochecks", judge_inside)
    fooled = {name for name, files in ATTACKS if graded(files)[0].solved}
    assert {
        "end the process with success",
        "a number that equals everything",
        "an object that lies about its class",
    } <= fooled


def test_without_hidden_checks_the_visible_ones_can_be_known_by_heart() -> None:
    spec = clamp_task().verifier
    shown = msgspec.structs.replace(spec, checks=tuple(check for check in spec.checks if check.visible))
    open_task = Task.make(
        prompt="Repair clamp.", workspace=clamp_task().workspace, verifier=shown, category="repair", source={}
    )
    assert graded(dict(ATTACKS)["know the visible checks by heart"], task=open_task)[0].solved
