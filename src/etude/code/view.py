"""How text is shown to a model: numbered files and the answer of a test run.

Both live here because the agent's tools and the expert transcripts for fine-tuning must show the very same characters.
Nothing here runs or reads anything; cutting a whole tool answer to its limit is the agent's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_VALUE_CHARS = 60
"""Characters of a call or a value that a failure shows."""


class CheckedCall(Protocol):
    """One check that was run; `sandbox.iochecks.CheckOutcome` is one."""

    @property
    def call(self) -> str: ...
    @property
    def expected(self) -> str: ...
    @property
    def got(self) -> str: ...
    @property
    def passed(self) -> bool: ...


def split_lines(text: str) -> list[str]:
    r"""Lines without their line feeds. Only "\n" ends a line, as in an editor (`str.splitlines` also breaks at form
    feeds and others, and its numbers would then be wrong)."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def numbered(text: str, start: int = 1) -> str:
    r"""Each line as its number, a tab, the line and a line feed.

    >>> numbered("def f():\n    return 1\n")
    '1\tdef f():\n2\t    return 1\n'
    """
    return "".join(f"{number}\t{line}\n" for number, line in enumerate(split_lines(text), start))


def cut(text: str, limit: int) -> str:
    """At most `limit` (3 or more) characters, the last three of them dots where something is missing."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def failure_text(outcomes: Sequence[CheckedCall]) -> str:
    r"""What run_tests answers: `ok`, or the first failing check and how many fail.

    The texts are cut to MAX_VALUE_CHARS each: `clamp(7, 0, 5) -> 7, expected 5\n3 of 8 fail`.
    """
    failing = [outcome for outcome in outcomes if not outcome.passed]
    if not failing:
        return "ok"
    first = failing[0]
    call, got, expected = (cut(text, MAX_VALUE_CHARS) for text in (first.call, first.got, first.expected))
    return f"{call} -> {got}, expected {expected}\n{len(failing)} of {len(outcomes)} fail"
