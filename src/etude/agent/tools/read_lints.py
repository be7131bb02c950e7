"""What a linter says."""

from __future__ import annotations

import shlex

from etude.agent.tool import Tool, ToolError
from etude.types import ToolErrorKind

_NO_PROGRAM = 127
_SYNTAX = """
import ast, sys
for path in sys.stdin.read().split("\\0"):
    try:
        with open(path, encoding="utf-8") as file:
            ast.parse(file.read(), path)
    except SyntaxError as error:
        print(f"{path}:{error.lineno}:{error.offset}: {error.msg}")
    except (OSError, ValueError) as error:
        print(f"{path}: {error}")
"""


class ReadLints(Tool):
    """Show what the project's linter says of some files or folders; of all without any."""

    name = "read_lints"
    only_reads = True

    async def run(self, paths: list[str] | None = None) -> str:
        chosen = [f"./{path}" if path.startswith("-") else path for path in paths or ["."]]
        own = shlex.split(self.desk.lint_command)
        argv = own or ["ruff", "check", "--output-format=concise", "--no-cache", "--quiet"]
        done = await self.desk.sandbox.exec([*argv, *chosen], timeout_s=self.desk.timeout_s)
        if done.exit_code == _NO_PROGRAM and own:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{own[0]} is not installed in the sandbox")
        if done.exit_code == _NO_PROGRAM:
            return await self._syntax(paths)
        if done.timed_out:
            raise TimeoutError
        text = (done.stdout + done.stderr).decode(errors="replace")
        return text or "no findings"

    async def _syntax(self, paths: list[str] | None) -> str:
        """Without a linter: what does not parse."""
        files = [path for path in await self.desk.sandbox.list_files() if path.endswith(".py")]
        chosen = [path for path in files if not paths or any(f"{path}/".startswith(f"{one}/") for one in paths)]
        if not chosen:
            return "no findings"
        given = "\0".join(chosen).encode()
        done = await self.desk.sandbox.run_python(_SYNTAX, stdin=given, timeout_s=self.desk.timeout_s)
        return done.stdout.decode(errors="replace") or "no findings"
