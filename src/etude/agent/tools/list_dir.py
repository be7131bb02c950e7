"""What a folder holds."""

from __future__ import annotations

from etude.agent.tool import Tool, ToolError
from etude.types import ToolErrorKind


class ListDir(Tool):
    """List the files and folders in a folder; folders end with a slash."""

    name = "list_dir"
    only_reads = True

    async def run(self, path: str = ".") -> str:
        start = "" if path.strip("/") in ("", ".") else f"{path.removeprefix('./').strip('/')}/"
        below = [file[len(start) :] for file in await self.desk.sandbox.list_files() if file.startswith(start)]
        if not below and start:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"no folder {path}")
        names = {f"{name.partition('/')[0]}/" if "/" in name else name for name in below}
        return "".join(f"{name}\n" for name in sorted(names)) or "(empty)"
