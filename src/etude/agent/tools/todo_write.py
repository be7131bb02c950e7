"""A list of what is left to do."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from etude.agent.tool import Tool


class Status(StrEnum):
    """How far it is."""

    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    DONE = "done"


class Todo(Struct, frozen=True, forbid_unknown_fields=True):
    """One thing to do."""

    text: str
    status: Status = Status.PENDING


_MARKS = {Status.PENDING: " ", Status.IN_PROGRESS: ">", Status.DONE: "x"}


class TodoWrite(Tool):
    """Replace the list of things to do. Keep it short, and one of them in progress."""

    name = "todo_write"

    async def run(self, todos: list[Todo]) -> str:
        self.desk.todos = todos
        return "".join(f"[{_MARKS[todo.status]}] {todo.text}\n" for todo in todos) or "nothing is left to do"
