"""Files by name."""

from __future__ import annotations

from etude.agent.tool import Tool, ToolError
from etude.code.globs import matcher
from etude.types import ToolErrorKind


class Glob(Tool):
    """List the files whose path matches a pattern, such as `src/**/*.py`; without a slash any file's name."""

    name = "glob"
    only_reads = True

    async def run(self, pattern: str) -> str:
        try:
            matches = matcher(pattern)
        except ValueError as error:
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, str(error)) from error
        found = [path for path in await self.desk.sandbox.list_files() if matches(path)]
        return "".join(f"{path}\n" for path in found) or "no file matches"
