"""Reading a file, or some lines of it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from etude.agent.tool import Tool, ToolError
from etude.code.view import numbered, split_lines
from etude.types import ToolErrorKind

Line = Annotated[int, Meta(description="counted from 1, included")]


class ReadFile(Tool):
    """Show a file with line numbers."""

    name = "read_file"
    only_reads = True

    async def run(self, path: str, start: Line | None = None, end: Line | None = None) -> str:
        text = await self.read_text(path)
        if start is None and end is None:
            return numbered(text)
        lines = split_lines(text)
        first, last = start or 1, len(lines) if end is None else min(end, len(lines))
        if first < 1 or first > max(last, 1) or first > len(lines):
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, f"no lines {first} to {end}: {path} has {len(lines)}")
        return numbered("".join(f"{line}\n" for line in lines[first - 1 : last]), start=first)
