"""How an episode opens: the messages before the model's first reply.

The same function makes the openings of expert transcripts, so that what a model was tuned on is what it meets.
"""

from __future__ import annotations

from collections.abc import Mapping

from etude.code.view import numbered
from etude.protocols import Message
from etude.types import Task

MAX_LISTED = 60
"""Files that a request names."""


def opening(task: Task, system: str = "") -> tuple[Message, ...]:
    r"""A system message if there is one, then the task's prompt and its files, numbered, in path order.

    >>> opening(task)[-1].text
    'Repair clamp.\nsolution.py\n1\tdef clamp(x, low, high):\n2\t    return max(low, max(x, high))\n'
    """
    files = "".join(f"{path}\n{numbered(text)}" for path, text in sorted(task.workspace.items()))
    user = Message(role="user", text=f"{task.prompt}\n{files}")
    return (Message(role="system", text=system), user) if system else (user,)


def request(text: str, files: Mapping[str, str]) -> str:
    """What a person wants, and the names of the files that it is about."""
    names = sorted(files)
    more = f"\n... and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{text}\n\nFiles:\n" + "\n".join(names[:MAX_LISTED]) + more
