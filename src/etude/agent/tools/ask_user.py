"""A question to the person who gave the task."""

from __future__ import annotations

from etude.agent.tool import Tool, ToolError
from etude.types import ToolErrorKind


class AskUser(Tool):
    """Ask the user, who may choose one of the options or answer freely. Only where their answer decides what to do."""

    name = "ask_user"

    async def run(self, question: str, options: list[str] | None = None) -> str:
        if self.desk.ask is None:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, "nobody is there to answer: decide yourself")
        return await self.desk.ask(question, options or ())
