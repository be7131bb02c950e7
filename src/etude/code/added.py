"""Lines that an agent's edits add and take away, from its calls or from a unified diff.

Known by the shape of their arguments, not by tools' names, of which there are too many:

    old text, new text       Etude's and Claude Code's edits, OpenCode's, several in a list
    path and whole content   a new or rewritten file
    *** Begin Patch, ---/+++ anywhere in an argument: apply_patch, alone or inside a shell command
    cat > path <<'EOF'       in a shell command

What it does not do: follow sed, scripts and formatters that an agent runs, or say whether an edit succeeded.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.code.patch import Change, PatchError, parse_patch
from etude.code.same_lines import match, normal
from etude.code.view import split_lines
from etude.types import ToolCall


@dataclass(frozen=True, slots=True)
class Edit:
    """What one edit did to one file."""

    path: str
    """As the agent wrote it: relative, or with folders of its machine before it."""
    added: tuple[str, ...]
    removed: tuple[str, ...] = ()
    is_whole: bool = False
    """The whole file was written: `added` is all of it, and what it held before is not known."""
    deletes: bool = False


_PATHS = ("file_path", "filePath", "path", "filename", "notebook_path", "file", "target_file")
_OLD = ("old_string", "oldString", "old", "old_str", "old_text", "search")
_NEW = ("new_string", "newString", "new", "new_str", "new_text", "replace", "new_source")
_WHOLE = ("content", "contents", "file_text", "text")
_HEREDOC = re.compile(
    r"(?:cat|tee)\b(?P<before>[^\n<|;&]*)<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)(?P<after>[^\n]*)\n"
    r"(?P<body>.*?)^\s*(?P=end)\s*$",
    re.DOTALL | re.MULTILINE,
)
_TARGET = re.compile(r">\s*['\"]?([^\s'\"<>|;&]+)")
_TEE = re.compile(r"^\s*(?:-a\s+)?([^\s'\"<>|;&-][^\s'\"<>|;&]*)")


def edits_of_call(call: ToolCall) -> list[Edit]:
    """In order. A call that could not be read, or that edits nothing, gives none."""
    if call.error is not None:
        return []
    arguments = call.arguments
    path = _first(arguments, _PATHS)
    found: list[Edit] = []
    several = arguments.get("edits")
    if path and isinstance(several, list | tuple):
        found += [edit for one in several if isinstance(one, Mapping) and (edit := _replaced(path, one)) is not None]
    elif path and (edit := _replaced(path, arguments)) is not None:
        found.append(edit)
    elif path and (whole := _first(arguments, _WHOLE)) is not None:
        found.append(Edit(path, tuple(split_lines(whole)), is_whole=True))
    if found:
        return found
    for text in _texts(arguments):
        found += edits_of_text(text)
    return found


def edits_of_text(text: str) -> list[Edit]:
    """Of a patch, or of a shell command that holds one or writes files from here-documents."""
    if "*** Begin Patch" in text:
        begin, end = text.index("*** Begin Patch"), text.find("*** End Patch")
        return edits_of_patch(text[begin : end + len("*** End Patch")] if end > 0 else text[begin:])
    if "\n@@" in text and "+++ " in text:
        return edits_of_patch(text)
    found = []
    for doc in _HEREDOC.finditer(text):
        target = _TARGET.search(doc["after"]) or _TARGET.search(doc["before"]) or _TEE.match(doc["before"])
        appends = ">>" in doc["after"] + doc["before"] or " -a " in doc["before"]
        if target is not None:
            found.append(Edit(target[1], tuple(split_lines(doc["body"])), is_whole=not appends))
    return found


def edits_of_patch(text: str) -> list[Edit]:
    """Of a unified diff or a *** Begin Patch; none if it cannot be read."""
    try:
        return [edit for change in parse_patch(text) for edit in _edits_of_change(change)]
    except PatchError:
        return []


def _edits_of_change(change: Change) -> Iterator[Edit]:
    path = change.moved_to or change.path
    if change.kind == "delete" and not change.hunks:
        yield Edit(change.path, (), deletes=True)
    for hunk in change.hunks:
        yield Edit(path, *_difference(hunk.old, hunk.new))


def _replaced(path: str, arguments: Mapping[str, Any]) -> Edit | None:
    old, new = _first(arguments, _OLD), _first(arguments, _NEW)
    if new is None:
        return None
    if not old:  # a new file, or a notebook's cell
        return Edit(path, tuple(split_lines(new)))
    return Edit(path, *_difference(split_lines(old), split_lines(new)))


def _difference(old: Sequence[str], new: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines that are new, and lines that are gone. A line that was only formatted is neither."""
    added: list[str] = []
    removed: list[str] = []
    before, after = [normal(line) for line in old], [normal(line) for line in new]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind != "equal":
            hits = match(old[a:b], new[c:d])
            removed += [line for place, line in enumerate(old[a:b]) if place not in hits]
            added += [line for line, hit in zip(new[c:d], hits, strict=True) if hit is None]
    return tuple(added), tuple(removed)


def _first(arguments: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((arguments[name] for name in names if isinstance(arguments.get(name), str)), None)


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and depth < 8:
        for item in value.values():
            yield from _texts(item, depth + 1)
    elif isinstance(value, list | tuple) and depth < 8:
        for item in value:
            yield from _texts(item, depth + 1)
