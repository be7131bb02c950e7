"""Ending an episode."""

from __future__ import annotations

from etude.agent.tool import NOT_PASSED, Tool, ToolError
from etude.types import ToolErrorKind


class Finish(Tool):
    """End the work with a message for the user."""

    name = "finish"

    async def run(self, message: str) -> str:
        if self.desk.finish_needs_pass and not self.desk.has_passed:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, NOT_PASSED)
        self.desk.is_finished = True
        return "ok"
