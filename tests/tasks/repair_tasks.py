"""A handful of tasks made by hand, for the tests of files, checks and counts."""

from __future__ import annotations

from etude.tasks.file import Entry
from etude.types import IOCheck, IOChecks, Task

RIGHT = "def clamp(x, low, high):\n    return max(low, min(x, high))\n"
FAULTY = "def clamp(x, low, high):\n    return max(low, max(x, high))\n"
CHECKS = (
    IOCheck(call="clamp(7, 0, 5)", expected="5", visible=True),
    IOCheck(call="clamp(5, 0, 5)", expected="5", visible=True),
    IOCheck(call="clamp(9, 0, 5)", expected="5", visible=False),
    IOCheck(call="clamp(3, 3, 3)", expected="3", visible=False),
)


def entry(
    text: str = FAULTY, *, checks: tuple[IOCheck, ...] = CHECKS, reference: str = RIGHT, fault: str = "sibling-call",
    package: str = "numbers", prompt: str = "Repair clamp.",
) -> Entry:  # fmt: skip
    task = Task.make(
        prompt=prompt,
        workspace={"solution.py": text},
        verifier=IOChecks(path="solution.py", checks=checks),
        category="repair",
        source={
            "builder": "mutate", "package": package, "version": "1.0", "module": package, "function": "clamp",
            "fault": fault, "licence": "MIT",
        },
    )  # fmt: skip
    return Entry(task=task, reference=reference)
