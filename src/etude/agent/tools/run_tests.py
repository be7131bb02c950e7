"""Running the tests that a task shows."""

from __future__ import annotations

from etude.agent.tool import Tool, ToolError
from etude.code.view import failure_text
from etude.sandbox.iochecks import run_iochecks
from etude.types import ToolErrorKind, ToolResult


class RunTests(Tool):
    """Run the visible tests; shows the first failure."""

    name = "run_tests"

    async def run(self) -> ToolResult:
        spec = self.desk.task.verifier
        visible = [check for check in spec.checks if check.visible]
        if not visible:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, "this task has no visible tests")
        outcomes = await run_iochecks(self.desk.sandbox, spec, visible, self.desk.timeout_s)
        passed = all(outcome.passed for outcome in outcomes)
        self.desk.has_passed |= passed
        return ToolResult(text=failure_text(outcomes), passed=passed)
