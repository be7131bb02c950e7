"""Searching in files."""

from __future__ import annotations

import json
from typing import Annotated

from msgspec import Meta

from etude.agent.tool import Tool, ToolError
from etude.types import ToolErrorKind

_NOT_FOUND, _NO_PROGRAM = 1, 127
_SAME_IN_PYTHON = """
import fnmatch, json, os, re, sys
given = json.load(sys.stdin)
try:
    pattern = re.compile(given["pattern"], re.IGNORECASE if given["ignore_case"] else 0)
except re.error as error:
    print(f"regex error: {error}", file=sys.stderr)
    sys.exit(2)
found, files = 1, []
if os.path.isfile(given["path"]):
    files = [given["path"]]
for folder, folders, names in os.walk(given["path"]):
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    files += [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]
for file in files:
    path = os.path.relpath(file)
    if given["glob"] and not fnmatch.fnmatch(os.path.basename(path), given["glob"]):
        continue
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if pattern.search(line):
                    found = 0
                    print(f"{path}:{number}:{line.rstrip(chr(10))}")
    except (OSError, UnicodeDecodeError):
        continue
sys.exit(found)
"""
"""What ripgrep prints, for machines that lack it."""


class Grep(Tool):
    """Search files for a regular expression; shows path, line number and line of each match."""

    name = "grep"
    only_reads = True

    async def run(
        self,
        pattern: str,
        path: str = ".",
        glob: Annotated[str, Meta(description="only files whose name matches, such as *.py")] | None = None,
        ignore_case: bool = False,
    ) -> str:
        argv = ["rg", "--line-number", "--no-heading", "--with-filename", "--sort=path", "--color=never"]
        argv += ["--ignore-case"] if ignore_case else []
        argv += [f"--glob={glob}"] if glob else []
        sandbox, timeout_s = self.desk.sandbox, self.desk.timeout_s
        done = await sandbox.exec([*argv, f"--regexp={pattern}", "--", path], timeout_s=timeout_s)
        if done.exit_code == _NO_PROGRAM:
            given = {"pattern": pattern, "path": path, "glob": glob, "ignore_case": ignore_case}
            done = await sandbox.run_python(_SAME_IN_PYTHON, stdin=json.dumps(given).encode(), timeout_s=timeout_s)
        if done.timed_out:
            raise TimeoutError
        text = done.stdout.decode(errors="replace")
        if text:
            return "".join(f"{line.removeprefix('./')}\n" for line in text.splitlines())
        if done.exit_code == _NOT_FOUND:
            return "no match"
        words = done.stderr.decode(errors="replace").strip() or f"grep ended with {done.exit_code}"
        raise ToolError(ToolErrorKind.INVALID_ARGUMENTS, words[:300])
