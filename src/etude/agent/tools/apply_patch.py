"""Applying a patch to several files at once."""

from __future__ import annotations

from etude.agent.tool import Tool, ToolError, check_path
from etude.code.patch import PatchError, apply_patch, parse_patch
from etude.types import ToolErrorKind


class ApplyPatch(Tool):
    """Apply a patch: a unified diff, or `*** Begin Patch` ... `*** End Patch` with `*** Add File:`, `*** Update File:`
    and `*** Delete File:` sections. All of it is applied, or nothing."""

    name = "apply_patch"

    async def run(self, patch: str) -> str:
        try:
            changes = parse_patch(patch)
        except PatchError as error:
            raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, str(error)) from error
        files: dict[str, str | None] = {}
        for change in changes:
            for path in (change.path, change.moved_to or change.path):
                check_path(path)
                if path not in files:
                    files[path] = await self._text(path)
        try:
            after = apply_patch(files, changes)
        except PatchError as error:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, str(error)) from error
        done = []
        for path, text in after.items():
            if text == files.get(path):
                continue
            if text is None:
                await self._delete(path)
            else:
                await self.write_text(path, text)
            done.append(f"{'D' if text is None else 'A' if files.get(path) is None else 'M'} {path}")
        return "\n".join(done) or "nothing to change"

    async def _text(self, path: str) -> str | None:
        try:
            return await self.read_text(path)
        except FileNotFoundError:
            return None

    async def _delete(self, path: str) -> None:
        done = await self.desk.sandbox.exec(["rm", "--", f"./{path}"], timeout_s=self.desk.timeout_s)
        if done.exit_code:
            raise ToolError(ToolErrorKind.UNEXPECTED_ENVIRONMENT, f"{path} cannot be deleted")
