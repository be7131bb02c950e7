"""Editing a file by exact text, and making one."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from etude.agent.tool import Tool, ToolError
from etude.code.edit import EditError, apply_edit
from etude.types import ToolErrorKind


class Edit(Struct, frozen=True, forbid_unknown_fields=True):
    """One of several."""

    old: str
    new: str
    line: int | None = None


class EditFile(Tool):
    """Replace `old` by `new` in a file. `old` must occur once; else `line` says on which line it begins. An empty `old`
    makes a new file of `new`. Several `edits` are made in order, all or none."""

    name = "edit_file"

    async def run(
        self,
        path: str,
        old: str | None = None,
        new: str | None = None,
        line: Annotated[int, Meta(description="the line on which `old` begins, if it occurs more than once")]
        | None = None,
        edits: list[Edit] | None = None,
    ) -> str:
        if (old is None or new is None) == (edits is None):
            missing = "old" if old is None else "new"
            what = f"edit_file needs {missing}" if edits is None else "give old and new, or edits"
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, what)
        wanted = edits if edits is not None else [Edit(old=old or "", new=new or "", line=line)]
        if not wanted:
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, "edits is empty")
        if not wanted[0].old and not await self._exists(path):
            text, wanted = wanted[0].new, wanted[1:]
        else:
            text = await self.read_text(path)
        for number, edit in enumerate(wanted, 1):
            try:
                text = apply_edit(text, edit.old, edit.new, edit.line)
            except EditError as error:
                where = f"edit {number}: " if edits is not None else ""
                raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{where}{error}") from error
        await self.write_text(path, text)
        return "ok"

    async def _exists(self, path: str) -> bool:
        try:
            await self.read_text(path)
        except FileNotFoundError:
            return False
        return True
